"""FlashInfer's wrappers behind one small interface. The only file that calls FlashInfer.

Kernels are of its ``fa2`` family: it alone has tree masks, and decode, chain and tree rows of one model should come
from the same arithmetic. (Decode on tensor cores is that family too, and any ratio of query to KV heads is served.)
Long prompts on Hopper are the exception: ``LongPrefillKernel`` is of the ``fa3`` family.

Two habits of FlashInfer shape this file. ``plan`` writes page-locked memory whose copy to the device may still be
waiting when the next ``plan`` of the same wrapper comes: ``Kernel.plan`` waits for that copy, and no other. And for a
mask that comes packed it computes where each request's bits begin as if they were bytes: the right places are put in
afterwards.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch

from paceline.attention.base import StaticShape
from paceline.attention.mask_bits import pack_masks
from paceline.attention.paged import PagedBatch
from paceline.errors import ConfigError
from paceline.layers.upload import pinned, staged_together

BACKEND, HOPPER_BACKEND = "fa2", "fa3"
MASK_INDPTR = "_mask_indptr_buf"  # of the prefill wrapper, where its kernel reads the beginnings of the masks
STATIC_INT_BYTES = 1 << 20  # of a captured wrapper's index workspace; FlashInfer's own 8 MiB are for long prefills


def load_flashinfer() -> ModuleType:
    """FlashInfer, imported now. Raises ConfigError where that fails."""
    try:
        import flashinfer
    except (ImportError, OSError, RuntimeError) as error:
        message = f"FlashInfer cannot be imported ({error}): pip install 'paceline[gpu]', or set attention to torch"
        raise ConfigError("attention", message) from error
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper
    if MASK_INDPTR not in inspect.getsource(wrapper):
        raise ConfigError("attention", f"FlashInfer {flashinfer.__version__} is not supported: set attention to torch")
    return flashinfer  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Geometry:
    """What a kernel is compiled and planned for, besides the batch."""

    num_heads: int
    num_kv_heads: int
    head_dim: int  # of query and key
    value_dim: int  # of MLA: the part of a row that is its value; 0 for GQA
    page_size: int
    scale: float
    dtype: torch.dtype


class StaticBuffers:
    """Device memory of one captured wrapper; int32 but for the mask."""

    def __init__(self, shape: StaticShape, page_size: int, device: torch.device) -> None:
        def ints(size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device)

        pages = -(-shape.max_len // page_size)
        self.rows = shape.rows
        self.qo_indptr, self.kv_indptr = ints(shape.requests + 1), ints(shape.requests + 1)
        self.indices = ints(shape.requests * pages)
        self.last_page_len, self.kv_lens = ints(shape.requests), ints(shape.requests)
        self.mask_indptr: torch.Tensor | None = None
        self.mask: torch.Tensor | None = None
        if shape.tree:
            self.mask_indptr = ints(shape.requests + 1)
            most = shape.requests * (-(-shape.rows * shape.max_len // 8))
            self.mask = torch.zeros(most, dtype=torch.uint8, device=device)


class Kernel(ABC):
    """One FlashInfer wrapper. ``plan`` once per forward, ``run`` once per layer."""

    plans_by_length = False  # whether a plan depends on lengths, not on numbers of pages alone

    def __init__(self, workspace: torch.Tensor, static: StaticBuffers | None) -> None:
        self._workspace, self._static = workspace, static
        self._staged: torch.cuda.Event | None = None  # after which the last plan's page-locked memory is free

    def plan(self, batch: PagedBatch, geometry: Geometry) -> None:
        """Prepare for ``batch``; never inside a capture."""
        if self._staged is not None:
            self._staged.synchronize()
        self._plan(batch, geometry)
        if self._workspace.is_cuda:
            self._staged = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._staged.record()

    def plans_alike(self, batch: PagedBatch, other: PagedBatch) -> bool:
        """Whether two batches of one captured wrapper have the same plan."""
        same = np.array_equal(batch.kv_indptr, other.kv_indptr)
        return same and (not self.plans_by_length or np.array_equal(batch.kv_lens, other.kv_lens))

    @abstractmethod
    def _plan(self, batch: PagedBatch, geometry: Geometry) -> None: ...

    def _in_place(self, batch: PagedBatch) -> torch.Tensor:
        """Page indices that captured work fills in: as many of them as the batch has."""
        assert self._static is not None
        return self._static.indices[: int(batch.kv_indptr[-1])]

    @abstractmethod
    def run(self, query: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        """query: [T, num_heads, head_dim]; pages: the pool's layer -> [T, num_heads, head_dim or value_dim]."""


def _shrink(wrapper: Any, workspace: torch.Tensor) -> None:
    """There are many captured wrappers: each gets a small index workspace."""
    small = torch.empty(STATIC_INT_BYTES, dtype=torch.uint8, device=workspace.device)
    wrapper.reset_workspace_buffer(workspace, small)


class DecodeKernel(Kernel):
    """One row a request."""

    def __init__(self, library: ModuleType, workspace: torch.Tensor, static: StaticBuffers | None) -> None:
        super().__init__(workspace, static)
        options: dict[str, Any] = {"use_tensor_cores": True, "backend": BACKEND}
        if static is not None:
            options |= {
                "use_cuda_graph": True,
                "paged_kv_indptr_buffer": static.kv_indptr,
                "paged_kv_indices_buffer": static.indices,
                "paged_kv_last_page_len_buffer": static.last_page_len,
            }
        self._wrapper = library.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", **options)
        if static is not None:
            _shrink(self._wrapper, workspace)

    def _plan(self, batch: PagedBatch, geometry: Geometry) -> None:
        device = self._workspace.device
        indices = self._in_place(batch) if batch.indices is None else staged_together([batch.indices], device)[0]
        self._wrapper.plan(
            pinned(batch.kv_indptr, device),
            indices,
            pinned(batch.last_page_len, device),
            geometry.num_heads,
            geometry.num_kv_heads,
            geometry.head_dim,
            geometry.page_size,
            q_data_type=geometry.dtype,
            kv_data_type=geometry.dtype,
            sm_scale=geometry.scale,
            non_blocking=True,
        )

    def run(self, query: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        """See Kernel."""
        return self._wrapper.run(query, pages)  # type: ignore[no-any-return]


class PrefillKernel(Kernel):
    """Several rows a request: causal and aligned to the end, or as a mask says."""

    family = BACKEND

    def __init__(self, library: ModuleType, workspace: torch.Tensor, static: StaticBuffers | None) -> None:
        super().__init__(workspace, static)
        options: dict[str, Any] = {"backend": self.family}
        if static is not None:
            options |= {
                "use_cuda_graph": True,
                "qo_indptr_buf": static.qo_indptr,
                "paged_kv_indptr_buf": static.kv_indptr,
                "paged_kv_indices_buf": static.indices,
                "paged_kv_last_page_len_buf": static.last_page_len,
                "custom_mask_buf": static.mask,
                "mask_indptr_buf": static.mask_indptr,
            }
        self._wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", **options)
        self._hints: Mapping[str, Any] = {}
        if static is not None:
            _shrink(self._wrapper, workspace)
            if "uniform_q_len" in inspect.signature(self._wrapper.plan).parameters:
                self._hints = {"uniform_q_len": static.rows}

    def _plan(self, batch: PagedBatch, geometry: Geometry) -> None:
        device = self._workspace.device
        indices, mask, mask_indptr = self._stage(batch)
        self._wrapper.plan(
            pinned(batch.qo_indptr, device),
            pinned(batch.kv_indptr, device),
            indices,
            pinned(batch.last_page_len, device),
            geometry.num_heads,
            geometry.num_kv_heads,
            geometry.head_dim,
            geometry.page_size,
            packed_custom_mask=mask,
            causal=mask is None,
            sm_scale=geometry.scale,
            q_data_type=geometry.dtype,
            kv_data_type=geometry.dtype,
            non_blocking=True,
            **self._hints,
        )
        if mask_indptr is not None:
            if self._static is None:
                setattr(self._wrapper, MASK_INDPTR, mask_indptr)
            else:
                assert self._static.mask_indptr is not None
                self._static.mask_indptr.copy_(mask_indptr)

    def _stage(self, batch: PagedBatch) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Page indices, packed mask and the bytes at which requests begin in it, on the device, by one copy."""
        device, masks = self._workspace.device, batch.masks
        if batch.indices is None:
            return self._in_place(batch), None, None
        if masks is None:
            return staged_together([batch.indices], device)[0], None, None
        arrays = [batch.indices, masks.prefix_lens, masks.bases, masks.tails.ravel(), batch.qo_indptr]
        found = staged_together([*arrays, batch.kv_lens, masks.byte_indptr], device)
        indices, prefix_lens, bases, tails, qo_indptr, kv_lens, byte_indptr = found
        tails = tails.view(masks.tails.shape)
        bits = pack_masks(prefix_lens, bases, tails, qo_indptr, kv_lens, byte_indptr, int(masks.byte_indptr[-1]))
        return indices, bits, byte_indptr

    def run(self, query: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        """See Kernel."""
        return self._wrapper.run(query, pages)  # type: ignore[no-any-return]


class LongPrefillKernel(PrefillKernel):
    """Many rows a request, without masks, by kernels for Hopper's matrix units; never captured."""

    family = HOPPER_BACKEND


class LatentKernel(Kernel):
    """MLA in the absorbed form; causal, aligned to the end."""

    plans_by_length = True

    def __init__(self, library: ModuleType, workspace: torch.Tensor, static: StaticBuffers | None) -> None:
        super().__init__(workspace, static)
        self._metadata = getattr(library.mla, "MLAPlanMetadata", None)  # FlashInfer before 0.7 takes flat arguments
        options: dict[str, Any] = {"backend": BACKEND}
        if static is not None:
            options |= {
                "use_cuda_graph": True,
                "qo_indptr": static.qo_indptr,
                "kv_indptr": static.kv_indptr,
                "kv_indices": static.indices,
                "kv_len_arr": static.kv_lens,
            }
        self._wrapper = library.mla.BatchMLAPagedAttentionWrapper(workspace, **options)
        self._value_dim = 0

    def _plan(self, batch: PagedBatch, geometry: Geometry) -> None:
        device = self._workspace.device
        where: dict[str, Any] = {
            "qo_indptr": pinned(batch.qo_indptr, device),
            "kv_indptr": pinned(batch.kv_indptr, device),
            "kv_indices": self._in_place(batch) if batch.indices is None else pinned(batch.indices, device),
            "kv_len_arr": pinned(batch.kv_lens, device),
        }
        if self._metadata is not None:
            where = {"metadata": self._metadata.csr(**where)}
        self._value_dim = geometry.value_dim
        self._wrapper.plan(
            **where,
            num_heads=geometry.num_heads,
            head_dim_ckv=geometry.value_dim,
            head_dim_kpe=geometry.head_dim - geometry.value_dim,
            page_size=geometry.page_size,
            causal=True,
            sm_scale=geometry.scale,
            q_data_type=geometry.dtype,
            kv_data_type=geometry.dtype,
        )

    def run(self, query: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        """See Kernel."""
        if self._metadata is not None:
            return self._wrapper.run(query=query, kv_cache=pages)  # type: ignore[no-any-return]
        at = self._value_dim
        return self._wrapper.run(  # type: ignore[no-any-return]
            query[..., :at], query[..., at:], pages[..., :at], pages[..., at:]
        )
