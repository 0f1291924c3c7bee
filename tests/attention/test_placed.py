"""Batches that are worked out on the device from a few numbers, against the host's way; its kernels interpreted too."""

from __future__ import annotations

import random
from unittest import mock

import numpy as np
import pytest
import torch

from paceline.attention.base import Segment, StaticShape, packed_rows
from paceline.attention.flashinfer import FlashInferAttention, StaticFlashInferPlan
from paceline.attention.padding import Scratch, pad_segments, real_rows
from paceline.attention.paged import paged_batch
from paceline.attention.placed import SCRATCH_ROW, ResidentTables
from paceline.kvcache.allocator import PageAllocator
from paceline.kvcache.layout import LayerKind
from paceline.kvcache.table import PageTable
from paceline.models.static_forward import Room, StaticForward
from tests.fakes import flashinfer_wrappers as fake
from tests.support.interpreter import Again
from tests.support.paged_batches import filled_pool, plain_attention, random_batch
from tests.support.tolerance import Tolerance

CPU, PAGES, DIM, LONGEST = torch.device("cpu"), 300, 64, 90
BF16: Tolerance = {"rtol": 1.6e-2, "atol": 1e-2}


def test_in_tritons_interpreter(run_again_interpreted: Again) -> None:
    assert run_again_interpreted(__file__) > 0


def room_of(page_size: int, sequences: int = 6, kind: LayerKind = LayerKind.GQA, dim: int = DIM) -> Room:
    kv = filled_pool(kind, 1 if kind is LayerKind.MLA else 2, dim, page_size, PAGES + 1, torch.bfloat16)
    scratch = Scratch(PAGES, page_size)
    return Room(kv, scratch, ResidentTables(sequences, LONGEST, scratch, CPU))


def forward_of(room: Room, requests: int, rows: int) -> tuple[StaticForward, StaticFlashInferPlan]:
    shape = StaticShape(requests, rows, False, LONGEST)
    made = StaticForward.make(shape, FlashInferAttention(CPU, DIM, fake), room)
    assert made is not None
    assert made.follows
    plan = made.context.plan
    assert isinstance(plan, StaticFlashInferPlan)
    return made, plan


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("kinds", ["d", "cd"])
def test_rows_and_pages_are_those_of_the_host(page_size: int, kinds: str) -> None:
    """Batch after batch of other sizes and lengths through the same memory. Mutants: padding rows stand behind the real
    ones; a filler reads the table of a sequence; pages in the order of the rows of the tables."""
    rng, rows = random.Random(page_size), 1 if kinds == "d" else 6
    room = room_of(page_size)
    forward, plan = forward_of(room, 6, rows)
    for _ in range(8):
        segments = random_batch(rng, page_size, PAGES, kinds, most=6)
        assert forward.fits(segments)
        forward.fill(segments)
        forward.derive()
        padded = pad_segments(segments, forward.shape, room.scratch)
        batch, wanted = forward.context.batch, torch.from_numpy(packed_rows(padded))
        assert torch.equal(torch.stack((batch.token_ids, batch.positions, batch.write_slots)), wanted)
        lists, buffers = paged_batch(padded, page_size), plan._buffers
        assert lists.indices is not None
        assert np.array_equal(buffers.kv_indptr, lists.kv_indptr)
        assert np.array_equal(buffers.indices[: len(lists.indices)], lists.indices)
        assert np.array_equal(buffers.last_page_len, lists.last_page_len)
        assert np.array_equal(buffers.kv_lens, lists.kv_lens)


def test_tables_that_grow_and_that_make_room_for_others() -> None:
    """Seven sequences over three places; one grows past its list's memory, one is released and filled again."""
    size, rng = 4, random.Random(2)
    allocator = PageAllocator(PAGES)
    tables = ResidentTables(3, LONGEST, Scratch(PAGES, size), CPU)
    seqs = [PageTable(allocator, size) for _ in range(7)]
    for turn in range(60):
        chosen = rng.sample(seqs, 3)
        if turn % 7 == 0:
            chosen[0].release()
        for seq in chosen:
            seq.ensure(min(seq.capacity + rng.randrange(1, 9), 48))
        ends = [rng.randint(1, seq.capacity) for seq in chosen]
        rows = tables.rows_of([seq.slots for seq in chosen], ends)
        assert len({*rows.tolist(), SCRATCH_ROW}) == 4
        for seq, row, end in zip(chosen, rows, ends, strict=True):
            pages = [ref.page for ref in seq.pages][: -(-end // size)]
            assert tables.tables[row, : len(pages)].tolist() == pages
    assert tables.tables[SCRATCH_ROW, 0] == PAGES


@pytest.mark.parametrize("latent", [False, True])
def test_a_step_is_planned_anew_only_for_other_pages(latent: bool) -> None:
    """And attends to what it should in between. MLA's plan goes by lengths: it is made every time."""
    size, steps = 16, 40
    kind, dim = (LayerKind.MLA, 192) if latent else (LayerKind.GQA, DIM)
    room = room_of(size, 2, kind, dim)
    forward, plan = forward_of(room, 2, 1)
    slots = torch.randperm(PAGES)[:6].to(torch.int32)[:, None] * size + torch.arange(size, dtype=torch.int32)
    backend, slots = forward.context.attention, slots.view(-1)
    planned: list[int] = []
    watched = mock.Mock()
    for step in range(steps):
        before = watched.call_count
        segment = Segment.linear([1], 20 + step, slots)
        forward.fill([segment])
        forward.derive()
        planned += [step] * (watched.call_count - before)
        query = torch.randn(2, 4, dim).bfloat16()
        if latent:
            found = backend.attend_latent(query, room.kv, 0, plan, 0.1, 128)
        else:
            found = backend.attend(query, room.kv, 0, plan, 0.1)
        if step == 0:
            assert plan._kernel is not None
            watched = plan._kernel.plan = mock.Mock(wraps=plan._kernel.plan)  # type: ignore[method-assign]
        own = query[torch.from_numpy(real_rows([segment], 1))]
        expected = plain_attention(own, room.kv, [segment], 0.1, 128 if latent else 0)
        torch.testing.assert_close(found[:1], expected, **BF16)
    assert planned == (list(range(1, steps)) if latent else [12, 28])


def test_what_does_not_stand_in_place_is_refused() -> None:
    """Rows that write elsewhere (a draft's rows computed again) run without a graph."""
    room = room_of(4)
    forward, _ = forward_of(room, 2, 2)
    slots = torch.arange(40, dtype=torch.int32)
    assert forward.fits([Segment.linear([1, 2], 4, slots)])
    assert not forward.fits([Segment([1, 2], [4, 5], [20, 21], slots, [5, 6])])
    assert not forward.fits([Segment.linear([1], LONGEST, torch.arange(120, dtype=torch.int32))])
