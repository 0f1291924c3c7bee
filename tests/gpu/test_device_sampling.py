"""The device sampler's kernels on a GPU against the CPU's sampler."""

from __future__ import annotations

import pytest
import torch

from paceline.sampling import device_torch
from paceline.sampling.device import draft_topk, sample_rows_device
from paceline.sampling.noise import exponential_noise
from tests.support.device_sampling import (
    check_broken_rows,
    check_cuts,
    check_masses_at_their_limit,
    check_noise,
    check_ties,
    check_tokens,
    check_topk,
    random_logits,
    random_rows,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")


@pytest.fixture(params=["triton", "torch"], autouse=True)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "triton":
        pytest.importorskip("triton")
    else:
        monkeypatch.setattr("paceline.sampling.device.operations", lambda device: device_torch)


def test_noise_is_the_reference_bit_for_bit() -> None:
    check_noise(CUDA)


def test_noise_of_tensors_there_is_the_cpus() -> None:
    """Mutant, seen on a device and by the shapes of tests/sampling/test_noise.py: the ids that were given are not those
    that the noise is of."""
    seeds, positions, ids = [3, 2**64 - 1], [5, 2**32 - 1], torch.tensor([[4, 9, 49151], [0, 9, 128255]])
    given = exponential_noise(seeds, positions, ids.to(CUDA), vocab_size=1000)
    whole = exponential_noise(seeds, positions, vocab_size=1000, device=CUDA)
    assert (given.device.type, whole.device.type) == ("cuda", "cuda")
    for there, here in (
        (given, exponential_noise(seeds, positions, ids)),
        (whole, exponential_noise(seeds, positions, vocab_size=1000)),
    ):
        torch.testing.assert_close(there.cpu(), here, rtol=1e-14, atol=0.0)


@pytest.mark.parametrize(("vocab_size", "count"), [(5, 2000), (1000, 2000), (49152, 200), (128256, 60)])
def test_tokens_are_the_cpus(vocab_size: int, count: int) -> None:
    check_tokens(CUDA, vocab_size, count, seed=vocab_size + 1)


@pytest.mark.parametrize(("vocab_size", "count"), [(31, 200), (1000, 200), (128256, 60)])
def test_cuts_leave_the_cpus_sets(vocab_size: int, count: int) -> None:
    pytest.importorskip("triton")
    check_cuts(CUDA, vocab_size, count)


def test_ties() -> None:
    check_ties(CUDA)


def test_masses_at_their_limit() -> None:
    check_masses_at_their_limit(CUDA)


def test_broken_rows() -> None:
    check_broken_rows(CUDA)


@pytest.mark.parametrize("coupled", [True, False])
@pytest.mark.parametrize(
    ("width", "vocab_size", "mapped"), [(1, 32000, True), (4, 128256, False), (10, 32000, True), (5, 5, True)]
)
def test_draft_candidates(width: int, vocab_size: int, mapped: bool, coupled: bool) -> None:
    check_topk(CUDA, width, vocab_size, mapped=mapped, coupled=coupled, count=20)


def test_the_host_does_not_wait() -> None:
    import random

    rng = random.Random(1)
    rows, logits = random_rows(rng, 30, 1000), random_logits(rng, 30, 1000).to(CUDA)
    params, positions = [row.params for row in rows], [row.position for row in rows]
    sample_rows_device(logits, rows)
    draft_topk(logits, params, positions, 3)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        tokens = sample_rows_device(logits, rows)
        found = draft_topk(logits, params, positions, 3)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert tokens.shape == (30,)
    assert found[0].shape == (30, 3)
