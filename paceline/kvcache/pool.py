"""The KV pool of a node: one tensor per layer, target and draft layers over the same pages.

A *slot* names one token's place in every layer: ``page * page_size + offset``. Bytes that leave the pool are in
canonical order (layer, token, then K heads, then V heads), which knows no page size: what ``gather`` of one pool
gives, ``scatter`` of another takes (docs/internals/architecture.md#memory).
"""

from __future__ import annotations

import math

import torch

from paceline.host_memory import host_zeros
from paceline.kvcache.device_pages import make_device_pages
from paceline.kvcache.layout import KvLayer, KvLayout, LayerKind

MAX_SLOTS = 2**31  # page tables hold slots as int32


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return host_zeros(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)


class KvPool:
    """Keys and values of all layers, ``num_pages`` pages of ``page_size`` tokens.

    ``data[layer]`` is ``[num_pages, 2, page_size, num_kv_heads, head_dim]`` (K, then V) for a GQA layer and
    ``[num_pages, page_size, head_dim]`` for an MLA layer. The pool knows nothing of owners: whoever holds a page
    (``PageAllocator``) may write its slots. Slots may be int32 or int64 on any device; those written in one call
    must be distinct. A slot outside the pool raises IndexError (CPU), a wrong shape or dtype ValueError.
    """

    def __init__(
        self,
        layout: KvLayout,
        num_pages: int,
        page_size: int,
        device: torch.device | str = "cpu",
        held: KvLayout | None = None,
        data: list[torch.Tensor] | None = None,
    ) -> None:
        """held: what of ``layout`` lies here, where a subclass has the other heads elsewhere; None: all of it. data: of
        another pool, to be used here too; None: new memory."""
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"num_pages and page_size must be at least 1, got {num_pages} and {page_size}")
        if num_pages * page_size > MAX_SLOTS:
            raise ValueError(f"{num_pages} pages of {page_size} tokens exceed {MAX_SLOTS} slots")
        self.layout = layout
        self.num_pages = num_pages
        self.page_size = page_size
        self.device = torch.device(device)
        self.alone = held is None  # no other rank holds any of these rows, be it another head or a copy
        self.held = held or layout
        self.data: list[torch.Tensor] = data or [
            _zeros(self._shape(layer), layout.dtype, self.device) for layer in self.held.layers
        ]
        # The same memory as rows that lie together: [num_pages * 2 * page_size, num_kv_heads * head_dim] (GQA),
        # [num_pages * page_size, head_dim] (MLA).
        self._flat = [
            data.view(-1, layer.head_dim if layer.kind is LayerKind.MLA else layer.num_kv_heads * layer.head_dim)
            for data, layer in zip(self.data, self.held.layers, strict=True)
        ]
        self._kernels = make_device_pages(self._flat, self.held, page_size)

    def held_as_pool(self, layout: KvLayout) -> KvPool:
        """What lies here of the first layers, which ``layout`` says, as a pool of its own over the same memory."""
        count = len(layout.layers)
        if layout.layers != self.held.layers[:count] or layout.dtype is not self.layout.dtype:
            raise ValueError(f"{layout.text()} is asked for, {self.held.text()} lies here")
        return KvPool(layout, self.num_pages, self.page_size, self.device, data=self.data[:count])

    def read(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of key and value, [T, num_kv_heads, head_dim] each, of a GQA layer at ``slots`` [T]: of the heads that
        lie here, which is what attention of this rank sees."""
        spec = self._layer(layer, LayerKind.GQA)
        rows = self._key_rows(self._slots(slots))
        flat = self._flat[layer]
        shape = (-1, spec.num_kv_heads, spec.head_dim)
        return flat[rows].view(shape), flat[rows + self.page_size].view(shape)

    def read_latent(self, layer: int, slots: torch.Tensor) -> torch.Tensor:
        """A copy of the rows, [T, head_dim], of an MLA layer at ``slots`` [T]."""
        self._layer(layer, LayerKind.MLA)
        return self._flat[layer][self._slots(slots)]

    def gather(self, layers: range, slots: torch.Tensor) -> torch.Tensor:
        """Tokens of ``layers`` as one flat tensor in canonical order: [sum of row_elems over layers * T].

        slots: [T], in order of position. The result is contiguous, of the layout's dtype, on the pool's device.
        """
        slots = self._slots(slots)
        if self._kernels is not None and self._elems(layers):
            return self._kernels.gather(layers, slots)
        result = torch.empty(self._elems(layers) * slots.shape[0], dtype=self.layout.dtype, device=self.device)
        rows = {kind: self._rows(kind, slots) for kind in LayerKind}
        for layer, part in zip(layers, self._split(layers, result, slots.shape[0]), strict=True):
            torch.index_select(self._flat[layer], 0, rows[self.held.layers[layer].kind], out=part)
        return result

    def scatter(self, layers: range, slots: torch.Tensor, data: torch.Tensor) -> None:
        """Inverse of ``gather``: store flat canonical ``data`` of ``layers`` at ``slots`` [T]."""
        slots = self._slots(slots)
        self._check(f"data for {slots.shape[0]} tokens of layers {layers}", data, (self._elems(layers) * len(slots),))
        data = data.to(self.device).contiguous()
        if self._kernels is not None:
            return self._kernels.scatter(layers, slots, data)
        rows = {kind: self._rows(kind, slots) for kind in LayerKind}
        for layer, part in zip(layers, self._split(layers, data, slots.shape[0]), strict=True):
            self._flat[layer].index_copy_(0, rows[self.held.layers[layer].kind], part)

    def copy_slots(self, layers: range, source: torch.Tensor, dest: torch.Tensor) -> None:
        """Copy tokens ``source`` [n] to ``dest`` [n] in ``layers``; the two may overlap (algorithms.md D6).

        Every source is read before any dest of that layer is written.
        """
        source, dest = self._slots(source), self._slots(dest)
        if source.shape != dest.shape:
            raise ValueError(f"{source.shape[0]} source slots but {dest.shape[0]} dest slots")
        self._elems(layers)  # checks the range
        if self._kernels is not None:
            return self._kernels.scatter(layers, dest, self._kernels.gather(layers, source))
        pairs = {kind: (self._rows(kind, source), self._rows(kind, dest)) for kind in LayerKind}
        for layer in layers:
            from_rows, to_rows = pairs[self.held.layers[layer].kind]
            self._flat[layer].index_copy_(0, to_rows, self._flat[layer].index_select(0, from_rows))

    def keep_paths(
        self, layers: range, slots: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor, paths: torch.Tensor
    ) -> None:
        """Compact many trees at once (algorithms.md D6) without waiting for the device: ``copy_slots`` of paths that
        the host need not know.

        Tree s has the nodes ``slots[starts[s]:starts[s + 1]]`` (slots int32 [N], starts int32 [S + 1]). Its node
        ``paths[s, i]`` goes to the slot of its node i + 1, for i < lengths[s] (int32 [S], paths int32 [S, P], each
        path ascending; what lies past its length is not read as a node). All on the pool's device.
        """
        if self._kernels is not None and self.alone:
            return self._kernels.compact(layers, slots, starts, lengths, paths)
        steps = torch.arange(paths.shape[1], device=paths.device)
        kept = steps < lengths.unsqueeze(1)
        # What is not kept copies the root onto itself.
        from_nodes = starts[:-1].unsqueeze(1) + torch.where(kept, paths, 0)
        to_nodes = starts[:-1].unsqueeze(1) + torch.where(kept, steps + 1, 0)
        self.copy_slots(layers, slots[from_nodes.view(-1)], slots[to_nodes.view(-1)])

    def _shape(self, layer: KvLayer) -> tuple[int, ...]:
        if layer.kind is LayerKind.MLA:
            return (self.num_pages, self.page_size, layer.head_dim)
        return (self.num_pages, 2, self.page_size, layer.num_kv_heads, layer.head_dim)

    def _layer(self, layer: int, kind: LayerKind) -> KvLayer:
        if not 0 <= layer < len(self.data):
            raise ValueError(f"layer {layer} is outside a pool of {len(self.data)} layers")
        spec = self.held.layers[layer]
        if spec.kind is not kind:
            raise ValueError(f"layer {layer} is {spec.kind}, not {kind}")
        return spec

    def _slots(self, slots: torch.Tensor) -> torch.Tensor:
        if slots.dim() != 1 or slots.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"slots must be int32 or int64 [T], got {slots.dtype} {list(slots.shape)}")
        slots = slots.to(torch.int64)
        if self.device.type == "cuda" and slots.device.type == "cpu":
            return slots.pin_memory().to(self.device, non_blocking=True)  # the host does not wait for the device
        return slots.to(self.device)

    def _check(self, what: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
        if tensor.shape != shape:
            raise ValueError(f"{what}: shape {list(tensor.shape)}, expected {list(shape)}")
        if tensor.dtype != self.layout.dtype:
            raise ValueError(f"{what}: dtype {tensor.dtype}, the pool holds {self.layout.dtype}")

    def _elems(self, layers: range) -> int:
        """Elements of one token in ``layers``."""
        if any(not 0 <= layer < len(self.data) for layer in layers):
            raise ValueError(f"layers {layers} are outside a pool of {len(self.data)} layers")
        return sum(self.held.layers[layer].row_elems for layer in layers)

    def _key_rows(self, slots: torch.Tensor) -> torch.Tensor:
        """Rows of K in a GQA layer's flat view; V's are ``page_size`` further on, since a page holds K, then V."""
        return slots + torch.div(slots, self.page_size, rounding_mode="floor") * self.page_size

    def _rows(self, kind: LayerKind, slots: torch.Tensor) -> torch.Tensor:
        """All rows of ``slots`` in a layer's flat view, in canonical order: [T] (MLA) or [2 * T], K V K V (GQA)."""
        if kind is LayerKind.MLA:
            return slots
        keys = self._key_rows(slots)
        return torch.stack((keys, keys + self.page_size), dim=1).view(-1)

    def _split(self, layers: range, data: torch.Tensor, num_tokens: int) -> list[torch.Tensor]:
        """Views of flat canonical ``data``, one per layer, as rows of that layer's flat view."""
        sizes = [self.held.layers[layer].row_elems * num_tokens for layer in layers]
        parts = torch.split(data, sizes)
        return [part.view(-1, self._flat[layer].shape[1]) for layer, part in zip(layers, parts, strict=True)]
