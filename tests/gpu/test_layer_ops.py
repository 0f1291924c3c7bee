"""The fused kernels of a decoder layer on a GPU: against torch's operations there, by row, and in a captured graph."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from paceline.layers import ops
from paceline.layers.graph_capture import CudaCapture
from paceline.triton_support import has_triton

if has_triton():
    from tests.support import layer_ops

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not has_triton(), reason="needs triton"),
]
CUDA = torch.device("cuda")
DTYPES = (torch.bfloat16, torch.float32, torch.float16)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 20, 100, 128, 576, 1000, 4096, 7168, 12288])
def test_norm(width: int, dtype: torch.dtype) -> None:
    for rows in (0, 1, 3, 64):
        layer_ops.check_norm(CUDA, rows, 1, width, dtype, 0)
        layer_ops.check_norm(CUDA, rows, 5, width, dtype, 8)
        layer_ops.check_norm(CUDA, rows, 5, width, dtype, 5)
        layer_ops.check_add_norm(CUDA, rows, width, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [20, 1536, 14336])
def test_silu(width: int, dtype: torch.dtype) -> None:
    for rows in (0, 1, 77):
        layer_ops.check_silu(CUDA, rows, width, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [20, 576, 4096])
def test_slabs(width: int, dtype: torch.dtype) -> None:
    for rows in (0, 1, 77):
        layer_ops.check_slabs(CUDA, rows, width, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 8, 128), (9, 3, 64), (6, 2, 80), (2, 1, 6), (40, 40, 256)])
def test_rope(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    for rows, page_size in ((0, 4), (1, 1), (33, 16)):
        layer_ops.check_rope(CUDA, rows, heads, kv_heads, dim, page_size, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "rank", "rope_dim", "gap"), [(3, 28, 6, 5), (128, 512, 64, 0), (17, 96, 16, 8)])
def test_latent(heads: int, rank: int, rope_dim: int, gap: int, dtype: torch.dtype) -> None:
    for rows in (0, 1, 70):
        layer_ops.check_latent(CUDA, rows, heads, rank, rope_dim, dtype, gap)


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_rows(dtype: torch.dtype) -> None:
    layer_ops.check_add_norm(CUDA, 16384, 576, dtype)
    layer_ops.check_silu(CUDA, 16384, 1536, dtype)
    layer_ops.check_rope(CUDA, 16384, 9, 3, 64, 16, dtype)
    layer_ops.check_latent(CUDA, 16384, 4, 512, 64, dtype, 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rows_bits_are_its_own(dtype: torch.dtype) -> None:
    for width in (64, 77, 128, 576, 4096, 5000):
        layer_ops.check_invariance(CUDA, 33, width, dtype)
    layer_ops.check_latent_invariance(CUDA, 28, 6, dtype)
    layer_ops.check_latent_invariance(CUDA, 512, 64, dtype)


def test_padding_and_slots_outside() -> None:
    layer_ops.check_padding(CUDA)
    layer_ops.check_slots_outside(CUDA)


class Layer:
    """The operations of both kinds of layer over memory that stays, through ``ops``."""

    def __init__(self, rows: int, dtype: torch.dtype) -> None:
        self.x, self.residual = (torch.zeros(rows, 576, dtype=dtype, device=CUDA) for _ in range(2))
        self.weight = torch.randn(576).to(dtype).to(CUDA)
        self.gate_up = torch.zeros(rows, 3072, dtype=dtype, device=CUDA)
        self.rope = layer_ops.rope_inputs(CUDA, rows, 9, 3, 64, dtype, 64)
        self.latent = layer_ops.latent_inputs(CUDA, rows, 3, 512, 64, dtype, 0, 64)
        self.pages = torch.zeros(4, 2, 16, 3, 64, dtype=dtype, device=CUDA)
        self.latents = torch.zeros(4, 16, 576, dtype=dtype, device=CUDA)
        self.out = torch.zeros(rows, 3, 576, dtype=dtype, device=CUDA)

    def fill(self, seed: int) -> None:
        """New inputs, empty pools."""
        torch.manual_seed(seed)
        for tensor in (self.x, self.residual, self.gate_up, *self.rope[:3], *self.latent[:2]):
            tensor.copy_(torch.randn(tensor.shape))
        for slots in (self.rope[5], self.latent[6]):
            slots.copy_(torch.randperm(64)[: slots.shape[0]])
        for tensor in (self.pages, self.latents, self.out):
            tensor.zero_()

    def work(self) -> tuple[torch.Tensor, ...]:
        """May be captured."""
        added = ops.add_rms_norm(self.x, self.residual, self.weight, 1e-5)
        heads = ops.rms_norm(self.rope[0], self.weight[:64], 1e-5)
        query = ops.rope_write(*self.rope, self.pages)
        ops.latent_write(*self.latent, self.latents, self.out)
        return added, heads, query, ops.silu_mul(self.gate_up)

    def state(self) -> list[torch.Tensor]:
        """What ``work`` writes besides its results."""
        return [tensor.clone() for tensor in (self.residual, self.pages, self.latents, self.out)]


@pytest.fixture
def no_waiting() -> Iterator[None]:
    """The host may not wait for the device while a test runs it."""
    torch.cuda.synchronize()
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_captured_layer_gives_what_the_eager_one_does(dtype: torch.dtype, no_waiting: None) -> None:
    layer = Layer(7, dtype)
    layer.fill(0)
    captured = CudaCapture(CUDA)(layer.work)
    for seed in (1, 2):
        layer.fill(seed)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        captured.replay()
        torch.cuda.set_sync_debug_mode("default")
        found, state = [output.clone() for output in captured.outputs], layer.state()
        layer.fill(seed)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        expected = layer.work()
        torch.cuda.set_sync_debug_mode("default")
        for mine, theirs in zip([*found, *state], [*expected, *layer.state()], strict=True):
            assert torch.equal(mine, theirs)


def test_the_kernels_are_what_runs() -> None:
    """One launch an operation."""
    from torch.autograd import DeviceType  # type: ignore[attr-defined]
    from torch.profiler import ProfilerActivity, profile

    layer = Layer(7, torch.bfloat16)
    layer.work()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        layer.work()
        torch.cuda.synchronize()
    names = [event.name for event in profiler.events() or [] if event.device_type == DeviceType.CUDA]
    launched = sorted(name for name in names if not name.startswith("Mem"))
    assert launched == ["_latent_write", "_rms_norm", "_rms_norm", "_rope_write_kernel", "_silu_mul_kernel"]
