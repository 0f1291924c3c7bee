"""Triton kernels of the sampler; ``device_torch`` gives the same with torch alone.

A row of V logits is split into C chunks of BLOCK. ``_best`` finds each chunk's largest logit; ``triton_cut`` finds, for
rows with top-k or top-p, the last (logit, id) that stays; ``_race`` scores the tokens and keeps each chunk's first;
``_token`` and ``_topk`` merge the chunks. The noise is ``sampling.noise`` in uint32, bit for bit. Scores and masses are
float64, with the operations of ``race_reference`` in its order, so that they differ from the CPU's by the last bits of
exp and log alone; two tokens would have to lie closer than that (1e-15 of a score) for the devices to disagree.

Penalties round as torch's float32 operations do: no multiply is fused with the subtraction after it, and a quotient
goes over float64, which rounds to the same float32 (Triton's own float32 division is approximate).
"""

# Kernels are written in Triton's language, not Python's.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,no-any-return"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from paceline.sampling.packing import (
    CUT_KEY,
    FLOOR,
    KEY,
    NUM_WORDS,
    OUTPUT,
    OWN,
    PROMPT,
    TEMPERATURE,
    DeviceRows,
)
from paceline.sampling.triton_cut import cut
from paceline.sampling.triton_parts import NO_COLUMN, exponential, noise_bits, row_top, softmax_temperature, sort_key
from paceline.triton_support import EXACT, next_power_of_2

BLOCK = 2048  # columns of a chunk
EDIT_BLOCK = 256
MARGIN = 1.001  # the float32 bound of a score errs by less than 1e-4, relative


@triton.jit
def _noise_kernel(ids, keys, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key0 = tl.load(keys).to(tl.uint32, bitcast=True)
    key1 = tl.load(keys + 1).to(tl.uint32, bitcast=True)
    bits = noise_bits(tl.load(ids + at, mask=at < count, other=0), key0, key1)
    tl.store(out + at, bits.to(tl.int64), mask=at < count)


@triton.jit
def _edit_kernel(logits, edited, stride, words, edits, LIST: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    """Store the adjusted logits of one row's list; reads the unadjusted ones."""
    row = tl.program_id(0).to(tl.int64)
    start = tl.load(words + row * WORDS + LIST)
    end = tl.load(words + row * WORDS + LIST + 1)
    for first in range(start, end, BLOCK):
        at = first + tl.arange(0, BLOCK)
        mask = at < end
        edit = edits + at * 4
        token = tl.load(edit, mask=mask, other=0)
        add = tl.load(edit + 1, mask=mask, other=0).to(tl.float32, bitcast=True)
        repetition = tl.load(edit + 2, mask=mask, other=0x3F800000).to(tl.float32, bitcast=True)
        subtract = tl.load(edit + 3, mask=mask, other=0).to(tl.float32, bitcast=True)
        value = tl.load(logits + row * stride + token, mask=mask, other=0.0) + add
        quotient = (value.to(tl.float64) / repetition.to(tl.float64)).to(tl.float32)
        value = tl.where(value > 0, quotient, value * repetition)
        value = tl.where(subtract == float("inf"), -float("inf"), value - subtract)
        tl.store(edited + row * stride + token, value, mask=mask)


@triton.jit
def _best_kernel(
    logits, stride, temperatures, temperature_stride, tops, ids, sums, vocab_size, chunks,
    WITH_SUM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Find in one chunk the largest logit (+inf where one is NaN), its lowest column, and sum exp((logit - it) / T)."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = chunk * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(logits + row * stride + columns, mask=columns < vocab_size, other=-float("inf"))
    is_nan = values != values
    top = tl.max(tl.where(is_nan, float("inf"), values), axis=0)
    at = row * chunks + chunk
    tl.store(tops + at, top)
    tl.store(ids + at, tl.min(tl.where(values == top, columns, NO_COLUMN), axis=0))
    if WITH_SUM:
        scale = softmax_temperature(temperatures + row * temperature_stride)
        weights = tl.where(values == -float("inf"), 0.0, tl.exp((values - top) / scale))
        tl.store(sums + at, tl.sum(weights, axis=0))


@triton.jit
def _race_kernel(
    logits, stride, token_map, keys, key_stride, temperatures, temperature_stride, floors, cuts, cut_stride,
    tops, top_ids, scores_out, columns_out, vocab_size, chunks,
    HAS_MAP: tl.constexpr, RACED: tl.constexpr, CUT: tl.constexpr, WIDTH: tl.constexpr, CHUNKS: tl.constexpr,
    MARGIN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The first WIDTH columns of one chunk, and their scores. Greedy rows (T = 0, or RACED = 0) score -logit."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = chunk * BLOCK + tl.arange(0, BLOCK)
    mask = columns < vocab_size
    values = tl.load(logits + row * stride + columns, mask=mask, other=-float("inf"))
    scores = -values.to(tl.float64)
    temperature = tl.load(temperatures + row * temperature_stride).to(tl.float64) * RACED
    if temperature > 0.0:
        key0 = tl.load(keys + row * key_stride).to(tl.uint32, bitcast=True)
        key1 = tl.load(keys + row * key_stride + 1).to(tl.uint32, bitcast=True)
        ids = columns
        if HAS_MAP:
            ids = tl.load(token_map + columns, mask=mask, other=0).to(tl.int32)
        bits = noise_bits(ids, key0, key1)
        best = row_top(tops + row * chunks, chunks, CHUNKS)
        gap = best.to(tl.float64) - values.to(tl.float64)
        may_win = mask & (values > -float("inf"))
        if CUT:
            sort_keys = sort_key(values)
            cut_key = tl.load(cuts + row * cut_stride)
            cut_id = tl.load(cuts + row * cut_stride + 1)
            floor = tl.load(floors + row * temperature_stride)
            may_win &= (sort_keys > cut_key) | ((sort_keys == cut_key) & (columns <= cut_id))
            may_win &= -(gap / temperature) >= floor
        if WIDTH == 1:
            # E = -log u >= 1 - u bounds a score from below; the likeliest token's own score bounds the winner's
            # from above. In float32, with a margin; most chunks hold no token that can win.
            at = tl.arange(0, CHUNKS)
            of_chunks = tl.load(tops + row * chunks + at, mask=at < chunks, other=-float("inf"))
            its_ids = tl.load(top_ids + row * chunks + at, mask=at < chunks, other=0)
            best_id = tl.min(tl.where(of_chunks == best, its_ids, vocab_size - 1), axis=0)  # last: of a NaN's row
            best_id = tl.minimum(best_id, vocab_size - 1)
            if HAS_MAP:
                best_id = tl.load(token_map + best_id).to(tl.int32)
            bound = exponential(noise_bits(best_id, key0, key1)).to(tl.float32) * MARGIN
            inverse = (1.0 / tl.maximum(temperature, 1e-30)).to(tl.float32)
            one_minus_u = ((bits ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
            lower = tl.exp((best - values) * inverse) * one_minus_u
            may_win &= lower <= bound
        scores = tl.full([BLOCK], float("inf"), tl.float64)
        if tl.max(may_win.to(tl.int32), axis=0) > 0:
            scores = tl.where(may_win, exponential(bits) * tl.exp(gap / temperature), scores)
    out = (row * chunks + chunk) * WIDTH
    _store_first(scores, columns, ~mask, scores_out + out, columns_out + out, WIDTH)


@triton.jit
def _store_first(scores, columns, taken, scores_out, columns_out, WIDTH: tl.constexpr):
    """The WIDTH lowest (score, column) among those not taken; NO_COLUMN where there are fewer."""
    for i in tl.static_range(WIDTH):
        score = tl.min(tl.where(taken, float("inf"), scores), axis=0)
        column = tl.min(tl.where((scores == score) & (taken == 0), columns, NO_COLUMN), axis=0)
        tl.store(scores_out + i, score)
        tl.store(columns_out + i, column)
        taken = taken | (columns == column)


@triton.jit
def _token_kernel(tops, scores, columns, tokens, chunks, CHUNKS: tl.constexpr):
    """The first of all chunks' first: int64; -1 where the row's best logit is not finite."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, CHUNKS)
    mask = at < chunks
    score = tl.load(scores + row * chunks + at, mask=mask, other=float("inf"))
    column = tl.load(columns + row * chunks + at, mask=mask, other=2147483647)
    winner = tl.min(tl.where(score == tl.min(score, axis=0), column, NO_COLUMN), axis=0)
    top = row_top(tops + row * chunks, chunks, CHUNKS)
    finite = (top < float("inf")) & (top > -float("inf"))
    tl.store(tokens + row, tl.where(finite, winner, -1).to(tl.int64))


@triton.jit
def _topk_kernel(
    logits, stride, token_map, temperatures, temperature_stride, tops, sums, scores, columns, ids_out, probs_out,
    chunks,
    HAS_MAP: tl.constexpr, WIDTH: tl.constexpr, CHUNKS: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """The first WIDTH of all chunks' first: target ids and their q."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, ENTRIES)
    mask = at < chunks * WIDTH
    score = tl.load(scores + row * chunks * WIDTH + at, mask=mask, other=float("inf"))
    column = tl.load(columns + row * chunks * WIDTH + at, mask=mask, other=2147483647)
    taken = column == NO_COLUMN
    top = row_top(tops + row * chunks, chunks, CHUNKS)
    of_chunks = tl.arange(0, CHUNKS)
    in_row = of_chunks < chunks
    partial = tl.load(sums + row * chunks + of_chunks, mask=in_row, other=0.0)
    its_top = tl.load(tops + row * chunks + of_chunks, mask=in_row, other=-float("inf"))
    scale = softmax_temperature(temperatures + row * temperature_stride)
    total = tl.sum(tl.where(partial > 0.0, partial * tl.exp((its_top - top) / scale), 0.0), axis=0)
    for i in tl.static_range(WIDTH):
        first = tl.min(tl.where(taken, float("inf"), score), axis=0)
        winner = tl.min(tl.where((score == first) & (taken == 0), column, NO_COLUMN), axis=0)
        taken = taken | (column == winner)
        winner = tl.where(winner == NO_COLUMN, 0, winner)  # of a row without finite logits: some token
        value = tl.load(logits + row * stride + winner)
        token = winner.to(tl.int64)
        if HAS_MAP:
            token = tl.load(token_map + winner).to(tl.int64)
        tl.store(ids_out + row * WIDTH + i, token)
        tl.store(probs_out + row * WIDTH + i, tl.exp((value - top) / scale) / total)


def noise(ids: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """The noise of one row. ids: int32 [V]; keys: int32 [2]. Returns int64 [V] of 32-bit values."""
    out = torch.empty(ids.shape, dtype=torch.int64, device=ids.device)
    _noise_kernel[(triton.cdiv(len(ids), BLOCK),)](ids, keys, out, len(ids), BLOCK=BLOCK, **EXACT)
    return out


def adjust(logits: torch.Tensor, rows: DeviceRows) -> torch.Tensor:
    """A copy of logits float32 [R, V] with bias, penalties and minimum length applied."""
    edited = logits.clone(memory_format=torch.contiguous_format)
    logits = logits.contiguous()
    for which in (PROMPT, OUTPUT, OWN):  # a later list's edits overwrite
        _edit_kernel[(len(logits),)](
            logits, edited, logits.stride(0), rows.words, rows.edits, LIST=which, WORDS=NUM_WORDS, BLOCK=EDIT_BLOCK,
            **EXACT,
        )  # fmt: skip
    return edited


def sample(logits: torch.Tensor, rows: DeviceRows) -> torch.Tensor:
    """Tokens of adjusted logits float32 [R, V], rows contiguous: int64 [R]; -1 where the best logit is not finite."""
    split = _Split(logits, width=1)
    numbers, words = rows.numbers, rows.words
    split.best(numbers[:, TEMPERATURE], with_sum=False)
    num_rows = logits.shape[0]
    cut(logits, rows, split.tops)
    split.race(words[:, KEY:], numbers[:, TEMPERATURE], numbers[:, FLOOR], words[:, CUT_KEY:], cut=True)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    _token_kernel[(num_rows,)](
        split.tops, split.scores, split.columns, tokens, split.chunks, CHUNKS=split.padded, **EXACT
    )
    return tokens


def topk(
    logits: torch.Tensor,
    keys: torch.Tensor,
    temperatures: torch.Tensor,
    width: int,
    token_map: torch.Tensor | None,
    raced: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``device.race_topk`` of checked arguments, rows of logits contiguous."""
    split = _Split(logits, width)
    split.best(temperatures, with_sum=True)
    split.race(keys, temperatures, None, None, token_map=token_map, raced=raced)
    num_rows = logits.shape[0]
    ids = torch.empty(num_rows, width, dtype=torch.int64, device=logits.device)
    probs = torch.empty(num_rows, width, dtype=torch.float32, device=logits.device)
    _topk_kernel[(num_rows,)](
        logits, logits.stride(0), token_map, temperatures, temperatures.stride(0), split.tops, split.sums, split.scores,
        split.columns, ids, probs, split.chunks,
        HAS_MAP=token_map is not None, WIDTH=width, CHUNKS=split.padded, ENTRIES=next_power_of_2(split.chunks * width),
        **EXACT,
    )  # fmt: skip
    return ids, probs


class _Split:
    """Logits [R, V] in chunks, and what each chunk found."""

    def __init__(self, logits: torch.Tensor, width: int) -> None:
        num_rows, self.vocab_size = logits.shape
        self.logits, self.width = logits, width
        self.block = min(BLOCK, next_power_of_2(max(self.vocab_size, width)))
        self.chunks = triton.cdiv(self.vocab_size, self.block)
        self.padded = next_power_of_2(self.chunks)
        shape, device = (num_rows, self.chunks), logits.device
        self.tops = torch.empty(shape, dtype=torch.float32, device=device)
        self.top_ids = torch.empty(shape, dtype=torch.int32, device=device)
        self.sums = torch.empty(shape, dtype=torch.float32, device=device)
        self.scores = torch.empty(*shape, width, dtype=torch.float64, device=device)
        self.columns = torch.empty(*shape, width, dtype=torch.int32, device=device)

    def best(self, temperatures: torch.Tensor, with_sum: bool) -> None:
        """Fill tops, top_ids and, if asked, sums."""
        _best_kernel[(self.logits.shape[0], self.chunks)](
            self.logits, self.logits.stride(0), temperatures, temperatures.stride(0), self.tops, self.top_ids,
            self.sums, self.vocab_size, self.chunks, WITH_SUM=with_sum, BLOCK=self.block, num_warps=8, **EXACT,
        )  # fmt: skip

    def race(
        self,
        keys: torch.Tensor,
        temperatures: torch.Tensor,
        floors: torch.Tensor | None,
        cuts: torch.Tensor | None,
        token_map: torch.Tensor | None = None,
        cut: bool = False,
        raced: bool = True,
    ) -> None:
        """Fill scores and columns. keys: int32 [R, 2 or more]; floors lie as the temperatures do."""
        _race_kernel[(self.logits.shape[0], self.chunks)](
            self.logits, self.logits.stride(0), token_map, keys, keys.stride(0), temperatures, temperatures.stride(0),
            floors, cuts, 0 if cuts is None else cuts.stride(0), self.tops, self.top_ids, self.scores, self.columns,
            self.vocab_size, self.chunks, HAS_MAP=token_map is not None, RACED=int(raced), CUT=cut, WIDTH=self.width,
            CHUNKS=self.padded, MARGIN=MARGIN, BLOCK=self.block, num_warps=8, **EXACT,
        )  # fmt: skip
