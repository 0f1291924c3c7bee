"""Triton kernels around experts: which of them a row goes to, rows of one expert together, and the sum of answers."""

# Kernels are written in Triton's language, not Python's.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,no-any-return"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from paceline.layers.ops_triton import _exp, _rounded
from paceline.triton_support import EXACT, next_power_of_2, on_device_of

SUM_BLOCK = 1024
SORT_BLOCK = 1024  # choices that a program of the sort reads at once
EXPERTS_PER_WARP = 256


@triton.jit
def _largest(values, open, index, PAST: tl.constexpr):
    """The largest of the open values, and the lowest index that has it. values: [A, B], no NaN; open: int32, above 0
    somewhere."""
    keys = tl.where(open > 0, values, float("-inf"))
    most = tl.max(tl.max(keys, axis=1), axis=0)
    found = tl.where(open > 0, tl.where(keys == most, index, PAST), PAST)
    return most, tl.min(tl.min(found, axis=1), axis=0)


@triton.jit
def _open_groups(choice, mask, place, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, BLOCK_G: tl.constexpr,
                 BLOCK_S: tl.constexpr):  # fmt: skip
    """int32 [BLOCK_G, 1], 1 for groups that a row may use: those with the best two experts together."""
    keys = tl.where(mask, choice, float("-inf"))
    first = tl.max(keys, axis=1)
    at = tl.min(tl.where(keys == first[:, None], place, BLOCK_S), axis=1)
    second = tl.max(tl.where(place == at[:, None], float("-inf"), keys), axis=1)
    worth = (first + second)[:, None]
    index = tl.arange(0, BLOCK_G)[:, None]
    left = tl.where(index < GROUPS, 1, 0)
    opened = left * 0
    for _ in range(0, TOP_GROUPS):
        _, best = _largest(worth, left, index, BLOCK_G)
        opened = tl.where(index == best, 1, opened)
        left = tl.where(index == best, 0, left)
    return opened


def _route(
    logits, bias, ids, weights, factor,
    EXPERTS: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, TOP_K: tl.constexpr,
    NORMALISE: tl.constexpr, SOFTMAX: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One row of ``route``."""
    row = tl.program_id(0).to(tl.int64)
    size: tl.constexpr = EXPERTS // GROUPS
    group = tl.arange(0, BLOCK_G)[:, None]
    place = tl.arange(0, BLOCK_S)[None, :]
    mask = (group < GROUPS) & (place < size)
    expert = group * size + place
    logit = tl.load(logits + row * EXPERTS + expert, mask=mask, other=float("-inf"))
    if SOFTMAX:
        high = tl.max(tl.max(logit, axis=1), axis=0)
        grown = tl.where(mask, _exp(logit - high), 0.0)
        score = tl.div_rn(grown, tl.sum(tl.sum(grown, axis=1), axis=0))
        choice = logit
    else:
        shrunk = _exp(-tl.abs(logit))
        score = tl.div_rn(tl.where(logit > 0.0, 1.0, shrunk), 1.0 + shrunk)
        choice = score
        if bias is not None:
            choice = choice + tl.load(bias + expert, mask=mask, other=0.0)
    choice = tl.where(choice == choice, choice, float("-inf"))  # a NaN is chosen last
    open = tl.where(mask, 1, 0)
    if TOP_GROUPS < GROUPS:
        open = open * _open_groups(choice, mask, place, GROUPS, TOP_GROUPS, BLOCK_G, BLOCK_S)
    slot = tl.arange(0, BLOCK_K)
    chosen = slot * 0
    kept = chosen.to(tl.float32)
    total = tl.sum(kept, axis=0)
    for i in range(0, TOP_K):
        _, best = _largest(choice, open, expert, EXPERTS)
        weight = tl.sum(tl.sum(tl.where(expert == best, tl.where(mask, score, 0.0), 0.0), axis=1), axis=0)
        total += weight
        chosen = tl.where(slot == i, best, chosen)
        kept = tl.where(slot == i, weight, kept)
        open = tl.where(expert == best, 0, open)
    if NORMALISE:
        kept = tl.div_rn(kept, total + 1e-20)
    tl.store(ids + row * TOP_K + slot, chosen.to(tl.int64), mask=slot < TOP_K)
    tl.store(weights + row * TOP_K + slot, kept * factor, mask=slot < TOP_K)


_route_kernel = triton.jit(_route, do_not_specialize_on_alignment=["logits", "bias"])  # see ops_triton


@triton.jit
def _weighted_sum_kernel(outputs, weights, out, TOP_K: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK columns of one row, best expert first."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    source = outputs + row * TOP_K * WIDTH + column
    total = tl.load(source, mask=mask, other=0.0) * tl.load(weights + row * TOP_K)
    for i in range(1, TOP_K):
        total = total + tl.load(source + i * WIDTH, mask=mask, other=0.0) * tl.load(weights + row * TOP_K + i)
    tl.store(out + row * WIDTH + column, _rounded(total, out.dtype.element_ty), mask=mask)


def _by_expert(ids, order, sources, experts, ends, choices, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """One expert's places of ``by_expert.ByExpert``, behind those of the experts before it."""
    mine = tl.program_id(0)
    before = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(0, choices, BLOCK):
        at = start + tl.arange(0, BLOCK)
        expert = tl.load(ids + at, mask=at < choices, other=mine)
        before += (expert < mine).to(tl.int32)
    end = tl.sum(before, axis=0)
    for start in range(0, choices, BLOCK):
        at = start + tl.arange(0, BLOCK)
        is_mine = (tl.load(ids + at, mask=at < choices, other=-1) == mine).to(tl.int32)
        place = end + tl.cumsum(is_mine, axis=0) - 1
        tl.store(order + place, at.to(tl.int64), mask=is_mine > 0)
        tl.store(sources + place, (at // TOP_K).to(tl.int64), mask=is_mine > 0)
        tl.store(experts + place, (at * 0 + mine).to(tl.int64), mask=is_mine > 0)
        end += tl.sum(is_mine, axis=0)
    tl.store(ends + mine, end)


_by_expert_kernel = triton.jit(_by_expert, do_not_specialize=["choices"])


@triton.jit
def _put_rows_kernel(rows, order, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK columns of one row, to where ``order`` says."""
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    found = tl.load(rows + row.to(tl.int64) * WIDTH + column, mask=mask, other=0.0)
    tl.store(out + tl.load(order + row) * WIDTH + column, found.to(tl.float32), mask=mask)


def by_expert(
    expert_ids: torch.Tensor, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The fields of ``by_expert.by_expert`` in one launch."""
    order, sources, experts = (torch.empty_like(expert_ids).view(-1) for _ in range(3))  # each aligned
    ends = torch.empty(num_experts, dtype=torch.int32, device=expert_ids.device)
    with on_device_of(ends):
        _by_expert_kernel[(num_experts,)](
            expert_ids, order, sources, experts, ends, expert_ids.numel(), TOP_K=expert_ids.shape[1], BLOCK=SORT_BLOCK
        )
    return order, sources, experts, ends


def put_rows(rows: torch.Tensor, order: torch.Tensor, out: torch.Tensor) -> None:
    """Row r of ``rows`` [R, width] becomes row order[r] of ``out``, float32, in one launch. Both contiguous."""
    count, width = rows.shape
    block = min(SUM_BLOCK, next_power_of_2(width))
    if out.numel():
        with on_device_of(out):
            _put_rows_kernel[(count, triton.cdiv(width, block))](rows, order, out, WIDTH=width, BLOCK=block)


def route(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    num_groups: int,
    top_groups: int,
    top_k: int,
    normalise: bool,
    factor: float,
    softmax: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``routing.route`` in one launch, with the numbers of its rule. A NaN is the worst choice."""
    logits = logits.contiguous()
    rows, experts = logits.shape
    ids = torch.empty(rows, top_k, dtype=torch.int64, device=logits.device)
    weights = torch.empty(rows, top_k, dtype=torch.float32, device=logits.device)
    groups, size = next_power_of_2(num_groups), next_power_of_2(experts // num_groups)
    if rows:
        with on_device_of(logits):
            _route_kernel[(rows,)](
                logits, bias, ids, weights, factor, EXPERTS=experts, GROUPS=num_groups, TOP_GROUPS=top_groups,
                TOP_K=top_k, NORMALISE=normalise, SOFTMAX=softmax, BLOCK_G=groups, BLOCK_S=size,
                BLOCK_K=next_power_of_2(top_k), num_warps=min(max(groups * size // EXPERTS_PER_WARP, 1), 16), **EXACT,
            )  # fmt: skip
    return ids, weights


def weighted_sum(outputs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """``models.moe.weighted_sum``, in one launch. Both contiguous."""
    rows, top_k, width = outputs.shape
    out = torch.empty(rows, width, dtype=outputs.dtype, device=outputs.device)
    block = min(SUM_BLOCK, next_power_of_2(width))
    if out.numel():
        with on_device_of(outputs):
            _weighted_sum_kernel[(rows, triton.cdiv(width, block))](
                outputs, weights, out, TOP_K=top_k, WIDTH=width, BLOCK=block, **EXACT
            )
    return out
