"""A stream that comes without draft state drafts from its tokens, until its drafter has caught up."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from paceline.config import NodeConfig
from paceline.spec_decode.sequence import Sequence
from prefill_node.engine.sends import Sends
from tests.support.exactness import run
from tests.support.needs import needs_kernels
from tests.support.node_pair import pair
from tests.support.tiny_model import tiny_prefill_runner, tiny_request, tiny_runner
from tests.support.untrained_heads import write_tiny_head

CASES: dict[str, dict[str, Any]] = {
    "eagle3": {"drafter": "eagle3"},
    "eagle3 hidden": {"drafter": "eagle3", "handoff": "hidden_states"},
    "mtp x3": {"drafter": "mtp", "mtp_modules": 3},
    "draft_model": {"drafter": "draft_model"},
}


@needs_kernels
@pytest.mark.parametrize("case", CASES)
async def test_the_drafter_catches_up_and_no_text_changes(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"num_draft_tokens": 3} | CASES[case]
    if options["drafter"] != "mtp":
        write_tiny_head(tmp_path / "heads", options["drafter"])
        options["drafter_path"] = str(tmp_path / "heads")
    monkeypatch.setattr(Sends, "_send_draft", lambda *args, **named: None)
    monkeypatch.setattr(Sends, "_send_hidden", lambda *args, **named: None)
    prompts = [[3 + (7 * i + p) % 150 for p in range(20 + 9 * i)] for i in range(3)]
    requests = [tiny_request(p, index=i, max_tokens=60, temperature=float(i % 2)) for i, p in enumerate(prompts)]
    plain = run(tiny_runner("bf16", drafter="none"), requests)
    prefill = tiny_prefill_runner("bf16", page_size=16, **options)
    decode = tiny_runner("bf16", page_size=8, **options)
    ended: list[Sequence] = []
    release = decode.release

    def released(seq: Sequence) -> None:
        ended.append(seq)
        release(seq)

    monkeypatch.setattr(decode, "release", released)
    starts: dict[int, list[int]] = {}
    recover = decode.recover_draft

    def recovered(seq: Sequence, start: int, most: int) -> int:
        starts.setdefault(id(seq), []).append(start)
        return recover(seq, start, most)

    monkeypatch.setattr(decode, "recover_draft", recovered)
    config = NodeConfig.model_validate({"model": "tiny", "prefill_chunk_tokens": 5, "max_running": 8} | options)
    async with pair(config, prefill, decode) as nodes:
        for _ in range(2):  # the second time a part of each prompt is cached, draft rows included
            async with asyncio.timeout(120):
                apart = await nodes.run(requests, concurrent=3)
            await nodes.all_released()
            for (outcome, _answer), expected in zip(apart, plain, strict=True):
                assert (outcome.token_ids, outcome.logit_bits) == (expected.token_ids, expected.logit_bits)
        engine = nodes.decode_node._engine
        assert (engine.missing_drafts, engine.recovered_drafts) == (6, 6)
        assert engine.pages.integrity == ""
    assert [seq.cached_tokens > 0 for seq in ended] == [False] * 3 + [True] * 3
    for seq in ended:
        assert starts[id(seq)][0] == seq.cached_tokens
        rounds = seq.stats.rounds_by_drafter
        assert rounds[decode.drafter.name] > rounds.get("ngram", 0) > 0 or options["drafter"] == "draft_model"


async def test_a_stream_that_ends_first_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sends, "_send_draft", lambda *args, **named: None)
    prefill = tiny_prefill_runner("bf16", drafter="mtp")
    decode = tiny_runner("bf16", drafter="mtp")
    config = NodeConfig(model="tiny", prefill_chunk_tokens=2, drafter="mtp")
    async with pair(config, prefill, decode) as nodes:
        answer = await nodes.generate(tiny_request([3 + p % 150 for p in range(100)], max_tokens=4))
        await nodes.all_released()
        engine = nodes.decode_node._engine
        assert len(answer.token_ids) == 4
        assert (engine.missing_drafts, engine.recovered_drafts) == (1, 0)
        assert engine._scheduler.next_recovery() is None
