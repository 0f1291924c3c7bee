"""Sequences dealt to ranks: the tokens of one rank, from a cache that is as large as all of theirs.

Mutants that fail: rows of a hand-off are asked of rank 0, or told to the next rank; followers are not told that
sequences are dealt; a rank attends the rows of all; a rank without rows leaves the exchange out; rows of a tree keep
their slots of the node; copies of other ranks' rows are made too; a prefix is looked for on rank 0 alone; a sequence
that goes to another rank takes the count of its cached rows along.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

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
from tests.support.ranks_matrix import FORMATS, PROMPT, SPECS, UNEQUAL, OneRank, requests
from tests.support.thread_ranks import ranks_runner
from tests.support.tiny_deepseek import ranks_deepseek_spec, write_folder
from tests.support.tiny_model import tiny_config, tiny_request

pytestmark = needs_kernels

TOKENS = 640  # that the cache of a rank holds


def test_more_sequences_than_a_rank_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MTP modules draft trees, with KV of their own on rank 0. The second turn finds prompts cached on both ranks."""
    folder = write_folder(tmp_path / "tiny", spec=ranks_deepseek_spec())
    options = {"model": str(folder), "drafter": "mtp", "tree": "dynamic", "head_check": False, "max_model_len": 200}
    options |= {"kv_cache_tokens": TOKENS}
    asked = [tiny_request([*range(3 + i, 130 + i)], index=i, max_tokens=20, temperature=float(i % 2)) for i in range(6)]
    alone = run(build_runner(NodeConfig.model_validate(options)), asked)
    runner = build_runner(NodeConfig.model_validate(options | {"tp": 2, "attention_dp": 2}))
    lived = places(runner, monkeypatch)
    for _ in range(2):
        assert run(runner, asked, batch=6) == alone
    assert sum(len(request.prompt_token_ids) for request in asked) > TOKENS
    assert [part for part, _ in lived[:6]] == [0, 1] * 3
    assert {part for part, cached in lived[6:] if cached} == {0, 1}
    held = full_before_it_has_pages(runner, monkeypatch)
    assert run(runner, asked[:1]) == alone[:1]
    assert lived[-1] == (1 - runner.allocator.part_of(held[0]), 0)
    runner.allocator.release(held)
    runner.close()


@dataclass(frozen=True)
class Dealt:
    """Nodes of so many ranks, and the pools of each; with one pool, heads are cut."""

    degrees: tuple[int, int]
    pools: tuple[int, int]
    dtype: str = "bf16"

    def __str__(self) -> str:
        prefill, decode = (f"{degree} in {pools}" for degree, pools in zip(self.degrees, self.pools, strict=True))
        return f"{prefill} to {decode}-{self.dtype}"


FEW = [Dealt((2, 4), (2, 4))]
EVERY = [
    Dealt(degrees, pools, dtype)
    for degrees, dtype in itertools.product(UNEQUAL, FORMATS)
    for pools in sorted({degrees, (1, degrees[1]), (degrees[0], 1)} - {(1, 1)})
]


@pytest.mark.cases("case", FEW, EVERY, ids=str)
async def test_rows_go_to_the_rank_of_their_sequence(
    case: Dealt, one_rank: OneRank, same_outcomes: Callable[..., bool]
) -> None:
    """What crosses is that of one rank. The second turn finds prompts cached on both sides."""
    name = "latents and experts"
    together = one_rank.outcomes(name, case.dtype, "mtp")
    options = one_rank.options(name, "mtp") | {"prefill_chunk_tokens": 24, "rank_links": "through-0"}
    runners = [
        ranks_runner(
            degree, SPECS[name], case.dtype, **options, attention_dp=pools, page_size=size, decodes=size == 16
        )
        for degree, pools, size in zip(case.degrees, case.pools, (8, 16), strict=True)
    ]  # fmt: skip
    row = runners[0].kv.layout.token_bytes(LayerOwner.TARGET)
    async with pair(tiny_config(case.dtype, options), *runners) as nodes:
        # Whole pages on both sides; beside another sequence one may go where its prefix is not cached.
        for cached, concurrent in ((0, 2), (48, 1)):
            apart = await nodes.run(requests(), concurrent=concurrent)
            assert same_outcomes([outcome for outcome, _ in apart], together)
            for _, answer in apart:
                assert answer.handed_off is not None
                assert answer.handed_off.bytes.target_kv == (PROMPT - cached) * row
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
