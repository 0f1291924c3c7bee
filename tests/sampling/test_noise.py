"""The integer hash bit for bit, and its statistics."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.request import UINT64_MAX
from paceline.sampling.noise import (
    all_ids,
    exponential,
    exponential_noise,
    noise_bits,
    noise_bits_reference,
    noise_bits_rows,
    noise_bits_tensor,
    row_key,
)

ChiSquare = Callable[[npt.NDArray[np.int64], npt.NDArray[np.float64]], float]
P_FAIL = 1e-4

# (seed, position, token id) -> bits. Frozen: a kernel in another language is checked against them, and a change here
# changes every sampled text.
GOLDEN = {
    (0, 0, 0): 0xF78794FF,
    (0, 0, 1): 0xF67D1BAD,
    (0, 1, 0): 0x7A3D6289,
    (1, 0, 0): 0xBAF8219C,
    (4294967296, 0, 0): 0xFD6497E3,
    (18446744073709551615, 4294967295, 4294967295): 0x1BF8757B,
    (1234, 56, 49151): 0xC5340836,
    (16045690984503111693, 131072, 128000): 0x680944A7,
}


@pytest.mark.parametrize(("key", "bits"), GOLDEN.items())
def test_golden_values(key: tuple[int, int, int], bits: int) -> None:
    assert noise_bits_reference(*key) == bits
    seed, position, token_id = key
    assert noise_bits(seed, position, np.array([token_id], dtype=np.uint32)).tolist() == [bits]


@settings(deadline=None, derandomize=True)
@given(
    st.integers(0, UINT64_MAX), st.integers(0, 2**32 - 1), st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=9)
)
def test_array_and_tensor_agree_with_the_reference(seed: int, position: int, token_ids: list[int]) -> None:
    expected = [noise_bits_reference(seed, position, t) for t in token_ids]
    assert noise_bits(seed, position, np.array(token_ids, dtype=np.uint32)).tolist() == expected
    assert noise_bits_tensor([seed], [position], torch.tensor(token_ids)).tolist() == [expected]


@pytest.mark.parametrize("num_rows", [3, 23, 24, 60])
def test_rows_are_keyed_separately(num_rows: int) -> None:
    """Few rows, whose keys are computed one by one, and many, whose keys are computed as arrays."""
    seeds = [3, 3, 2**64 - 1, 2**32, *(2**63 + 7 * i for i in range(56))][:num_rows]
    positions = [0, 1, 1, 2**32 - 1, *(11 * i for i in range(56))][:num_rows]
    together = noise_bits_rows(seeds, positions, all_ids(50))
    assert together.shape == (num_rows, 50)
    for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        assert together[row].tolist() == noise_bits(seed, position, all_ids(50)).tolist()


def test_ids_per_row() -> None:
    ids = torch.tensor([[4, 9], [9, 0]])
    noise = exponential_noise([1, 2], [5, 6], ids)
    full = exponential_noise([1, 2], [5, 6], vocab_size=10)
    assert torch.equal(noise, full.gather(1, ids))


def test_exponential_is_finite_and_positive_at_both_ends() -> None:
    ends = exponential(np.array([0, 2**32 - 1], dtype=np.uint32))
    assert np.isfinite(ends).all()
    assert ends[0] == pytest.approx(22.87, abs=0.01)
    assert 0 < ends[1] < 2e-10


def test_tensor_noise_equals_array_noise() -> None:
    bits = noise_bits_tensor([7], [3], torch.arange(1000))
    noise = -torch.log((bits.double() + 0.5) * 2.0**-32)
    torch.testing.assert_close(exponential_noise([7], [3], vocab_size=1000), noise, rtol=1e-14, atol=0)


def test_noise_off_the_cpu_is_of_the_ids_that_were_given() -> None:
    """On the meta device, which takes the way of a GPU and has shapes alone."""
    ids = torch.empty(2, 5, dtype=torch.int64, device="meta")
    assert exponential_noise([7, 8], [3, 4], ids, vocab_size=1000).shape == (2, 5)
    assert exponential_noise([7, 8], [3, 4], vocab_size=1000, device="meta").shape == (2, 1000)


@pytest.mark.parametrize(("seed", "position"), [(-1, 0), (2**64, 0), (0, -1), (0, 2**32)])
def test_keys_out_of_range_are_refused(seed: int, position: int) -> None:
    with pytest.raises(ValueError, match="unsigned"):
        row_key(seed, position)


def test_needs_ids_or_a_vocabulary() -> None:
    with pytest.raises(ValueError, match="token_ids or vocab_size"):
        exponential_noise([1], [1])


def bits_along(axis: str, count: int, fixed: int) -> npt.NDArray[np.uint32]:
    """Bits of ``count`` neighbours along one axis, the two others fixed."""
    if axis == "token":
        return noise_bits(fixed, fixed, all_ids(count))
    keys = range(count)
    still = [fixed] * count
    seeds, positions = (keys, still) if axis == "seed" else (still, keys)
    return noise_bits_rows(list(seeds), list(positions), np.array([fixed], dtype=np.uint32))[:, 0]


@pytest.mark.parametrize("axis", ["token", "position", "seed"])
@pytest.mark.parametrize("shift", [24, 12, 0])
def test_uniform_along_each_axis(axis: str, shift: int, chi_square: ChiSquare) -> None:
    """256 cells from the high, middle and low byte of consecutive keys."""
    for fixed in (0, 1, 1000):
        cells = (bits_along(axis, 40_000, fixed) >> np.uint32(shift)) & np.uint32(255)
        assert chi_square(np.bincount(cells, minlength=256), np.full(256, 1 / 256)) > P_FAIL


@pytest.mark.parametrize("axis", ["token", "position", "seed"])
@pytest.mark.parametrize("lag", [1, 2, 64])
def test_neighbours_are_independent(axis: str, lag: int, chi_square: ChiSquare) -> None:
    """Joint cells (16 x 16, top bits) of keys that are ``lag`` apart."""
    for fixed in (0, 7):
        top = (bits_along(axis, 40_000, fixed) >> np.uint32(28)).astype(np.int64)
        joint = np.bincount(16 * top[:-lag] + top[lag:], minlength=256)
        assert chi_square(joint, np.full(256, 1 / 256)) > P_FAIL


@pytest.mark.parametrize("step", [(1, 0), (0, 1), (1, 1), (1, -1), (2**32, 0)])
def test_rows_of_neighbouring_keys_are_independent(step: tuple[int, int], chi_square: ChiSquare) -> None:
    """Same tokens under two neighbouring (seed, position) keys, seed + 2**32 (the high word) included."""
    first = (noise_bits(5, 100, all_ids(40_000)) >> np.uint32(28)).astype(np.int64)
    second = (noise_bits(5 + step[0], 100 + step[1], all_ids(40_000)) >> np.uint32(28)).astype(np.int64)
    assert chi_square(np.bincount(16 * first + second, minlength=256), np.full(256, 1 / 256)) > P_FAIL


def test_every_input_bit_flips_half_of_the_output_bits() -> None:
    tokens = all_ids(2000)
    base = noise_bits(12345, 678, tokens)
    others = [noise_bits(12345 ^ (1 << b), 678, tokens) for b in range(64)]
    others += [noise_bits(12345, 678 ^ (1 << b), tokens) for b in range(32)]
    others += [noise_bits(12345, 678, tokens ^ np.uint32(1 << b)) for b in range(32)]
    for other in others:
        flips = np.unpackbits((base ^ other).view(np.uint8).reshape(-1, 4), axis=1, bitorder="little").mean(axis=0)
        assert np.abs(flips - 0.5).max() < 0.07  # 2000 coins: 6 standard deviations


def test_keys_do_not_collide() -> None:
    keys = {row_key(seed, position) for seed in range(300) for position in range(300)}
    assert len(keys) == 300 * 300


def test_a_weak_hash_would_be_caught(chi_square: ChiSquare) -> None:
    """The independence test has teeth: a Weyl sequence, uniform but regular, fails it."""
    top = ((np.arange(40_000, dtype=np.uint64) * 0x9E3779B9 & 0xFFFFFFFF) >> 28).astype(np.int64)
    assert chi_square(np.bincount(top, minlength=16), np.full(16, 1 / 16)) > P_FAIL
    assert chi_square(np.bincount(16 * top[:-1] + top[1:], minlength=256), np.full(256, 1 / 256)) < P_FAIL
