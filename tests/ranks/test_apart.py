"""Prefill and decode nodes of several ranks over real gRPC and gloo: what crosses knows nothing of ranks.

Mutants that fail: a KV head that two ranks hold is sent by both; through rank 0, it is taken twice. One that fails with
one KV head: rows are written past a pool whose rank 0 has all heads. One that fails with latents: they are scattered to
rank 0 alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from kv_transfer.lanes.leader import Lanes
from kv_transfer.lanes.pairing import make_lanes
from paceline.kvcache.layout import LayerOwner
from tests.support.needs import needs_kernels
from tests.support.node_pair import pair
from tests.support.ranks_matrix import FORMATS, LINKS, PROMPT, SPECS, UNEQUAL, WHOLE, OneRank, drafters, requests
from tests.support.thread_ranks import ranks_runner
from tests.support.tiny_model import tiny_config

pytestmark = needs_kernels
HIDDEN = ("mtp", "eagle", "eagle3")  # drafters whose hidden rows may cross in place of their KV


@dataclass(frozen=True)
class Apart:
    """A prefill and a decode node."""

    model: str
    degrees: tuple[int, int]
    rank_links: str
    drafter: str = "eagle3"
    handoff: str = "draft_kv"
    dtype: str = "bf16"
    kv_dtype: str = "auto"

    def __str__(self) -> str:
        prefill, decode = self.degrees
        own = f"{self.drafter} {self.handoff} {self.dtype} KV {self.kv_dtype}"
        return f"{self.model}-{prefill} to {decode}-{self.rank_links}-{own}"

    @property
    def copies_cross(self) -> int:
        """How often each head or latent crosses: with lanes, as often as ranks keep it (algorithms.md H4)."""
        spec, degree = SPECS[self.model], self.degrees[1]
        if self.rank_links != "direct":
            return 1
        return degree if spec.mla else max(1, degree // spec.num_kv_heads)


FEW = [
    *(Apart("2 KV heads", (8, 2), links) for links in LINKS),
    *(Apart("1 KV head", (1, 4), links, handoff="hidden_states") for links in LINKS),
    Apart("2 KV heads", (2, 4), "direct", kv_dtype="int8"),
    *(Apart("latents and experts", (4, 2), links, "mtp") for links in LINKS),
]


def every() -> list[Apart]:
    """Lanes and hand-offs of drafters take turns, so that each drafter has all of them in each number format."""
    found = list(FEW)
    for model, dtype, (i, degrees) in itertools.product(WHOLE, FORMATS, enumerate(UNEQUAL)):
        for j, drafter in enumerate(drafters(model)):
            handoff = "hidden_states" if drafter in HIDDEN and (i // 2 + j) % 2 else "draft_kv"
            found.append(Apart(model, degrees, LINKS[(i + j) % 2], drafter, handoff, dtype))
    return found


def early_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A follower of the prefill node tells its peer something at once. Mutant: lanes are made before the link's first
    message is queued."""

    def early(*args: Any, **kwargs: Any) -> Lanes | None:
        args[4].set("early", b"")
        return make_lanes(*args, **kwargs)

    monkeypatch.setattr("prefill_node.links.make_lanes", early)


@pytest.mark.cases("case", FEW, every(), ids=str)
async def test_degrees_may_differ(
    case: Apart,
    one_rank: OneRank,
    same_outcomes: Callable[..., bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each prompt is sent twice, so that the second finds its prefix cached on both sides."""
    spec = SPECS[case.model]
    together = one_rank.outcomes(case.model, case.dtype, case.drafter, kv_dtype=case.kv_dtype)
    options = one_rank.options(case.model, case.drafter) | {
        "handoff": case.handoff, "prefill_chunk_tokens": 24, "kv_dtype": case.kv_dtype, "rank_links": case.rank_links,
    }  # fmt: skip
    runners = [
        ranks_runner(degree, spec, case.dtype, **options | {"page_size": size, "decodes": size == 16})
        for degree, size in zip(case.degrees, (8, 16), strict=True)
    ]
    row = case.copies_cross * runners[0].kv.layout.token_bytes(LayerOwner.TARGET)
    early_lanes(monkeypatch)
    async with pair(tiny_config(case.dtype, options), *runners) as nodes:
        for cached in (0, 48):  # whole pages on both sides
            apart = await nodes.run(requests(), concurrent=2)
            assert same_outcomes([outcome for outcome, _ in apart], together)
            for _, answer in apart:
                assert answer.handed_off is not None
                assert answer.handed_off.bytes.target_kv == (PROMPT - cached) * row
        await nodes.all_released()
