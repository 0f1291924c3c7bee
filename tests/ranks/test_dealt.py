"""Sequences dealt to ranks: the tokens of one rank, from a cache that is as large as all of theirs.

Mutants that fail: rows of a hand-off are asked of rank 0, or told to the next rank; followers are not told that
sequences are dealt; a rank attends the rows of all; a rank without rows leaves the exchange out; rows of a tree keep
their slots of the node; copies of other ranks' rows are made too; a prefix is looked for on rank 0 alone; a sequence
that goes to another rank takes the count of its cached rows along.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.assembly.build import build_runner
from paceline.config import NodeConfig
from paceline.engine.model_runner import ModelRunner
from paceline.kvcache.allocator import PageRef
from paceline.kvcache.layout import LayerOwner
from paceline.request import SequenceRequest
from paceline.spec_decode.sequence import Sequence
from tests.support.exactness import run
from tests.support.needs import needs_kernels
from tests.support.node_pair import pair
from tests.support.thread_ranks import family_spec, ranks_runner
from tests.support.tiny_deepseek import ranks_deepseek_spec, write_folder, write_mtp_folder
from tests.support.tiny_model import tiny_config, tiny_request

pytestmark = needs_kernels

TOKENS = 640  # that the cache of a rank holds


def test_more_sequences_than_a_rank_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MTP modules draft trees, with KV of their own on rank 0. The second turn finds prompts cached on both ranks."""
    folder = write_folder(tmp_path / "tiny", spec=ranks_deepseek_spec())
    options = {"model": str(folder), "drafter": "mtp", "tree": "dynamic", "head_check": False, "max_model_len": 200}
    options |= {"kv_cache_tokens": TOKENS}
    requests = [
        tiny_request([*range(3 + i, 130 + i)], index=i, max_tokens=20, temperature=float(i % 2)) for i in range(6)
    ]
    alone = run(build_runner(NodeConfig.model_validate(options)), requests)
    runner = build_runner(NodeConfig.model_validate(options | {"tp": 2, "attention_dp": 2}))
    lived = places(runner, monkeypatch)
    for _ in range(2):
        assert run(runner, requests, batch=6) == alone
    assert sum(len(request.prompt_token_ids) for request in requests) > TOKENS
    assert [part for part, _ in lived[:6]] == [0, 1] * 3
    assert {part for part, cached in lived[6:] if cached} == {0, 1}
    held = full_before_it_has_pages(runner, monkeypatch)
    assert run(runner, requests[:1]) == alone[:1]
    assert lived[-1] == (1 - runner.allocator.part_of(held[0]), 0)
    runner.allocator.release(held)
    runner.close()


async def test_rows_go_to_the_rank_of_their_sequence(tmp_path: Path) -> None:
    """Nodes of two and four ranks; what crosses is that of one. The second turn finds prompts cached on both sides."""
    spec = family_spec("deepseek_v3")
    write_mtp_folder(tmp_path / "heads", 1, torch.bfloat16, spec=spec)
    options: dict[str, object] = {
        "drafter": "mtp", "drafter_path": str(tmp_path / "heads"), "head_check": False, "handoff": "draft_kv",
        "prefill_chunk_tokens": 16,
    }  # fmt: skip
    requests = [tiny_request(list(range(3 + i, 60 + i)), index=i, temperature=float(i % 2)) for i in range(3)]
    alone = ranks_runner(1, spec, "bf16", **options)
    expected = [(outcome.token_ids, outcome.logit_bits) for outcome in run(alone, requests)]
    prefill = ranks_runner(2, spec, "bf16", **options, attention_dp=2, page_size=8, decodes=False)
    decode = ranks_runner(4, spec, "bf16", **options, attention_dp=4, page_size=16)
    async with pair(tiny_config("bf16", options), prefill, decode) as nodes:
        # Whole pages on both sides; beside another sequence one may go where its prefix is not cached.
        for cached, concurrent in ((0, 2), (48, 1)):
            apart = await nodes.run(requests, concurrent=concurrent)
            assert [(outcome.token_ids, outcome.logit_bits) for outcome, _ in apart] == expected
            for request, (_, answer) in zip(requests, apart, strict=True):
                assert answer.handed_off is not None
                rows = len(request.prompt_token_ids) - cached
                assert answer.handed_off.bytes.target_kv == rows * alone.kv.layout.token_bytes(LayerOwner.TARGET)
        await nodes.all_released()


def full_before_it_has_pages(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> list[PageRef]:
    """Others take all pages of the rank that a sequence was to live on, while it waits for pages; they are returned."""
    held: list[PageRef] = []
    new_sequence, allocator, prefix = runner.new_sequence, runner.allocator, runner.prefix
    assert prefix is not None

    def waiting(request: SequenceRequest) -> Sequence:
        seq = new_sequence(request)
        assert seq.cached_tokens
        prefix.evict(1000, seq.table.part)
        held.extend(allocator.allocate(allocator.free_in(seq.table.part), seq.table.part))
        return seq

    monkeypatch.setattr(runner, "new_sequence", waiting)
    return held


def places(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Filled with the part of the pool in which each sequence gets its pages, and its cached tokens."""
    lived: list[tuple[int, int]] = []
    take_pages = runner.take_pages

    def watched(seq: Sequence, num_slots: int) -> None:
        take_pages(seq, num_slots)
        lived.append((seq.table.part, seq.cached_tokens))

    monkeypatch.setattr(runner, "take_pages", watched)
    return lived
