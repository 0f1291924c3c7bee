"""Row-invariant attention on CPU (``layers/kernels/``)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from typing import Any

import numpy as np
import torch

from paceline.attention.base import AttentionBackend, AttentionPlan, ForwardBatch
from paceline.kvcache.pool import KvPool
from paceline.layers.build import load_kernels

KERNEL_HEAD_DIMS = (16, 32, 64, 96, 128, 256)


@dataclass(frozen=True)
class RowPlan(AttentionPlan):
    """Where each row's visible positions lie. T rows."""

    slots: torch.Tensor  # int32, the segments' position-to-slot lists one after another
    slot_offsets: torch.Tensor  # int64 [T], start of the row's list in slots
    prefix_lens: torch.Tensor  # int32 [T]
    tails: torch.Tensor  # int32, the rows' tails one after another
    tail_offsets: torch.Tensor  # int64 [T + 1]

    @cached_property
    def addresses(self) -> tuple[int, ...]:
        """Addresses of the five tensors, as the kernels take them."""
        parts = (self.slots, self.slot_offsets, self.prefix_lens, self.tails, self.tail_offsets)
        return tuple(part.data_ptr() for part in parts)


def plan_rows(batch: ForwardBatch) -> RowPlan:
    """Flatten the segments' position-to-slot lists; tensors stay on CPU."""
    lists: list[torch.Tensor] = []
    offsets: list[int] = []
    prefix_lens: list[int] = []
    tails: list[int] = []
    tail_lens: list[int] = []
    at = 0
    for segment in batch.segments:
        used = max(segment.prefix_lens)
        lists.append(segment.slots[:used])
        offsets += [at] * len(segment.token_ids)
        at += used
        prefix_lens += segment.prefix_lens
        own = segment.tails or [()] * len(segment.token_ids)
        tails.extend(chain.from_iterable(own))
        tail_lens += [len(tail) for tail in own]
    return RowPlan(
        slots=lists[0] if len(lists) == 1 else torch.cat(lists),
        slot_offsets=_flat(offsets, np.int64),
        prefix_lens=_flat(prefix_lens, np.int32),
        tails=_flat(tails or [0], np.int32),
        tail_offsets=_flat(list(accumulate(tail_lens, initial=0)), np.int64),
    )


def _flat(numbers: list[int], dtype: type[np.integer[Any]]) -> torch.Tensor:
    return torch.from_numpy(np.array(numbers, dtype=dtype))  # a third of torch.tensor's time


class CpuAttention(AttentionBackend):
    """The C++ kernel: each row over its own positions in fixed tiles, float32 sums in order of position."""

    name = "cpu"
    row_invariant = True

    def __init__(self) -> None:
        library = load_kernels()
        if library is None:
            raise RuntimeError("the CPU kernels are not available; use TorchAttention")
        self._attend = {
            (torch.bfloat16, False): library.pl_attend_bf16,
            (torch.float32, False): library.pl_attend_f32,
            (torch.bfloat16, True): library.pl_attend_kv8_bf16,  # over a pool of codes
            (torch.float32, True): library.pl_attend_kv8_f32,
        }
        self._attend_latent = {
            torch.bfloat16: library.pl_attend_latent_bf16,
            torch.float32: library.pl_attend_latent_f32,
        }

    @staticmethod
    def supports(num_heads: int, num_kv_heads: int, head_dim: int) -> bool:
        """Whether the kernel was compiled for this geometry."""
        whole = num_heads % num_kv_heads == 0
        return load_kernels() is not None and head_dim in KERNEL_HEAD_DIMS and whole

    def plan(self, batch: ForwardBatch) -> RowPlan:
        """See plan_rows."""
        return plan_rows(batch)

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
        """See AttentionBackend."""
        assert isinstance(plan, RowPlan)
        pages = kv.data[layer]
        rows, heads, dim = query.shape
        out = torch.empty_like(query)
        failed = self._attend[query.dtype, kv.layout.is_int8](
            query.data_ptr(), pages.data_ptr(), pages.shape[2], rows, heads, pages.shape[3], dim,
            *plan.addresses, window, None if sinks is None else sinks.data_ptr(), scale, out.data_ptr(),
        )  # fmt: skip
        if failed:
            raise ValueError(f"no attention kernel for {heads} heads over {pages.shape[3]} of {dim}")
        return out

    def attend_latent(
        self, query: torch.Tensor, kv: KvPool, layer: int, plan: AttentionPlan, scale: float, value_dim: int
    ) -> torch.Tensor:
        """See AttentionBackend. Any number of heads and any widths."""
        assert isinstance(plan, RowPlan)
        rows, heads, dim = query.shape
        out = query.new_empty(rows, heads, value_dim)
        self._attend_latent[query.dtype](
            query.data_ptr(), kv.data[layer].data_ptr(), rows, heads, dim, value_dim,
            *plan.addresses, scale, out.data_ptr(),
        )  # fmt: skip
        return out
