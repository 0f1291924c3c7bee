"""Position-keyed randomness: noise is a function of (request seed, absolute position, token id) and of nothing else.

There is no generator state, so migration, replay, preemption and verification of a whole draft tree in one forward
all see the noise that plain decoding would have seen (algorithms.md B5c).

Use: with E = -log u exponential, ``argmin(E / p)`` is a draw from p: an exponential race, in which token i finishes at
an exponential time of rate p_i and the first to finish wins with probability p_i. It equals ``argmax(log p + gumbel)``
because a standard Gumbel variable is -log E.

The integer part is 32-bit adds, multiplies, xors and shifts only, so that a Triton or C++ kernel reproduces it bit for
bit. u has 32 bits: an event of probability under about 2**-32 at one position is beyond its resolution.
Mixers: lowbias32 (Wellons, hash-prospector) and MurmurHash3's fmix32 (Appleby); both are bijections of 32-bit words.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from paceline.request import UINT64_MAX

_MASK = 0xFFFFFFFF
_LOWBIAS = ((16, 0x7FEB352D), (15, 0x846CA68B), 16)
_FMIX = ((16, 0x85EBCA6B), (13, 0xC2B2AE35), 16)
_LANE0 = 0x9E3779B9  # golden ratio; the lanes only have to start apart
_LANE1 = 0x7F4A7C15
_MANY_ROWS = 24  # from here on arrays find the keys sooner than Python's integers do

UInt32Array = npt.NDArray[np.uint32]
Float64Array = npt.NDArray[np.float64]
_Word = TypeVar("_Word", int, torch.Tensor)


def _mix(x: _Word, rounds: tuple[tuple[int, int], tuple[int, int], int]) -> _Word:
    """Mix 32-bit words held in Python integers or in an int64 tensor (whose products wrap: the low half is right)."""
    (shift0, mult0), (shift1, mult1), shift2 = rounds
    x = ((x ^ (x >> shift0)) * mult0) & _MASK
    x = ((x ^ (x >> shift1)) * mult1) & _MASK
    return x ^ (x >> shift2)


def row_key(seed: int, position: int) -> tuple[int, int]:
    """Two 32-bit words that stand for (seed, position); seed is unsigned 64-bit, position unsigned 32-bit."""
    if not 0 <= seed <= UINT64_MAX:
        raise ValueError(f"seed {seed} is not an unsigned 64-bit integer")
    if not 0 <= position <= _MASK:
        raise ValueError(f"position {position} is not an unsigned 32-bit integer")
    words = (seed & _MASK, seed >> 32, position)
    lane0, lane1 = _LANE0, _LANE1
    for word in words:
        lane0 = _mix((lane0 + word) & _MASK, _LOWBIAS)
        lane1 = _mix((lane1 + word) & _MASK, _FMIX)
        lane1 ^= lane0  # without it the two lanes would be two separate 32-bit hashes
    return lane0, lane1


def row_keys(seeds: Sequence[int], positions: Sequence[int]) -> UInt32Array:
    """``row_key`` of R rows at once: uint32 [R, 2]. Many rows are not checked for their range."""
    if len(seeds) < _MANY_ROWS:
        pairs = [row_key(seed, position) for seed, position in zip(seeds, positions, strict=True)]
        return np.array(pairs, dtype=np.uint32).reshape(-1, 2)
    seed_words = np.array(seeds, dtype=np.uint64)
    words = (seed_words.astype(np.uint32), (seed_words >> np.uint64(32)).astype(np.uint32), np.array(positions))
    lane0 = np.full(len(seed_words), _LANE0, dtype=np.uint32)
    lane1 = np.full(len(seed_words), _LANE1, dtype=np.uint32)
    scratch = np.empty_like(lane0)
    for word in words:
        lane0 += word.astype(np.uint32)
        lane1 += word.astype(np.uint32)
        _mix_in_place(lane0, scratch, _LOWBIAS)
        _mix_in_place(lane1, scratch, _FMIX)
        lane1 ^= lane0
    return np.stack((lane0, lane1), axis=1)


def noise_bits_reference(seed: int, position: int, token_id: int) -> int:
    """The definition, in Python integers: 32 bits for one token."""
    return noise_bits_few(seed, position, (token_id,))[0]


def noise_bits_few(seed: int, position: int, token_ids: Sequence[int]) -> list[int]:
    """``noise_bits`` of a few tokens: arrays of so few take longer than Python's integers."""
    lane0, lane1 = row_key(seed, position)
    return [_mix(_mix((token_id + lane0) & _MASK, _LOWBIAS) ^ lane1, _FMIX) for token_id in token_ids]


def _mix_in_place(x: UInt32Array, scratch: UInt32Array, rounds: tuple[tuple[int, int], tuple[int, int], int]) -> None:
    """``_mix`` over uint32 arrays, which wrap by themselves."""
    for shift, mult in rounds[:2]:
        np.right_shift(x, np.uint32(shift), out=scratch)
        np.bitwise_xor(x, scratch, out=x)
        np.multiply(x, np.uint32(mult), out=x)
    np.right_shift(x, np.uint32(rounds[2]), out=scratch)
    np.bitwise_xor(x, scratch, out=x)


def noise_bits_rows(seeds: Sequence[int], positions: Sequence[int], token_ids: UInt32Array) -> UInt32Array:
    """Bits for R rows. token_ids: uint32 [V], or [R, V] for other ids in each row. Returns uint32 [R, V]."""
    keys = row_keys(seeds, positions)
    x = np.add(token_ids, keys[:, :1])
    scratch = np.empty_like(x)
    _mix_in_place(x, scratch, _LOWBIAS)
    np.bitwise_xor(x, keys[:, 1:], out=x)
    _mix_in_place(x, scratch, _FMIX)
    return x


def noise_bits_tensor(seeds: Sequence[int], positions: Sequence[int], token_ids: torch.Tensor) -> torch.Tensor:
    """``noise_bits_rows`` on any device. token_ids: int64 [V] or [R, V]. Returns int64 [R, V] of 32-bit values."""
    pairs = [row_key(s, p) for s, p in zip(seeds, positions, strict=True)]
    keys = torch.tensor(pairs, dtype=torch.int64, device=token_ids.device).view(-1, 2)
    return noise_bits_keyed(keys, token_ids)


def noise_bits_keyed(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """``noise_bits_tensor`` for rows whose keys are known. keys: int64 [R, 2], the words of ``row_key``, of which the
    low 32 bits count; same device as token_ids."""
    keys = keys & _MASK
    return _mix(_mix((token_ids + keys[:, :1]) & _MASK, _LOWBIAS) ^ keys[:, 1:], _FMIX)


def noise_bits(seed: int, position: int, token_ids: UInt32Array) -> UInt32Array:
    """Bits for one row. token_ids: uint32 [V]. Returns uint32 [V]."""
    bits: UInt32Array = noise_bits_rows([seed], [position], token_ids)[0]
    return bits


@lru_cache(maxsize=16)
def all_ids(vocab_size: int) -> UInt32Array:
    """0..vocab_size-1 as uint32, read-only and cached."""
    ids = np.arange(vocab_size, dtype=np.uint32)
    ids.setflags(write=False)
    return ids


def exponential(bits: UInt32Array) -> Float64Array:
    """E = -log((bits + 0.5) / 2**32), float64, same shape; finite and above 0 for every input."""
    u = bits.astype(np.float64)
    u += 0.5
    u *= 2.0**-32
    np.log(u, out=u)
    return np.negative(u, out=u)


def exponential_noise(
    seeds: Sequence[int],
    positions: Sequence[int],
    token_ids: torch.Tensor | None = None,
    vocab_size: int | None = None,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Standard exponential noise of R rows, float64 [R, V].

    seeds, positions: R integers, unsigned 64-bit and 32-bit. token_ids: int64 [V], or [R, V]; when None, the ids
    0..vocab_size-1. The bits are equal on every device; the logarithm may differ in its last bit between devices.
    """
    device = token_ids.device if token_ids is not None else torch.device(device)
    if device.type == "cpu":
        ids = _as_uint32(token_ids, vocab_size)
        return torch.from_numpy(exponential(noise_bits_rows(seeds, positions, ids)))
    if token_ids is None:
        token_ids = torch.arange(_required(vocab_size), device=device)
    return -torch.log((noise_bits_tensor(seeds, positions, token_ids).double() + 0.5) * 2.0**-32)


def _as_uint32(token_ids: torch.Tensor | None, vocab_size: int | None) -> UInt32Array:
    if token_ids is None:
        return all_ids(_required(vocab_size))
    return token_ids.numpy().astype(np.uint32)


def _required(vocab_size: int | None) -> int:
    if vocab_size is None:
        raise ValueError("give token_ids or vocab_size")
    return vocab_size
