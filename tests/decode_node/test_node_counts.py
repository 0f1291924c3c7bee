"""What a decode node tells routers of its drafting."""

from __future__ import annotations

import pytest

from decode_node.node import DecodeNode
from paceline.config import NodeConfig
from paceline.v1 import node_pb2
from tests.support.node_pair import Answer, Pair, pair
from tests.support.tiny_model import tiny_request, tiny_runner

OPTIONS: dict[str, object] = {"drafter": "mtp", "drafters": "ngram,suffix", "num_draft_tokens": 3}


def counts(node: DecodeNode) -> tuple[int, dict[str, int]]:
    """Missing drafts, and rounds of each drafter that copies."""
    found = node.counts()
    return found["missing_drafts"], {name: sum(both) for name, both in found["copies"].items()}


async def test_missing_drafts_and_copies_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    prefill = Pair._prefill

    async def without_draft(
        self: Pair, sequence: node_pb2.SequenceRequest, reserved: node_pb2.Reserved, answer: Answer
    ) -> None:
        """The prefill node takes the request for one that drafts without state."""
        sequence.speculation.drafter = "ngram"
        await prefill(self, sequence, reserved, answer)

    config = NodeConfig.model_validate({"model": "tiny"} | OPTIONS)
    async with pair(config, tiny_runner(**OPTIONS), tiny_runner(**OPTIONS)) as nodes:
        await nodes.generate(tiny_request())
        assert counts(nodes.decode_node) == (0, {})
        assert nodes.prefill_node.counts() == {"refused_calls": 0, "refused_messages": 0}
        monkeypatch.setattr(Pair, "_prefill", without_draft)
        answer = await nodes.generate(tiny_request(index=1))
        missing, copies = counts(nodes.decode_node)
        assert missing == 1
        assert set(copies) == {"ngram"}  # drafts in place of the heads
        assert 0 < copies["ngram"] <= len(answer.accepted_per_round)
