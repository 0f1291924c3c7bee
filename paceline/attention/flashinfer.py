"""Attention by FlashInfer (arXiv 2501.01005) on CUDA: paged prefill, decode, chain and tree verification, and MLA.

A forward is planned once for all of its layers, at the first of them: only there are heads, dtype and scale known. What
FlashInfer has no kernel for (float32, odd head widths, trees over MLA) goes to Triton kernels of our own, forward by
forward, and to the torch reference only where Triton is not installed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from types import ModuleType

import numpy as np
import torch

from paceline.attention.base import (
    AttentionBackend,
    AttentionPlan,
    ForwardBatch,
    Segment,
    StaticPlan,
    StaticShape,
)
from paceline.attention.flashinfer_choice import (
    DTYPES,
    HEAD_DIMS,
    MakeKernel,
    described,
    geometry_of_layer,
    has_kernel,
    is_hopper,
    kernel_for,
)
from paceline.attention.flashinfer_kernels import Geometry, Kernel, LongPrefillKernel, StaticBuffers, load_flashinfer
from paceline.attention.paged import PagedBatch, PagedKind, paged_batch
from paceline.attention.placed import PlacedBatch, PlacedPlan, paged_ends
from paceline.attention.torch_paged import TorchAttention
from paceline.kvcache.layout import KvLayout, LayerKind
from paceline.kvcache.pool import KvPool
from paceline.layers.upload import Int64
from paceline.triton_support import runs_triton

log = logging.getLogger(__name__)

# FlashInfer's own advice is half of it. A captured wrapper plans for the most that its shape may need: 149 MiB for 256
# requests of 5 rows over 8 KV heads.
WORKSPACE_BYTES = 256 << 20
HOPPER_FAULTS = (RuntimeError, OSError)  # no compiler, a library that does not load, a launch that is refused
KERNELS_PER_KIND = 3  # planned in turn, so that one forward can be planned while the one before still runs


def geometry_of(query: torch.Tensor, kv: KvPool, layer: int, scale: float, value_dim: int) -> Geometry:
    """The geometry of one call of ``attend`` (value_dim 0) or ``attend_latent``."""
    spec = kv.held.layers[layer]
    return Geometry(query.shape[1], spec.num_kv_heads, query.shape[2], value_dim, kv.page_size, scale, query.dtype)


def other_attention(device: torch.device) -> AttentionBackend:
    """What serves the rest: Triton, or without it torch."""
    if not runs_triton(device):
        return TorchAttention()
    from paceline.attention.triton_paged import TritonAttention

    return TritonAttention()


class FlashInferPlan(AttentionPlan):
    """A batch, and the kernel that was planned for it once its first layer asked."""

    def __init__(self, backend: FlashInferAttention, batch: ForwardBatch | None) -> None:
        self._backend, self._rows = backend, batch
        self._geometry: Geometry | None = None
        self._kernel: Kernel | None = None
        self._other: AttentionPlan | None = None

    def kernel(self, geometry: Geometry) -> Kernel | None:
        """The planned kernel; None: FlashInfer has none, take ``other``."""
        if self._geometry is None:
            self._geometry = geometry
            self._bind(geometry)
        elif geometry != self._geometry:
            raise ValueError(f"one plan serves layers of one geometry: {self._geometry}, then {geometry}")
        return self._kernel

    def kernel_again(self) -> Kernel:
        """The kernel once more, from what the backend has by now."""
        assert self._geometry is not None
        self._bind(self._geometry)
        assert self._kernel is not None
        return self._kernel

    def other(self) -> AttentionPlan:
        """The plan for the backend that serves the rest."""
        if self._other is None:
            assert self._rows is not None
            self._other = self._backend.others.plan(self._rows)
        return self._other

    def _bind(self, geometry: Geometry) -> None:
        assert self._rows is not None
        batch = paged_batch(self._rows.segments, geometry.page_size)
        if has_kernel(geometry, batch.kind):
            self._kernel = self._backend.planned(batch, geometry)
        else:
            self._backend.left.add(described(geometry, batch.kind))


class StaticFlashInferPlan(FlashInferPlan, PlacedPlan):
    """The same for a captured forward: its own wrapper over its own memory.

    FlashInfer splits the work on the host, by pages of each request: a batch that is ``expect``-ed to have as many as
    the last one is not planned again.
    """

    def __init__(self, backend: FlashInferAttention, shape: StaticShape, kv: KvPool) -> None:
        super().__init__(backend, None)
        self._page_size, self._masked = kv.page_size, shape.tree
        self._buffers = StaticBuffers(shape, kv.page_size, kv.device)
        self._wanted = PagedKind.MASKED if shape.tree else PagedKind.CAUSAL if shape.rows > 1 else PagedKind.DECODE
        self._batch: PagedBatch | None = None
        self._qo_indptr = (np.arange(shape.requests + 1) * shape.rows).astype(np.int32)

    def fill(self, segments: Sequence[Segment]) -> None:
        """See StaticPlan."""
        batch = paged_batch(segments, self._page_size, self._masked)
        if batch.kind is not self._wanted:
            raise ValueError(f"this graph is for {self._wanted} batches, not {batch.kind}")
        self._put(batch)

    def expect(self, ends: Int64) -> None:
        """See PlacedPlan."""
        kv_indptr, last_page_len = paged_ends(ends, self._page_size)
        made = PagedBatch(self._wanted, self._qo_indptr, kv_indptr, None, last_page_len, ends.astype(np.int32), None)
        if self._kernel is None or self._batch is None or not self._kernel.plans_alike(made, self._batch):
            self._put(made)

    def derive(self, batch: PlacedBatch) -> None:
        """See PlacedPlan."""
        buffers = self._buffers
        batch.page_lists(buffers.kv_indptr, buffers.indices, buffers.last_page_len)
        buffers.kv_lens.copy_(batch.ends)

    def _put(self, batch: PagedBatch) -> None:
        self._batch = batch
        if self._kernel is not None:
            assert self._geometry is not None
            self._kernel.plan(batch, self._geometry)

    def _bind(self, geometry: Geometry) -> None:
        assert self._batch is not None
        if not has_kernel(geometry, self._wanted):
            raise ValueError(f"FlashInfer has no kernel for {geometry}")
        backend = self._backend
        self._kernel = kernel_for(geometry, self._wanted)(backend.library, backend.workspace, self._buffers)
        self._kernel.plan(self._batch, geometry)


class FlashInferAttention(AttentionBackend):
    """See the module. Raises ConfigError where FlashInfer is not installed."""

    name = "flashinfer"
    row_invariant = False

    def __init__(
        self, device: torch.device, head_dim: int, library: ModuleType | None = None, longest: int = 0
    ) -> None:
        """head_dim: of the model's heads. library: FlashInfer, if the caller has it already. longest: of the contexts;
        a window at least as long is none; 0: not known."""
        self.device, self.head_dim, self.longest = device, head_dim, longest
        self.library = library or load_flashinfer()
        self.workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self.others = other_attention(device)
        self.hopper = is_hopper(device)
        self.left: set[str] = set()
        self._kernels: dict[MakeKernel, list[Kernel]] = {}

    @property
    def kernels(self) -> str:
        """See AttentionBackend."""
        return f"{self.name} {self.library.__version__} and {self.others.kernels}"

    def left_to(self, layout: KvLayout, num_heads: int) -> dict[str, str]:
        """See AttentionBackend."""
        unserved: dict[str, str] = {}
        for layer in dict.fromkeys(layout.layers):
            geometry = geometry_of_layer(layer, layout.dtype, num_heads)
            for kind in PagedKind:
                if not has_kernel(geometry, kind):
                    unserved[described(geometry, kind)] = self.others.name
        return unserved

    def planned(self, batch: PagedBatch, geometry: Geometry) -> Kernel:
        """A kernel that is planned for ``batch``. Where Hopper's cannot be made, from then on the others."""
        rows_each = batch.num_rows / batch.num_requests if self.hopper else 0.0
        make = kernel_for(geometry, batch.kind, rows_each)
        try:
            kernel = self._next_kernel(make)
            kernel.plan(batch, geometry)
        except HOPPER_FAULTS as error:
            if make is not LongPrefillKernel:
                raise
            self._leave_hopper(error)
            return self.planned(batch, geometry)
        return kernel

    def _run(self, plan: FlashInferPlan, kernel: Kernel, query: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        """A layer by the kernel of ``plan``. Where Hopper's does not run, from then on the others."""
        try:
            return kernel.run(query, pages)
        except HOPPER_FAULTS as error:
            if not isinstance(kernel, LongPrefillKernel):
                raise
            self._leave_hopper(error)
            return plan.kernel_again().run(query, pages)

    def _leave_hopper(self, error: Exception) -> None:
        """Said once: plans that were made before may fail after."""
        if self.hopper:
            log.warning("FlashInfer's kernels for Hopper cannot be had, long prompts take the others: %s", error)
        self.hopper = False

    def _next_kernel(self, make: MakeKernel) -> Kernel:
        """The kernel of a kind that was planned longest ago."""
        kernels = self._kernels.setdefault(make, [])
        if len(kernels) < KERNELS_PER_KIND:
            kernels.append(make(self.library, self.workspace, None))
        else:
            kernels.append(kernels.pop(0))
        return kernels[-1]

    def plan(self, batch: ForwardBatch) -> FlashInferPlan:
        """See AttentionBackend."""
        return FlashInferPlan(self, batch)

    def static_plan(self, shape: StaticShape, kv: KvPool) -> StaticPlan | None:
        """See AttentionBackend. What FlashInfer has no kernel for is captured over the backend that serves the rest,
        but for trees over MLA where that is torch's."""
        latent = any(layer.kind is LayerKind.MLA for layer in kv.layout.layers)
        if latent and shape.tree and isinstance(self.others, TorchAttention):
            return None
        odd = kv.layout.dtype not in DTYPES or (not latent and self.head_dim not in HEAD_DIMS)
        if odd or (latent and shape.tree):
            self.left.add(f"{kv.layout.dtype} in graphs of {shape}")
            return self.others.static_plan(shape, kv)
        return StaticFlashInferPlan(self, shape, kv)

    def attend(
        self,
        query: torch.Tensor,
        kv: KvPool,
        layer: int,
        plan: AttentionPlan,
        scale: float,
        window: int = 0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See AttentionBackend. Raises ValueError for windows and sinks, for which ``attention_for`` has another."""
        if sinks is not None or (window and not 0 < self.longest <= window):
            raise ValueError(f"attention backend {self.name!r} has no sliding windows and no sinks")
        if isinstance(plan, FlashInferPlan):
            kernel = plan.kernel(geometry_of(query, kv, layer, scale, 0))
            if kernel is not None:
                return self._run(plan, kernel, query, kv.data[layer])
            plan = plan.other()
        return self.others.attend(query, kv, layer, plan, scale)

    def attend_latent(
        self, query: torch.Tensor, kv: KvPool, layer: int, plan: AttentionPlan, scale: float, value_dim: int
    ) -> torch.Tensor:
        """See AttentionBackend."""
        if isinstance(plan, FlashInferPlan):
            kernel = plan.kernel(geometry_of(query, kv, layer, scale, value_dim))
            if kernel is not None:
                return kernel.run(query, kv.data[layer])
            plan = plan.other()
        return self.others.attend_latent(query, kv, layer, plan, scale, value_dim)
