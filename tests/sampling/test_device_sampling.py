"""The device sampler against the CPU's: torch's operations here, the Triton kernels in the interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from unittest import mock

import pytest
import torch

from paceline.request import SamplingParams
from paceline.sampling.device import draft_topk, race_topk, sample_rows_device, upload_keys, warm_sampling
from paceline.sampling.packing import EDIT_WORDS, pack_rows
from paceline.sampling.sampler import RowContext
from tests.support.device_sampling import (
    check_broken_rows,
    check_cuts,
    check_masses_at_their_limit,
    check_noise,
    check_ties,
    check_tokens,
    check_topk,
    quiet,
)
from tests.support.interpreter import INTERPRETED, Again
from tests.support.needs import needs_triton

torch.set_num_threads(1)
CPU = torch.device("cpu")
SCALE = 1 if INTERPRETED else 20  # the interpreter takes some 30 ms for a row


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    with quiet():
        yield


def test_in_tritons_interpreter(run_again_interpreted: Again) -> None:
    assert run_again_interpreted(__file__) > 0


def test_noise_is_the_reference_bit_for_bit() -> None:
    check_noise(CPU)


@pytest.mark.parametrize(("vocab_size", "count"), [(5, 40), (1000, 40), (49152, 2)])
def test_tokens_are_the_cpus(vocab_size: int, count: int) -> None:
    check_tokens(CPU, vocab_size, count * SCALE, seed=vocab_size)


@pytest.mark.skipif(not INTERPRETED, reason="of the kernels alone")
@pytest.mark.parametrize(("vocab_size", "count"), [(31, 20), (1000, 20), (9000, 2)])
def test_cuts_leave_the_cpus_sets(vocab_size: int, count: int) -> None:
    check_cuts(CPU, vocab_size, count)


@needs_triton
@pytest.mark.skipif(not INTERPRETED, reason="of the kernels alone")
def test_a_node_that_is_ready_has_compiled_them() -> None:
    """All but those that draft, which a graph's capture compiles. Mutant: a row without a cut."""
    from paceline.sampling import kernels_triton, triton_cut

    names = {(m, name) for m in (kernels_triton, triton_cut) for name in vars(m) if name.endswith("_kernel")}
    with ExitStack() as patched:
        kernels = {name: patched.enter_context(mock.patch.object(m, name)) for m, name in names}
        warm_sampling(CPU, 100)
    left_out = {name for name, kernel in kernels.items() if not kernel.__getitem__.called}
    assert left_out == {"_noise_kernel", "_topk_kernel"}


def test_ties() -> None:
    check_ties(CPU, count=8 if INTERPRETED else 40)


@pytest.mark.skipif(INTERPRETED, reason="hundreds of rows with cuts take the interpreter too long")
def test_masses_at_their_limit() -> None:
    check_masses_at_their_limit(CPU)


def test_broken_rows() -> None:
    check_broken_rows(CPU)


@pytest.mark.parametrize("coupled", [True, False])
@pytest.mark.parametrize(("width", "vocab_size", "mapped"), [(1, 3000, True), (4, 3000, False), (5, 5, True)])
def test_draft_candidates(width: int, vocab_size: int, mapped: bool, coupled: bool) -> None:
    check_topk(CPU, width, vocab_size, mapped=mapped, coupled=coupled, count=10)


def test_no_rows() -> None:
    assert sample_rows_device(torch.zeros(0, 7), []).shape == (0,)


def test_refusals() -> None:
    row = RowContext(SamplingParams(), 0, (), [], ())
    with pytest.raises(ValueError, match="contexts"):
        sample_rows_device(torch.zeros(2, 7), [row])
    with pytest.raises(ValueError, match="seed"):
        sample_rows_device(torch.zeros(1, 7), [row])
    with pytest.raises(ValueError, match="seed"):
        draft_topk(torch.zeros(1, 7), [row.params], [0], 1)
    with pytest.raises(ValueError, match="differ"):
        draft_topk(torch.zeros(1, 7), [row.params], [0, 1], 1)
    keys = upload_keys([1], [0], CPU)
    with pytest.raises(ValueError, match="width"):
        race_topk(torch.zeros(1, 7), keys, torch.ones(1), 8)
    with pytest.raises(ValueError, match="keys"):
        race_topk(torch.zeros(1, 7), keys.to(torch.int64), torch.ones(1), 1)


def test_nodes_of_a_tree_share_their_history() -> None:
    params = SamplingParams(seed=1, repetition_penalty=1.2, presence_penalty=0.5)
    prompt, output = tuple(range(50)), [60, 60, 61]
    rows = [RowContext(params, 53 + i, prompt, output, (60, 70)[:i]) for i in range(3)]
    _, _, edits, cut_rows = pack_rows(rows, 100)
    assert len(edits) == EDIT_WORDS * (50 + 2 + 0 + 1 + 2)  # prompt and output once, then each node's path
    assert len(cut_rows) == 0
