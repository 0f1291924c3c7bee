"""The exponential race: a draw from softmax(logits / temperature) is the token with the smallest E / p.

Score of token i: E_i * exp((max - logit_i) / temperature), which is E_i / p_i up to a factor common to the row; so no
normaliser is needed, and no sum whose rounding could depend on how it was split. The scores are float64, ties go to
the lowest column. ``race_reference`` is that definition; ``race`` gives the same ids faster for wide rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from paceline.sampling.noise import UInt32Array, all_ids, exponential, exponential_noise, noise_bits

_PRUNE_FROM = 4096  # columns; below, the plain computation is as fast
_BLOCKS_PER_WINNER = 4
_MARGIN = 1.001  # float32 errors of the bound are under 1e-4, relative
_MIN_TEMPERATURE = 1e-30  # of the bound, so that 1 / temperature is finite; a hotter bound is only looser


def race_reference(
    logits: torch.Tensor,
    temperatures: Sequence[float],
    seeds: Sequence[int],
    positions: Sequence[int],
    width: int = 1,
    token_ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """The ``width`` first columns of each row's race, in order of arrival.

    logits: [R, V], each row's maximum finite; -inf excludes a token (it arrives last). temperatures: R numbers > 0.
    seeds, positions: the noise key of each row. token_ids: int64 [V] or [R, V], the ids that key the noise;
    None: the columns. Returns int64 [R, width].
    """
    noise = exponential_noise(seeds, positions, token_ids, logits.shape[1], logits.device)
    values = logits.double()
    scale = torch.tensor(temperatures, dtype=torch.float64, device=logits.device).unsqueeze(1)
    gap = values.amax(dim=1, keepdim=True) - values
    scores = noise * torch.exp(gap / scale)
    if width == 1:
        return scores.argmin(dim=1, keepdim=True)
    return scores.sort(dim=1, stable=True).indices[:, :width]


def race(
    logits: torch.Tensor,
    temperatures: Sequence[float],
    seeds: Sequence[int],
    positions: Sequence[int],
    width: int = 1,
    token_ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """``race_reference``, faster on the CPU for wide float32 rows. Which path runs depends on the width alone."""
    vocab_size = logits.shape[1]
    if not 1 <= width <= vocab_size:
        raise ValueError(f"width must be between 1 and {vocab_size}, got {width}")
    wide = vocab_size >= max(_PRUNE_FROM, 16 * _BLOCKS_PER_WINNER * width)
    shared_ids = token_ids is None or token_ids.dim() == 1
    if logits.device.type != "cpu" or logits.dtype != torch.float32 or not wide or not shared_ids:
        return race_reference(logits, temperatures, seeds, positions, width, token_ids)
    ids = all_ids(vocab_size) if token_ids is None else token_ids.numpy().astype(np.uint32)
    winners = np.empty((logits.shape[0], width), dtype=np.int64)
    for row, values in enumerate(logits.numpy()):
        bits = noise_bits(seeds[row], positions[row], ids)
        winners[row] = _race_row(values, temperatures[row], bits, width)
    return torch.from_numpy(winners)


def _race_row(
    values: npt.NDArray[np.float32], temperature: float, bits: UInt32Array, width: int
) -> npt.NDArray[np.int64]:
    """One row: drop in float32 the tokens that cannot be among the first, then score the rest in float64.

    E = -log u >= 1 - u gives a lower bound of every score; any ``width`` exact scores give an upper bound of the
    width-th best. A token whose lower bound exceeds that cannot be among the first ``width``.
    """
    top = values.max()

    def exact(columns: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        gap = np.float64(top) - values[columns].astype(np.float64)
        scores: npt.NDArray[np.float64] = exponential(bits[columns]) * np.exp(gap / temperature)
        return scores

    with np.errstate(over="ignore"):  # a hopeless token's score is inf
        lower = np.subtract(top, values)
        lower *= np.float32(1.0 / max(temperature, _MIN_TEMPERATURE))
        np.exp(lower, out=lower)
        one_minus_u = np.invert(bits).astype(np.float32)
        one_minus_u += np.float32(0.5)
        lower *= one_minus_u
        bound = float(exact(_likely_winners(lower, width)).max()) * _MARGIN * 2.0**32
        columns = np.flatnonzero(lower <= bound)
        scores = exact(columns)
    winners: npt.NDArray[np.int64] = columns[np.argsort(scores, kind="stable")[:width]]
    return winners


def _likely_winners(lower: npt.NDArray[np.float32], width: int) -> npt.NDArray[np.int64]:
    """``width`` distinct columns with small values: the best of the best of a few blocks each."""
    if width == 1:
        return np.array([lower.argmin()])
    num_blocks = _BLOCKS_PER_WINNER * width
    size = len(lower) // num_blocks
    blocks = lower[: num_blocks * size].reshape(num_blocks, size)
    columns = blocks.argmin(axis=1) + size * np.arange(num_blocks)
    chosen: npt.NDArray[np.int64] = columns[np.argpartition(lower[columns], width - 1)[:width]]
    return chosen
