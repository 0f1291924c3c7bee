"""Pre-norm layers one after another, in one call of the CPU's kernels where they can run them (kernels/block.cpp).

Elsewhere layers run step by step. Both give the same bits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from paceline.kvcache.pool import KvPool
from paceline.layers.ops import add_rms_norm
from paceline.models.base import ForwardContext
from paceline.models.block import Block


class _LayerAt(ctypes.Structure):
    """``LayerAt`` of kernels/block.cpp, field by field: a block, its input norm, and its pages of a pool."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("block", "input_norm", "pages")]


class LayerRun:
    """Layers of one geometry. Each is a block and what its rows are normed by before attention, [hidden_size]."""

    def __init__(self, layers: Sequence[tuple[Block, torch.Tensor]]) -> None:
        self._layers = layers
        self._at: tuple[KvPool, ctypes.Array[_LayerAt]] | None = None  # for the pool that ran last

    def __call__(
        self, added: torch.Tensor, residual: torch.Tensor, table: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """``residual += added``, the first block over its normed rows, and so on.

        added, residual: [T, hidden_size], contiguous; residual is updated in place; table: see Block.write -> what
        the last layer adds last, [T, hidden_size]. Raises ValueError for heads that have no attention kernel.
        """
        first = self._layers[0][0]
        calls, plan, batch = first.calls, first.kernel_plan(context), context.batch
        if calls is None or plan is None:
            return self._step_by_step(added, residual, table, context)
        rows, out = added.shape[0], torch.empty_like(residual)
        scratch = added.new_empty(rows, calls.layer_scratch)
        failed = calls.call("layers", context.kv)(
            self._records(context.kv), len(self._layers), rows, added.data_ptr(), table.data_ptr(),
            batch.positions.data_ptr(), batch.write_slots.data_ptr(), context.kv.page_size, *plan.addresses,
            scratch.data_ptr(), residual.data_ptr(), out.data_ptr(),
        )  # fmt: skip
        return first.checked(out, failed)

    def _step_by_step(
        self, added: torch.Tensor, residual: torch.Tensor, table: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        for block, input_norm in self._layers:
            x = add_rms_norm(added, residual, input_norm, block.shape.rms_norm_eps)
            added = block.finish(block.write(x, table, context.batch, context.kv), residual, context)
        return added

    def _records(self, kv: KvPool) -> ctypes.Array[_LayerAt]:
        if self._at is None or self._at[0] is not kv:
            records = (_LayerAt * len(self._layers))()
            for record, (block, input_norm) in zip(records, self._layers, strict=True):
                assert block.calls is not None
                record.block, record.input_norm = block.calls.address, input_norm.data_ptr()
                record.pages = kv.data[block.kv_layer].data_ptr()
            self._at = (kv, records)
        return self._at[1]
