"""What FlashInfer's wrappers do, in plain torch: they read the arrays they were planned with as its pages say.

Faithful where a caller can go wrong: buffers given for CUDA graphs are what ``run`` reads, shapes are frozen by the
first plan, and of a packed mask ``plan`` takes the beginnings of the requests to be their numbers of *elements*, while
``run`` reads bytes from there (as FlashInfer 0.7 does: who packs a mask must set its beginnings).
"""

from __future__ import annotations

from types import SimpleNamespace

import torch

Buffer = torch.Tensor | None
__version__ = "0.7"


def _planned(buffer: Buffer) -> torch.Tensor:
    """What ``plan`` has filled."""
    assert buffer is not None
    return buffer


def _expect(tensor: torch.Tensor, size: int | None = None) -> None:
    assert tensor.dtype is torch.int32
    assert tensor.dim() == 1
    assert size is None or tensor.shape[0] == size


class _Paged:
    """Page tables, planned eagerly or into the caller's buffers."""

    def __init__(self, workspace: torch.Tensor, indptr: Buffer, indices: Buffer, last: Buffer, graph: bool) -> None:
        assert workspace.dtype is torch.uint8
        self._graph = graph
        assert not graph or (indptr is not None and indices is not None and last is not None)
        self._indptr, self._indices, self._last = indptr, indices, last

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor) -> None:
        assert int_workspace_buffer.dtype is torch.uint8

    def _put(self, name: str, value: torch.Tensor, exact: bool = True) -> None:
        kept = getattr(self, name)
        if not self._graph:
            setattr(self, name, value.clone())
            return
        assert kept.shape == value.shape if exact else kept.shape[0] >= value.shape[0], name
        kept[: value.shape[0]].copy_(value)

    def _plan_pages(self, indptr: torch.Tensor, indices: torch.Tensor, last: torch.Tensor, page_size: int) -> None:
        _expect(indptr, last.shape[0] + 1)
        _expect(indices, int(indptr[-1]))
        _expect(last)
        assert int(last.min()) >= 1
        assert int(last.max()) <= page_size
        self.page_size = page_size
        self._put("_indptr", indptr)
        self._put("_indices", indices, exact=False)
        self._put("_last", last)

    def _columns(self, request: int) -> torch.Tensor:
        """Slots of the request's columns."""
        first, end = (int(at) for at in _planned(self._indptr)[request : request + 2])
        pages = _planned(self._indices)[first:end].long()
        slots = (pages[:, None] * self.page_size + torch.arange(self.page_size)).flatten()
        return slots[: (end - first - 1) * self.page_size + int(_planned(self._last)[request])]


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: torch.Tensor, scale: float
) -> torch.Tensor:
    """query: [n, H, D]; key: [L, Hk, D]; value: [L, Hk, Dv]; seen: bool [n, L]. Rows that see nothing give zeros."""
    group = query.shape[1] // key.shape[1]
    key, value = (t.float().repeat_interleave(group, dim=1) for t in (key, value))
    scores = torch.einsum("nhd,lhd->nhl", query.float(), key) * scale
    weights = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1).masked_fill(~seen[:, None], 0.0)
    return torch.einsum("nhl,lhd->nhd", weights, value).to(query.dtype)


def _causal(rows: int, columns: int) -> torch.Tensor:
    """Aligned to the end."""
    return torch.arange(columns)[None] <= torch.arange(rows)[:, None] + columns - rows


class BatchPrefillWithPagedKVCacheWrapper(_Paged):
    """See FlashInfer."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Buffer = None,
        paged_kv_indptr_buf: Buffer = None,
        paged_kv_indices_buf: Buffer = None,
        paged_kv_last_page_len_buf: Buffer = None,
        custom_mask_buf: Buffer = None,
        mask_indptr_buf: Buffer = None,
        backend: str = "auto",
    ) -> None:  # the parameters are those of FlashInfer's own class
        buffers = (paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf)
        super().__init__(float_workspace_buffer, *buffers, use_cuda_graph)
        assert kv_layout == "NHD"
        assert backend == "fa2" or (backend == "fa3" and not use_cuda_graph)
        self.family = backend
        assert not use_cuda_graph or qo_indptr_buf is not None
        self._qo_indptr, self._custom_mask_buf, self._mask_indptr_buf = qo_indptr_buf, custom_mask_buf, mask_indptr_buf
        self._total_rows: int | None = None

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        sm_scale: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
        non_blocking: bool = True,
        uniform_q_len: int | None = None,
    ) -> None:
        self._plan_pages(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size)
        _expect(qo_indptr, paged_kv_indptr.shape[0])
        if self._graph:
            assert self._total_rows in (None, int(qo_indptr[-1]))
            self._total_rows = int(qo_indptr[-1])
        if uniform_q_len is not None:
            assert qo_indptr.diff().tolist() == [uniform_q_len] * (len(qo_indptr) - 1)
        self._put("_qo_indptr", qo_indptr)
        self._heads, self._scale, self._causal_rows = (num_qo_heads, num_kv_heads, head_dim_qk), sm_scale, causal
        if packed_custom_mask is None:
            assert not self._graph or self._custom_mask_buf is None
            self._custom_mask_buf = self._mask_indptr_buf = None
            return
        assert packed_custom_mask.dtype is torch.uint8
        assert self.family == "fa2", "fa3 has no masks"
        pages = paged_kv_indptr.diff() - 1
        elements = (qo_indptr.diff() * (pages * page_size + paged_kv_last_page_len)).cumsum(0)
        self._put("_custom_mask_buf", packed_custom_mask, exact=False)
        self._put("_mask_indptr_buf", torch.cat((torch.zeros(1), elements)).int())

    def run(self, q: torch.Tensor, paged_kv_cache: torch.Tensor) -> torch.Tensor:
        keys, values = (paged_kv_cache[:, i].flatten(0, 1) for i in (0, 1))
        assert (q.shape[1], keys.shape[1], q.shape[2]) == self._heads
        rows_at = _planned(self._qo_indptr)
        assert q.shape[0] == int(rows_at[-1])
        assert self._scale is not None
        parts = []
        for request in range(len(rows_at) - 1):
            rows = slice(int(rows_at[request]), int(rows_at[request + 1]))
            slots = self._columns(request)
            seen = self._seen(request, rows.stop - rows.start, len(slots))
            parts.append(_attend(q[rows], keys[slots], values[slots], seen, self._scale))
        return torch.cat(parts)

    def _seen(self, request: int, rows: int, columns: int) -> torch.Tensor:
        if self._custom_mask_buf is None:
            assert self._causal_rows
            return _causal(rows, columns)
        first = int(_planned(self._mask_indptr_buf)[request])
        at = torch.arange(rows * columns)
        bits = self._custom_mask_buf[first + at // 8].int() >> (at % 8).int() & 1
        return bits.view(rows, columns) > 0


class BatchDecodeWithPagedKVCacheWrapper(_Paged):
    """See FlashInfer."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Buffer = None,
        paged_kv_indices_buffer: Buffer = None,
        paged_kv_last_page_len_buffer: Buffer = None,
        backend: str = "auto",
    ) -> None:
        buffers = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
        super().__init__(float_workspace_buffer, *buffers, use_cuda_graph)
        assert (kv_layout, backend, use_tensor_cores) == ("NHD", "fa2", True)

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
        sm_scale: float | None = None,
        non_blocking: bool = True,
    ) -> None:
        self._plan_pages(indptr, indices, last_page_len, page_size)
        self._scale = sm_scale

    def run(self, q: torch.Tensor, paged_kv_cache: torch.Tensor) -> torch.Tensor:
        keys, values = (paged_kv_cache[:, i].flatten(0, 1) for i in (0, 1))
        assert q.shape[0] == len(_planned(self._last))
        assert self._scale is not None
        parts = []
        for request in range(q.shape[0]):
            slots = self._columns(request)
            seen = torch.ones(1, len(slots), dtype=torch.bool)
            parts.append(_attend(q[request : request + 1], keys[slots], values[slots], seen, self._scale))
        return torch.cat(parts)


class MLAPlanMetadata(SimpleNamespace):
    """See FlashInfer."""

    @classmethod
    def csr(
        cls, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, kv_indices: torch.Tensor, kv_len_arr: torch.Tensor
    ) -> MLAPlanMetadata:
        return cls(qo_indptr=qo_indptr, kv_indptr=kv_indptr, kv_indices=kv_indices, kv_len_arr=kv_len_arr)


class BatchMLAPagedAttentionWrapper:
    """See FlashInfer."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: Buffer = None,
        kv_indptr: Buffer = None,
        kv_indices: Buffer = None,
        kv_len_arr: Buffer = None,
        backend: str = "auto",
    ) -> None:
        assert backend == "fa2"
        self._graph = use_cuda_graph
        self._kept = {
            "qo_indptr": qo_indptr,
            "kv_indptr": kv_indptr,
            "kv_indices": kv_indices,
            "kv_len_arr": kv_len_arr,
        }

    def plan(
        self,
        *,
        metadata: MLAPlanMetadata,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        for name, given in vars(metadata).items():
            _expect(given)
            kept = self._kept[name]
            if self._graph:
                assert kept is not None
                kept[: given.shape[0]].copy_(given)
            else:
                self._kept[name] = given.clone()
        self._page_size, self._scale, self._value_dim = page_size, sm_scale, head_dim_ckv
        assert causal

    def run(self, *, query: torch.Tensor, kv_cache: torch.Tensor) -> torch.Tensor:
        rows_at, pages_at, indices, lengths = (
            _planned(self._kept[n]) for n in ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")
        )
        latents = kv_cache.flatten(0, 1)
        parts = []
        for request, length in enumerate(lengths.tolist()):
            pages = indices[int(pages_at[request]) : int(pages_at[request + 1])].long()
            slots = (pages[:, None] * self._page_size + torch.arange(self._page_size)).flatten()[:length]
            own = query[int(rows_at[request]) : int(rows_at[request + 1])]
            key = latents[slots][:, None]
            seen = _causal(own.shape[0], length)
            parts.append(_attend(own, key, key[..., : self._value_dim], seen, self._scale))
        return torch.cat(parts)


mla = SimpleNamespace(BatchMLAPagedAttentionWrapper=BatchMLAPagedAttentionWrapper, MLAPlanMetadata=MLAPlanMetadata)
