"""A model of any number of ranks gives the bits of one rank, however its rows are batched.

Mutants that fail: branches added in the order of the ranks, branches rounded to bf16, a sum of an all-reduce, a
follower that leaves a command out, a KV head that two ranks hold taken twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.assembly.selfcheck import logits_in_chunks
from paceline.engine.model_runner import ModelRunner
from paceline.kvcache.table import PageTable
from tests.support.exactness import run
from tests.support.needs import needs_kernels
from tests.support.thread_ranks import ranks_runner, ranks_spec
from tests.support.tiny_model import tiny_request
from tests.support.untrained_heads import write_tiny_head

pytestmark = needs_kernels

VOCAB = 519
ROWS = 41


@pytest.fixture(scope="module", params=[(8, "fp32"), (2, "bf16")], ids=["heads-8-fp32", "heads-2-bf16"])
def runners(request: pytest.FixtureRequest) -> Iterator[dict[int, ModelRunner]]:
    """Runners of 1, 2, 4 and 8 ranks of a model with biases and norms on heads, whose KV heads two of them share."""
    kv_heads, dtype = request.param
    spec = ranks_spec(
        kv_heads, attention_bias=True, attention_out_bias=True, mlp_bias=True, qk_norm=True, windows=(0, 16),
        tie_word_embeddings=False,
    )  # fmt: skip
    made = {degree: ranks_runner(degree, spec, dtype, drafter="none") for degree in (1, 2, 4, 8)}
    yield made
    for runner in made.values():
        runner.close()


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=st.sets(st.integers(1, ROWS - 1), max_size=4), seed=st.integers(0, 999))
def test_logits_and_rows(runners: dict[int, ModelRunner], cuts: set[int], seed: int) -> None:
    ids = [(7919 * i + seed) % VOCAB for i in range(ROWS)]
    ends = [*sorted(cuts), ROWS]
    chunks = tuple(end - start for start, end in zip([0, *ends], ends, strict=False))
    seen = {}
    for degree, runner in runners.items():
        assert runner.bit_exact
        logits = logits_in_chunks(runner.model, runner.kv, runner.allocator, runner.attention, ids, chunks)
        seen[degree] = logits, rows_of(runner)
    for logits, rows in seen.values():
        assert torch.equal(logits, seen[1][0])
        for one, other in zip(rows, seen[1][1], strict=True):
            assert torch.equal(one, other)


def rows_of(runner: ModelRunner) -> list[torch.Tensor]:
    """What the pool gives, after rows were moved, stored and read again."""
    kv, layers = runner.kv, range(2)
    table = PageTable(runner.allocator, kv.page_size)
    try:
        table.ensure(3 * ROWS)
        slots = table.slots.to(torch.int64)
        first, second, third = slots[:ROWS], slots[ROWS : 2 * ROWS], slots[2 * ROWS : 3 * ROWS]
        before = kv.gather(layers, first)
        kv.copy_slots(layers, first, first.flip(0))
        flipped = kv.gather(layers, first)
        kv.scatter(layers, second, before)
        kv.scatter(range(1, 2), third, before[before.numel() // 2 :])
        starts, lengths = torch.tensor([0, 5], dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
        kv.keep_paths(layers, second[:5].int(), starts, lengths, torch.tensor([[2, 4]], dtype=torch.int32))
        return [before, flipped, kv.gather(layers, second), kv.gather(range(1, 2), third)]
    finally:
        table.release()


def test_drafts_are_the_same(tmp_path: Path) -> None:
    """Rounds, and logits behind every token: trees are verified and compacted on all ranks, heads run on rank 0."""
    spec = ranks_spec()
    write_tiny_head(tmp_path / "heads", "eagle3", spec)
    options = {
        "drafter": "eagle3", "drafter_path": str(tmp_path / "heads"), "head_check": False, "tree": "dynamic",
    }  # fmt: skip
    requests = [tiny_request(index=i, max_tokens=12, temperature=float(i % 2)) for i in range(4)]
    outcomes = []
    for degree in (1, 4):
        runner = ranks_runner(degree, spec, "bf16", **options)
        outcomes.append(run(runner, requests, batch=3, chunk_tokens=7))
        runner.close()
    assert outcomes[1] == outcomes[0]
    assert any(sum(outcome.accepted_per_round) for outcome in outcomes[0])
