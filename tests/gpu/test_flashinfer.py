"""FlashInfer against the torch reference on the same GPU: page tables, masks, lengths, head shapes, dtypes, graphs."""

from __future__ import annotations

import random
from importlib.util import find_spec

import pytest
import torch

from paceline.attention.base import AttentionBackend, ForwardBatch, Segment, StaticShape
from paceline.attention.flashinfer import FlashInferAttention, FlashInferPlan
from paceline.attention.padding import Scratch, pad_segments, real_rows
from paceline.attention.torch_paged import TorchAttention
from paceline.kvcache.layout import LayerKind
from paceline.kvcache.pool import KvPool
from paceline.layers.graph_capture import CudaCapture
from tests.support.paged_batches import Tables, filled_pool, num_rows, random_batch
from tests.support.tolerance import Tolerance

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(find_spec("flashinfer") is None, reason="needs FlashInfer"),
    pytest.mark.filterwarnings("ignore"),  # FlashInfer's own
]
PAGES = 400
HEADS = [(9, 3, 64), (32, 8, 128), (4, 4, 64), (14, 2, 64), (8, 1, 256)]  # query heads, KV heads, width
CLOSE: dict[torch.dtype, Tolerance] = {
    torch.bfloat16: {"rtol": 2e-2, "atol": 1e-2},
    torch.float16: {"rtol": 5e-3, "atol": 2e-3},
}
KINDS = {"decode": "d", "chains": "cd", "prefill": "l", "trees": "t", "everything": "lcdtv"}


@pytest.fixture(scope="module")
def cuda() -> torch.device:
    return torch.device("cuda")


def difference(
    backend: AttentionBackend, kv: KvPool, segments: list[Segment], heads: int, dim: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """FlashInfer's output and the reference's."""
    batch, scale = ForwardBatch.build(segments, kv.device), dim**-0.5
    query = torch.randn(num_rows(segments), heads, dim).to(kv.device, dtype)
    reference = TorchAttention()
    plan = backend.plan(batch)
    found = backend.attend(query, kv, 0, plan, scale)
    assert isinstance(plan, FlashInferPlan)
    assert plan._other is None, "FlashInfer serves this"
    return found, reference.attend(query, kv, 0, reference.plan(batch), scale)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("dtype", list(CLOSE), ids=str)
def test_kinds_pages_and_dtypes(cuda: torch.device, dtype: torch.dtype, page_size: int, kind: str) -> None:
    heads, kv_heads, dim = HEADS[0]
    kv = filled_pool(LayerKind.GQA, kv_heads, dim, page_size, PAGES, dtype, "cuda")
    backend, rng = FlashInferAttention(cuda, dim), random.Random(page_size)
    for _ in range(8):  # more than the wrappers that take turns
        segments = random_batch(rng, page_size, PAGES, KINDS[kind])
        found, expected = difference(backend, kv, segments, heads, dim, dtype)
        torch.testing.assert_close(found, expected, **CLOSE[dtype])


@pytest.mark.parametrize("shape", HEADS, ids=str)
def test_head_shapes(cuda: torch.device, shape: tuple[int, int, int]) -> None:
    heads, kv_heads, dim = shape
    kv = filled_pool(LayerKind.GQA, kv_heads, dim, 16, PAGES, torch.bfloat16, "cuda")
    backend, rng = FlashInferAttention(cuda, dim), random.Random(dim)
    for kinds in KINDS.values():
        segments = random_batch(rng, 16, PAGES, kinds)
        found, expected = difference(backend, kv, segments, heads, dim, torch.bfloat16)
        torch.testing.assert_close(found, expected, **CLOSE[torch.bfloat16])


def test_long_contexts(cuda: torch.device) -> None:
    """Contexts that FlashInfer splits over blocks: chains and trees behind thousands of positions."""
    heads, kv_heads, dim = HEADS[1]
    kv = filled_pool(LayerKind.GQA, kv_heads, dim, 16, PAGES, torch.bfloat16, "cuda")
    backend, tables = FlashInferAttention(cuda, dim), Tables(random.Random(3), PAGES, 16)
    segments = [tables.linear(5, 2500), tables.tree(16, 1800), tables.linear(1, 700)]
    found, expected = difference(backend, kv, segments, heads, dim, torch.bfloat16)
    torch.testing.assert_close(found, expected, **CLOSE[torch.bfloat16])


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("kinds", ["d", "cd", "l", "cdt"])
def test_latent_attention(cuda: torch.device, heads: int, kinds: str) -> None:
    """MLA as DeepSeek-V3 has it, 512 + 64; its trees go to Triton."""
    kv = filled_pool(LayerKind.MLA, 1, 576, 16, PAGES, torch.bfloat16, "cuda")
    backend, reference, rng = FlashInferAttention(cuda, 64), TorchAttention(), random.Random(heads)
    for _ in range(4):
        segments = random_batch(rng, 16, PAGES, kinds)
        batch = ForwardBatch.build(segments, cuda)
        query = torch.randn(num_rows(segments), heads, 576).to(cuda, torch.bfloat16)
        plan = backend.plan(batch)
        found = backend.attend_latent(query, kv, 0, plan, 0.07, 512)
        assert (plan._other is not None) == any(segment.tails for segment in segments)
        expected = reference.attend_latent(query, kv, 0, reference.plan(batch), 0.07, 512)
        torch.testing.assert_close(found, expected, **CLOSE[torch.bfloat16])


@pytest.mark.parametrize(
    ("rows", "kinds", "latent"),
    [(1, "d", False), (5, "cd", False), (9, "cdtv", False), (1, "d", True), (5, "cd", True)],
)
def test_captured(cuda: torch.device, rows: int, kinds: str, latent: bool) -> None:
    """A graph over batch after batch, of other sizes, lengths and trees, padded; the host never waits."""
    heads, kv_heads, dim = (16, 1, 576) if latent else HEADS[0]
    kv = filled_pool(LayerKind.MLA if latent else LayerKind.GQA, kv_heads, dim, 16, PAGES + 1, torch.bfloat16, "cuda")
    backend, reference, rng = FlashInferAttention(cuda, 64), TorchAttention(), random.Random(rows)
    shape, scratch = StaticShape(6, rows, "t" in kinds, 90), Scratch(PAGES, 16)
    plan = backend.static_plan(shape, kv)
    assert plan is not None
    query = torch.zeros(shape.num_rows, heads, dim, dtype=torch.bfloat16, device=cuda)
    plan.fill(pad_segments([], shape, scratch))

    def work() -> tuple[torch.Tensor, ...]:
        if latent:
            return (backend.attend_latent(query, kv, 0, plan, 0.07, 512),)
        return (backend.attend(query, kv, 0, plan, 0.125),)

    captured = CudaCapture(cuda)(work)
    for _ in range(6):
        segments = random_batch(rng, 16, PAGES, kinds)
        if any(len(segment.token_ids) > rows for segment in segments):
            continue
        query.copy_(torch.randn(query.shape))
        torch.cuda.set_sync_debug_mode("error")
        try:
            plan.fill(pad_segments(segments, shape, scratch))
            captured.replay()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        index = torch.from_numpy(real_rows(segments, rows)).to(cuda)
        dense = reference.plan(ForwardBatch.build(segments, cuda))
        if latent:
            expected = reference.attend_latent(query[index], kv, 0, dense, 0.07, 512)
        else:
            expected = reference.attend(query[index], kv, 0, dense, 0.125)
        torch.testing.assert_close(captured.outputs[0][index], expected, **CLOSE[torch.bfloat16])


def test_eager_plans_do_not_wait(cuda: torch.device) -> None:
    heads, kv_heads, dim = HEADS[0]
    kv = filled_pool(LayerKind.GQA, kv_heads, dim, 16, PAGES, torch.bfloat16, "cuda")
    backend, rng = FlashInferAttention(cuda, dim), random.Random(1)
    batches = [random_batch(rng, 16, PAGES, kinds) for kinds in ("d", "cd", "lcdtv")]
    query = torch.randn(2000, heads, dim).to(cuda, torch.bfloat16)
    outputs = []
    for mode in ("default", "error"):  # kernels are compiled in the first pass
        torch.cuda.set_sync_debug_mode(mode)  # "error": whatever waits raises
        try:
            for segments in batches:
                plan = backend.plan(ForwardBatch.build(segments, cuda))
                outputs.append(backend.attend(query[: num_rows(segments)], kv, 0, plan, 0.125))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(a, b) for a, b in zip(outputs, outputs[len(batches) :], strict=False))
