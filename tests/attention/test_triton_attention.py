"""Attention by Triton kernels, in Triton's interpreter: the reference's results, and bits that belong to the row.

Splits and blocks are short, so that short sequences have several.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.attention.base import StaticShape
from paceline.attention.select import attention_for
from paceline.attention.torch_paged import TorchAttention
from paceline.errors import ConfigError
from paceline.kvcache.layout import LayerKind
from paceline.triton_support import has_triton
from tests.support.interpreter import INTERPRETED, Again
from tests.support.needs import needs_triton
from tests.support.paged_batches import filled_pool, random_batch

if has_triton():
    from paceline.attention import triton_paged
    from paceline.attention.triton_plan import StaticTritonPlan, reads_of, tiles_of
    from tests.support.paged_bits import Bits, Content, Geometry, check_reference

torch.set_num_threads(1)
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BF16, FP32 = torch.bfloat16, torch.float32
SPLIT, BLOCK, LENGTH = 16, 8, 40
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the process with the interpreter")


@pytest.fixture(autouse=True)
def small_blocks() -> Iterator[None]:
    if not INTERPRETED:
        yield
        return
    with (
        np.errstate(invalid="ignore"),
        mock.patch.multiple(triton_paged, SPLIT=SPLIT, MAX_BLOCK=BLOCK, FINISHED_ELEMENTS=1024, AHEAD=1, PROGRAMS=12),
    ):
        yield


@needs_triton
def test_in_tritons_interpreter(run_again_interpreted: Again) -> None:
    assert run_again_interpreted(__file__) > 0


@interpreted
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "value_dim", "page_size", "dtype", "seed"),
    [
        (2, 2, 24, 0, 1, BF16, 6),
        (6, 2, 16, 0, 16, FP32, 6),
        (4, 1, 16, 0, 4, FP32, 9),
        (8, 1, 40, 0, 4, BF16, 16),
        (20, 1, 40, 32, 16, BF16, 9),
    ],
)
def test_follows_the_reference(
    heads: int, kv_heads: int, dim: int, value_dim: int, page_size: int, dtype: torch.dtype, seed: int
) -> None:
    """Seeds of two segments, one of them with tails."""
    check_reference(CPU, Geometry(heads, kv_heads, dim, value_dim), dtype, page_size, seed=seed, most=2)


@interpreted
def test_bits_of_a_row() -> None:
    """Mutants: splits or blocks whose size follows from the number of rows, parts merged from the last on, blocks
    counted from a tail's first slot, a block that adds nothing and is multiplied all the same."""
    bits = Bits(Content.random(CPU, Geometry(2, 1, 16), FP32, LENGTH), SPLIT)
    bits.check_batches()
    bits.check_trees()
    bits.check_parts()
    Bits(Content.random(CPU, Geometry(4, 2, 16), FP32, 2 * BLOCK), SPLIT).check_shards(2)


@interpreted
def test_bits_of_a_row_with_window_and_sink() -> None:
    """The window begins within a block."""
    bits = Bits(Content.random(CPU, Geometry(2, 1, 16), BF16, LENGTH, sinks=True), SPLIT, window=11)
    bits.check_trees(SPLIT - 3)
    bits.check_static()
    bits.check_derived()


@interpreted
def test_bits_of_a_latent_row() -> None:
    Bits(Content.random(CPU, Geometry(2, 1, 24, 16), BF16, LENGTH), SPLIT).check_trees(SPLIT - 3)


@needs_triton
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), page_size=st.sampled_from([1, 4, 16]))
def test_what_rows_read(seed: int, page_size: int) -> None:
    """The slots of every row in order of position, as the kernel looks them up."""
    segments = random_batch(random.Random(seed), page_size, 300, "lcdtv")
    found, at = reads_of(segments, page_size), 0
    for segment in segments:
        for i, prefix in enumerate(segment.prefix_lens):
            tail = segment.tails[i] if segment.tails else ()
            reads, length, columns, own = found.rows[:, at]
            pages = [int(found.table[columns + p // page_size]) * page_size + p % page_size for p in range(reads)]
            slots = [int(found.table[own + p]) for p in range(reads, length)]
            assert pages + slots == [*segment.slots[:prefix].tolist(), *tail]
            at += 1
    for tokens in (1, 3, 16):
        tiles = tiles_of(np.array([len(s.token_ids) for s in segments]), tokens)
        rows = [first + i for first, count in tiles for i in range(count)]
        assert rows == list(range(at))
        assert tiles[:, 1].max() <= tokens


@needs_triton
def test_a_batch_that_a_graph_has_no_room_for() -> None:
    kv = filled_pool(LayerKind.GQA, 2, 16, 4, 300, BF16)
    row = random_batch(random.Random(1), 4, 300, "d", 1)
    with pytest.raises(ValueError, match="the graph is for"):
        StaticTritonPlan(StaticShape(1, 1, False, 8), kv).fill(row)
    with pytest.raises(ValueError, match="is not of"):
        StaticTritonPlan(StaticShape(1, 1, False, 64), kv).fill([*row, *row])


def test_backends_by_device() -> None:
    """`auto` on a GPU takes Triton without FlashInfer, and for windows and sinks; else torch's reference."""
    with mock.patch.dict("sys.modules", {"flashinfer": None}):
        expected = "triton" if has_triton() else "torch"
        assert attention_for(CUDA, 4, 2, 16).name == expected
        assert attention_for(CUDA, 4, 2, 16, special=True).name == expected
        with mock.patch("paceline.attention.select.runs_triton", return_value=False):
            assert isinstance(attention_for(CUDA, 4, 2, 16, special=True), TorchAttention)
            with pytest.raises(ConfigError, match="triton runs on a GPU"):
                attention_for(CUDA, 4, 2, 16, "triton")
    if not INTERPRETED:
        with pytest.raises(ConfigError, match="triton runs on a GPU"):
            attention_for(CPU, 4, 2, 16, "triton")
