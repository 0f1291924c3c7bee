"""Triton kernel of ``device_walk``: one program walks one tree."""

# Kernels are written in Triton's language, not Python's.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,no-any-return"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from paceline.spec_decode.accept.device_trees import PATH, STOP, TOO_LONG, DeviceTrees
from paceline.triton_support import EXACT, next_power_of_2, on_device_of

MIN_BLOCK = 16  # small trees share one compiled kernel
STOPS = 16  # stop tokens that are looked at together


@triton.jit(do_not_specialize=["result_stride"])
def _walk_kernel(
    token_ids, parents, starts, max_new_tokens, stop_starts, stop_ids, sampled, result, result_stride,
    PATH: tl.constexpr, STOP: tl.constexpr, TOO_LONG: tl.constexpr, NODES: tl.constexpr, STOPS: tl.constexpr,
):  # fmt: skip
    """Columns of a result: length, new token, finish code, then the path."""
    seq = tl.program_id(0)
    start = tl.load(starts + seq)
    nodes = tl.arange(0, NODES)
    exists = nodes < tl.load(starts + seq + 1) - start
    carried = tl.load(token_ids + start + nodes, mask=exists, other=-2)
    parent = tl.load(parents + start + nodes, mask=exists, other=-2)
    first_stop = tl.load(stop_starts + seq)
    last_stop = tl.load(stop_starts + seq + 1)
    most = tl.load(max_new_tokens + seq)
    out = result + seq * result_stride
    node = tl.full((), 0, tl.int32)
    length = tl.full((), 0, tl.int32)
    finish = tl.full((), 0, tl.int32)
    token = tl.full((), 0, tl.int32)
    walking = tl.full((), 1, tl.int32)
    while walking > 0:
        token = tl.load(sampled + start + node).to(tl.int32)
        stopped = tl.full((), 0, tl.int32)
        for first in range(first_stop, last_stop, STOPS):
            at = first + tl.arange(0, STOPS)
            stop_id = tl.load(stop_ids + at, mask=at < last_stop, other=-2)
            stopped = tl.maximum(stopped, tl.max((stop_id == token).to(tl.int32), axis=0))
        finish = tl.where(stopped > 0, STOP, tl.where(length + 1 >= most, TOO_LONG, 0))
        child = tl.min(tl.where((parent == node) & (carried == token), nodes, NODES), axis=0)
        walking = ((finish == 0) & (child < NODES)).to(tl.int32)
        if walking > 0:
            tl.store(out + PATH + length, child)
            node = child
            length += 1
    tl.store(out, length)
    tl.store(out + 1, token)
    tl.store(out + 2, finish)


def walk(trees: DeviceTrees, sampled: torch.Tensor) -> torch.Tensor:
    """``device_walk.walk_device``."""
    num_seqs = trees.max_new_tokens.shape[0]
    result = torch.empty(num_seqs, PATH + trees.max_path, dtype=torch.int32, device=sampled.device)
    with on_device_of(sampled):
        _walk_kernel[(num_seqs,)](
            trees.token_ids, trees.parents, trees.starts, trees.max_new_tokens, trees.stop_starts, trees.stop_ids,
            sampled, result, result.stride(0), PATH=PATH, STOP=STOP, TOO_LONG=TOO_LONG,
            NODES=next_power_of_2(max(trees.max_nodes, MIN_BLOCK)), STOPS=STOPS, num_warps=1, **EXACT,
        )  # fmt: skip
    return result
