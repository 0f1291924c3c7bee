"""What FlashInfer is told: page tables, lengths and mask bits, read as it reads them, against the torch reference.

FlashInfer itself runs in tests/gpu; here its wrappers are ``fakes/flashinfer_wrappers.py``, and where the package is
installed its signatures are compared with theirs.
"""

from __future__ import annotations

import inspect
import random
import sys
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.attention.base import AttentionPlan, ForwardBatch, Segment, StaticShape
from paceline.attention.flashinfer import FlashInferAttention
from paceline.attention.flashinfer_choice import has_kernel
from paceline.attention.flashinfer_kernels import Geometry, LongPrefillKernel, load_flashinfer
from paceline.attention.mask_bits import pack_masks
from paceline.attention.padding import Scratch, pad_segments, real_rows
from paceline.attention.paged import PagedBatch, PagedKind, pack_reference, paged_batch
from paceline.attention.select import attention_for
from paceline.errors import ConfigError
from paceline.kvcache.layout import LayerKind
from tests.fakes import flashinfer_wrappers as fake
from tests.support.paged_batches import Tables, filled_pool, num_rows, plain_attention, random_batch
from tests.support.tolerance import Tolerance

CPU, PAGES, HEADS, DIM, VALUE = torch.device("cpu"), 300, 4, 64, 128
BF16: Tolerance = {"rtol": 1.6e-2, "atol": 1e-2}
POOLS = {size: filled_pool(LayerKind.GQA, 2, DIM, size, PAGES + 1, torch.bfloat16) for size in (1, 4, 16)}
LATENT = filled_pool(LayerKind.MLA, 1, VALUE + 64, 4, PAGES + 1, torch.bfloat16)
SIZES = st.sampled_from(sorted(POOLS))


def backend_of() -> FlashInferAttention:
    return FlashInferAttention(CPU, DIM, fake)


def seen_by(batch: PagedBatch, page_size: int) -> list[set[int]]:
    """The slots that each row sees, from the arrays alone: the definition of FlashInfer's page tables and masks."""
    assert batch.indices is not None
    rows: list[set[int]] = []
    bits = None if batch.masks is None else pack_reference(batch)
    for s in range(batch.num_requests):
        pages = batch.indices[batch.kv_indptr[s] : batch.kv_indptr[s + 1]]
        length = (len(pages) - 1) * page_size + int(batch.last_page_len[s])
        assert length == batch.kv_lens[s]
        slots = [int(pages[c // page_size]) * page_size + c % page_size for c in range(length)]
        count = int(batch.qo_indptr[s + 1] - batch.qo_indptr[s])
        for row in range(count):
            if bits is None:
                rows.append(set(slots[: max(length - count + row + 1, 0)]))
                continue
            assert batch.masks is not None
            start = int(batch.masks.byte_indptr[s])
            at = [row * length + c for c in range(length)]
            rows.append({slot for slot, b in zip(slots, at, strict=True) if bits[start + b // 8] >> (b % 8) & 1})
    return rows


def wanted_by(segments: list[Segment]) -> list[set[int]]:
    """The same from the segments."""
    rows = []
    for segment in segments:
        tails = segment.tails or [()] * len(segment.token_ids)
        for prefix, tail in zip(segment.prefix_lens, tails, strict=True):
            rows.append({*segment.slots[:prefix].tolist(), *tail})
    return rows


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32), page_size=SIZES, masked=st.booleans(), kinds=st.sampled_from(["lcdtv", "d", "cd"]))
def test_rows_see_their_slots(seed: int, page_size: int, masked: bool, kinds: str) -> None:
    segments = random_batch(random.Random(seed), page_size, PAGES, kinds)
    batch = paged_batch(segments, page_size, masked)
    assert seen_by(batch, page_size) == wanted_by(segments)
    if not masked and kinds == "d":
        assert batch.kind is PagedKind.DECODE
    elif not masked and kinds == "cd":
        assert batch.kind is not PagedKind.MASKED


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32), page_size=SIZES)
def test_bits_packed_on_the_device(seed: int, page_size: int) -> None:
    batch = paged_batch(random_batch(random.Random(seed), page_size, PAGES, "cdtv"), page_size, masked=True)
    masks = batch.masks
    assert masks is not None
    given = torch.from_numpy
    found = pack_masks(
        given(masks.prefix_lens),
        given(masks.bases),
        given(masks.tails),
        given(batch.qo_indptr),
        given(batch.kv_lens),
        given(masks.byte_indptr),
        int(masks.byte_indptr[-1]),
    )
    assert np.array_equal(found.numpy(), pack_reference(batch))


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32), page_size=SIZES, kinds=st.sampled_from(["lcdtv", "d", "cd", "t"]))
def test_attention_over_any_batch(seed: int, page_size: int, kinds: str) -> None:
    """Two batches through one backend: a wrapper that is planned again forgets what it held."""
    rng, backend, kv = random.Random(seed), backend_of(), POOLS[page_size]
    for _ in range(5):
        segments = random_batch(rng, page_size, PAGES, kinds)
        query = torch.randn(num_rows(segments), HEADS, DIM).bfloat16()
        plan = backend.plan(ForwardBatch.build(segments))
        found = backend.attend(query, kv, 0, plan, 0.125)
        assert not backend.left, "FlashInfer serves this"
        torch.testing.assert_close(found, plain_attention(query, kv, segments, 0.125), **BF16)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32), tree=st.booleans(), more=st.integers(0, 2), single=st.booleans())
def test_graph_buffers_over_batch_after_batch(seed: int, tree: bool, more: int, single: bool) -> None:
    rng, backend, kv = random.Random(seed), backend_of(), POOLS[4]
    kinds = "d" if single else "cdtv" if tree else "cd"
    batches = [random_batch(rng, 4, PAGES, kinds) for _ in range(3)]
    rows = 1 if single else max(len(s.token_ids) for segments in batches for s in segments) + more
    shape = StaticShape(6, rows, tree and rows > 1, 90)
    plan = backend.static_plan(shape, kv)
    assert plan is not None
    for segments in batches:
        plan.fill(pad_segments(segments, shape, Scratch(PAGES, 4)))
        query = torch.randn(shape.num_rows, HEADS, DIM).bfloat16()
        found = backend.attend(query, kv, 0, plan, 0.125)
        index = torch.from_numpy(real_rows(segments, rows))
        assert found.isfinite().all()
        torch.testing.assert_close(found[index], plain_attention(query[index], kv, segments, 0.125), **BF16)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32), static=st.booleans(), kinds=st.sampled_from(["lcd", "d", "cdt"]))
def test_latent_attention(seed: int, static: bool, kinds: str) -> None:
    """Trees over MLA have no kernel: without Triton the reference takes them, and graphs are refused."""
    rng, backend = random.Random(seed), backend_of()
    segments = random_batch(rng, 4, PAGES, kinds)
    tree = any(segment.tails for segment in segments)
    rows = max(len(segment.token_ids) for segment in segments)
    index = torch.arange(num_rows(segments))
    plan: AttentionPlan
    if static:
        shape = StaticShape(5, rows, tree, 90)
        held = backend.static_plan(shape, LATENT)
        assert (held is None) == tree
        if held is None:
            return
        held.fill(pad_segments(segments, shape, Scratch(PAGES, 4)))
        plan, index = held, torch.from_numpy(real_rows(segments, rows))
    else:
        plan = backend.plan(ForwardBatch.build(segments))
    query = torch.randn(5 * rows if static else num_rows(segments), HEADS, VALUE + 64).bfloat16()
    found = backend.attend_latent(query, LATENT, 0, plan, 0.1, VALUE)
    expected = plain_attention(query[index], LATENT, segments, 0.1, VALUE)
    torch.testing.assert_close(found[index], expected, **BF16)


@pytest.mark.parametrize(
    ("hopper", "rows", "family"), [(True, (90, 60), "fa3"), (True, (90, 20), "fa2"), (False, (90, 60), "fa2")]
)
def test_long_prompts_take_hoppers_kernels(
    hopper: bool, rows: tuple[int, ...], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the others where they cannot be made. Mutants: short prompts take them; a failure ends the forward."""
    backend, kv, tables = backend_of(), POOLS[16], Tables(random.Random(3), PAGES, 16)
    backend.hopper = hopper
    segments = [tables.linear(count, 0) for count in rows]
    query = torch.randn(num_rows(segments), HEADS, DIM).bfloat16()
    plan = backend.plan(ForwardBatch.build(segments))
    found = backend.attend(query, kv, 0, plan, 0.125)
    torch.testing.assert_close(found, plain_attention(query, kv, segments, 0.125), **BF16)
    assert plan._kernel._wrapper.family == family  # type: ignore[union-attr]

    def fails(*_: object) -> None:
        raise RuntimeError("ninja: build stopped")

    monkeypatch.setattr(LongPrefillKernel, "_plan", fails)
    again = backend.plan(ForwardBatch.build(segments))
    assert torch.equal(backend.attend(query, kv, 0, again, 0.125), found)
    assert again._kernel._wrapper.family == "fa2"  # type: ignore[union-attr]


def test_hoppers_kernels_that_do_not_run_are_left_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In the midst of a forward, whose other layers and whose plans made before go on. Mutants: a failed run ends the
    forward; the next layer fails again; it is said for each plan; the next prompt tries again."""
    backend, kv, tables = backend_of(), POOLS[16], Tables(random.Random(3), PAGES, 16)
    backend.hopper = True
    segments = [tables.linear(count, 0) for count in (90, 60)]
    query = torch.randn(num_rows(segments), HEADS, DIM).bfloat16()
    plans = [backend.plan(ForwardBatch.build(segments)) for _ in range(2)]
    found = [backend.attend(query, kv, 0, plan, 0.125) for plan in plans]
    tried: list[int] = []

    def fails(*_: object) -> None:
        tried.append(1)
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(LongPrefillKernel, "run", fails)
    for plan in [*plans, backend.plan(ForwardBatch.build(segments))]:
        for _layer in range(2):
            assert torch.equal(backend.attend(query, kv, 0, plan, 0.125), found[0])
        assert plan._kernel._wrapper.family == "fa2"  # type: ignore[union-attr]
    assert len(tried) == len(plans)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "no kernel image" in caplog.text


def test_one_plan_serves_all_layers_of_one_geometry() -> None:
    backend, kv = backend_of(), POOLS[4]
    segments = random_batch(random.Random(1), 4, PAGES)
    plan = backend.plan(ForwardBatch.build(segments))
    query = torch.randn(num_rows(segments), HEADS, DIM).bfloat16()
    backend.attend(query, kv, 0, plan, 0.125)
    kernel = plan._kernel
    backend.attend(query, kv, 0, plan, 0.125)
    assert plan._kernel is kernel
    with pytest.raises(ValueError, match="one geometry"):
        backend.attend(query, kv, 0, plan, 0.25)


@pytest.mark.parametrize(
    ("geometry", "kind", "served"),
    [
        (Geometry(9, 3, 64, 0, 16, 0.1, torch.bfloat16), PagedKind.MASKED, True),
        (Geometry(9, 3, 64, 0, 16, 0.1, torch.float32), PagedKind.CAUSAL, False),
        (Geometry(4, 2, 96, 0, 16, 0.1, torch.bfloat16), PagedKind.CAUSAL, False),
        (Geometry(128, 1, 576, 512, 16, 0.1, torch.bfloat16), PagedKind.CAUSAL, True),
        (Geometry(128, 1, 576, 512, 16, 0.1, torch.bfloat16), PagedKind.MASKED, False),
        (Geometry(5, 1, 576, 512, 16, 0.1, torch.bfloat16), PagedKind.DECODE, False),
        (Geometry(16, 1, 64, 48, 16, 0.1, torch.bfloat16), PagedKind.DECODE, False),
    ],
)
def test_what_flashinfer_serves(geometry: Geometry, kind: PagedKind, served: bool) -> None:
    assert has_kernel(geometry, kind) == served


def test_a_graph_refuses_a_batch_of_another_kind() -> None:
    plan = backend_of().static_plan(StaticShape(1, 4, False, 64), POOLS[4])
    assert plan is not None
    tree = Tables(random.Random(1), PAGES, 4).tree(4, 9)
    with pytest.raises(ValueError, match="not masked"):
        plan.fill([tree])


def test_slots_that_are_no_pages_are_refused() -> None:
    with pytest.raises(ValueError, match="page borders"):
        paged_batch([Segment.linear([1], 4, torch.arange(1, 20, dtype=torch.int32))], 4)
    slots = torch.arange(16, dtype=torch.int32)
    with pytest.raises(ValueError, match="outside"):
        paged_batch([Segment([1], [4], [40], slots, [4], [[40]])], 4)
    with pytest.raises(ValueError, match="inside of its prefix"):
        paged_batch([Segment([1], [6], [5], slots, [6], [[5]])], 4)


def test_a_mask_whose_requests_begin_at_the_wrong_byte_is_noticed() -> None:
    """Mutant: FlashInfer's own beginnings, in elements. Two trees in a batch then read each other's bits."""
    backend, kv, tables = backend_of(), POOLS[4], Tables(random.Random(5), PAGES, 4)
    segments = [tables.tree(6, 20), tables.tree(6, 30)]
    query = torch.randn(12, HEADS, DIM).bfloat16()
    plan = backend.plan(ForwardBatch.build(segments))
    good = backend.attend(query, kv, 0, plan, 0.125)
    wrapper = plan._kernel._wrapper  # type: ignore[union-attr]
    wrapper._mask_indptr_buf = torch.tensor([0, 3, 6])
    assert not torch.allclose(backend.attend(query, kv, 0, plan, 0.125), good)


def test_without_flashinfer_the_option_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ConfigError, match=r"attention: FlashInfer cannot be imported.*paceline\[gpu\]"):
        load_flashinfer()


def test_backends_by_device() -> None:
    assert attention_for(CPU, 4, 2, 16).name in ("cpu", "torch")
    assert attention_for(CPU, 4, 2, 16, "torch").name == "torch"
    with pytest.raises(ConfigError, match="runs on a GPU"):
        attention_for(CPU, 4, 2, 16, "flashinfer")


@pytest.mark.skipif(find_spec("flashinfer") is None, reason="needs FlashInfer")
@pytest.mark.parametrize(
    "name",
    ["BatchPrefillWithPagedKVCacheWrapper", "BatchDecodeWithPagedKVCacheWrapper", "mla.BatchMLAPagedAttentionWrapper"],
)
@pytest.mark.parametrize("method", ["__init__", "plan", "run"])
def test_flashinfer_takes_what_its_stand_in_takes(name: str, method: str) -> None:
    def parameters(module: ModuleType) -> list[str]:
        at: Any = module
        for part in name.split("."):
            at = getattr(at, part)
        if method == "plan" and name.startswith("BatchDecode") and module is not fake:
            at = type("Implementation", (), {"plan": at._plan_impl})
        return list(inspect.signature(getattr(at, method)).parameters)

    import flashinfer

    missing = [p for p in parameters(fake) if p not in parameters(flashinfer)]
    assert missing == []
    assert "_mask_indptr_buf" in inspect.getsource(flashinfer.BatchPrefillWithPagedKVCacheWrapper)
