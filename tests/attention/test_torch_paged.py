"""The torch backend, rectangles and masks, against rows attended one by one from the definition of a segment."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.attention import torch_paged
from paceline.attention.base import ForwardBatch, Segment, StaticShape
from paceline.attention.padding import Scratch, pad_segments, real_rows
from paceline.attention.torch_paged import TorchAttention
from paceline.kvcache.layout import LayerKind
from tests.support.paged_batches import filled_pool, num_rows, plain_attention, random_batch
from tests.support.tolerance import Tolerance

PAGE, PAGES, HEADS = 4, 200, 4
SCRATCH = Scratch(PAGES, PAGE)
GQA = filled_pool(LayerKind.GQA, 2, 8, PAGE, PAGES + 1, torch.float32)
MLA = filled_pool(LayerKind.MLA, 1, 12, PAGE, PAGES + 1, torch.float32)
CLOSE: Tolerance = {"rtol": 1e-4, "atol": 1e-5}


def queries(segments: list[Segment], dim: int) -> torch.Tensor:
    return torch.randn(num_rows(segments), HEADS, dim)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_any_batch(seed: int) -> None:
    segments, backend = random_batch(random.Random(seed), PAGE, PAGES, "lcdtv"), TorchAttention()
    plan = backend.plan(ForwardBatch.build(segments))
    query = queries(segments, 8)
    torch.testing.assert_close(
        backend.attend(query, GQA, 0, plan, 0.3), plain_attention(query, GQA, segments, 0.3), **CLOSE
    )
    query = queries(segments, 12)
    found = backend.attend_latent(query, MLA, 0, plan, 0.3, 8)
    torch.testing.assert_close(found, plain_attention(query, MLA, segments, 0.3, 8), **CLOSE)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32), more=st.integers(0, 2))
def test_padded_to_a_static_shape(seed: int, more: int) -> None:
    """Batch after batch through one plan: each finds its own rows, whatever was there before."""
    rng, backend = random.Random(seed), TorchAttention()
    batches = [random_batch(rng, PAGE, PAGES, "cdtv") for _ in range(3)]
    rows = max(len(segment.token_ids) for segments in batches for segment in segments) + more
    shape = StaticShape(5, rows, True, 90)
    plan = backend.static_plan(shape, GQA)
    assert plan is not None
    for segments in batches:
        padded = pad_segments(segments, shape, SCRATCH)
        plan.fill(padded)
        index = torch.from_numpy(real_rows(segments, rows))
        query = torch.randn(shape.num_rows, HEADS, 8)
        found = backend.attend(query, GQA, 0, plan, 0.3)
        assert found.isfinite().all()
        torch.testing.assert_close(found[index], plain_attention(query[index], GQA, segments, 0.3), **CLOSE)


def test_long_batches_go_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    segments, backend = random_batch(random.Random(4), PAGE, PAGES, "l"), TorchAttention()
    plan, query = backend.plan(ForwardBatch.build(segments)), queries(segments, 8)
    whole = backend.attend(query, GQA, 0, plan, 0.3)
    monkeypatch.setattr(torch_paged, "MAX_SCORES", 3 * len(segments) * HEADS * plan.columns.shape[1])
    torch.testing.assert_close(backend.attend(query, GQA, 0, plan, 0.3), whole, **CLOSE)


def test_too_long_for_a_static_plan() -> None:
    assert TorchAttention().static_plan(StaticShape(64, 16, False, 131072), GQA) is None


def test_padding_comes_first_and_writes_to_the_scratch_page() -> None:
    slots = torch.arange(40, 60, dtype=torch.int32)
    shape = StaticShape(3, 4, True, 90)
    chain, tree, blank = pad_segments(
        [Segment.linear([7, 8], 5, slots), Segment.tree([7, 8, 9], [-1, 0, 0], 6, slots)], shape, SCRATCH
    )
    scratch = SCRATCH.slot
    assert list(chain.token_ids) == [0, 0, 7, 8]
    assert list(chain.write_slots) == [scratch, scratch, 45, 46]
    assert list(chain.prefix_lens) == [4, 5, 6, 7]  # aligned to the end: padding sees only what is committed
    assert list(chain.positions) == [0, 0, 5, 6]
    assert list(tree.write_slots) == [scratch, 46, 47, 48]
    assert list(tree.prefix_lens) == [6, 6, 6, 6]
    assert [list(tail) for tail in tree.tails] == [[], [46], [46, 47], [46, 48]]
    assert set(blank.write_slots) == {scratch}
    assert set(blank.slots.tolist()) == set(range(scratch, scratch + PAGE))
