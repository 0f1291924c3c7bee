"""The injector: a fault counts when it is proven to have hit something."""

from __future__ import annotations

import os

import pytest

from tests.chaos.faults import ATTEMPTS, Injector, Node, NothingThere, Planned


class Scripted(Injector):
    """Each attempt says the next of these, or that nothing was there."""

    said: list[str]

    async def _do(self, planned: Planned, nodes: list[Node]) -> str:
        if proof := self.said.pop(0):
            return proof
        raise NothingThere("no packet came in on 7 sockets")


@pytest.mark.parametrize(
    ("said", "proofs", "skipped"),
    [
        (["hit"], ["hit"], 0),
        (["", "hit"], ["hit"], 0),
        ([""] * ATTEMPTS, [], 1),
    ],
)
async def test_a_fault_that_hit_nothing_is_done_again_and_does_not_count(
    said: list[str], proofs: list[str], skipped: int
) -> None:
    async def works(node: Node) -> bool:
        return True

    injector = Scripted(lambda: [os.getpid()], lambda: [Node("decode-0", "decode", os.getpid())], works)
    injector.said = list(said)
    await injector.run([Planned(at_s=0.0, kind="pause", draw=0.0, hold=0.0)], origin=0.0)
    assert [fault.proof for fault in injector.faults] == proofs
    assert [fault.problem for fault in injector.faults] == [""] * len(proofs)
    assert injector.skipped["pause"] == skipped
    assert injector.said == []
