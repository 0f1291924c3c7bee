"""Weights that nodes of a host keep together: once, with the bytes that a node would have by itself, never written."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from paceline.host_memory import ALIGNMENT
from paceline.huge_pages import HUGE_PAGE, ReadableMap
from paceline.layers import shared_weights as module
from paceline.layers import weight_file
from paceline.layers.linear import Linear
from paceline.layers.shared_weights import kept, shared_weights
from paceline.layers.weight_file import WeightFile, copies_fit, huge_pages_need_own_memory
from tests.support.needs import needs_collapse, needs_kernels

SHAPE = (1100, 1024)  # of bf16: a huge page and a bit, so that a second copy takes another one


@pytest.fixture
def file() -> Iterator[WeightFile]:
    made = WeightFile()
    yield made
    made.close()


def weight(seed: int) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def keep(tensor: torch.Tensor) -> torch.Tensor:
    return kept(tensor.shape, tensor.dtype, lambda copy: copy.copy_(tensor))


def node(file: WeightFile, *seeds: int) -> list[torch.Tensor]:
    """What a node that loads these weights keeps."""
    with shared_weights(file.path):
        return [keep(weight(seed)) for seed in seeds]


def used(file: WeightFile) -> int:
    """Bytes of memory that the file takes."""
    return os.stat(file.path).st_blocks * 512


def permissions(tensor: torch.Tensor) -> str:
    """How the memory of a tensor is mapped, as /proc says it."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(end, 16) for end in line.split()[0].split("-"))
        if low <= tensor.data_ptr() < high:
            return line.split()[1]
    raise AssertionError("not mapped")


def test_two_nodes_keep_one_copy(file: WeightFile) -> None:
    first = node(file, 1, 2)
    before = used(file)
    assert before >= sum(tensor.nbytes for tensor in first)
    second = node(file, 2, 1)
    assert used(file) == before
    assert [torch.equal(a, b) for a, b in zip(first, reversed(second), strict=True)] == [True, True]
    assert torch.equal(first[0], weight(1))
    assert torch.equal(first[1], weight(2))


def test_nobody_can_write_to_it_and_it_outlives_the_file(file: WeightFile) -> None:
    (tensor,) = node(file, 1)
    assert permissions(tensor) == "r--s"
    file.close()
    file.close()
    assert torch.equal(tensor, weight(1))


@needs_kernels
def test_a_linear_gives_the_same_bits(file: WeightFile) -> None:
    rows = torch.randn(3, SHAPE[1]).to(torch.bfloat16)
    with shared_weights(file.path):
        shared = Linear(weight(3))
    assert permissions(shared._packed) == "r--s"
    assert torch.equal(shared(rows), Linear(weight(3))(rows))


def in_huge_pages(smaps: str) -> int:
    """Bytes of the weights' memory file that a process reads through huge pages, as its /proc/PID/smaps says it."""
    weights = smaps.partition("memfd:paceline-weights")[2]
    found = re.search(r"^ShmemPmdMapped: +(\d+) kB$", weights, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


OTHER_NODE = """
import atexit, sys
atexit.register(lambda: print(torch.equal(tensor, weight(2))))  # runs after what is registered later
from pathlib import Path
from tests.layers.test_shared_weights import keep, shared_weights, torch, weight
with shared_weights(sys.argv[1]):
    tensor = keep(weight(2))
print(torch.equal(tensor, weight(2)))
print(Path("/proc/self/smaps").read_text())
"""


@needs_collapse
def test_every_process_reads_the_weights_through_huge_pages(file: WeightFile) -> None:
    """Mutants: a map begins anywhere, nobody asks for huge pages, or a map ends before its process."""
    tensors = node(file, 1, 2)
    whole = used(file)
    assert whole == 3 * HUGE_PAGE
    assert all(torch.equal(tensor, weight(seed)) for tensor, seed in zip(tensors, (1, 2), strict=True))
    assert in_huge_pages(Path("/proc/self/smaps").read_text()) == whole
    command = [sys.executable, "-c", OTHER_NODE, file.path]
    other = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert in_huge_pages(other) == whole
    assert (other[:5], other[-5:]) == ("True\n", "True\n")
    assert used(file) == whole


def test_without_huge_pages_weights_are_shared_all_the_same(
    file: WeightFile, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ReadableMap, "collapse", lambda *_: errno.ENOMEM)
    with caplog.at_level("INFO"):
        first, second = node(file, 1), node(file, 1)
    assert used(file) < 2 * first[0].nbytes
    assert torch.equal(second[0], weight(1))
    assert ["Cannot allocate memory" in record.getMessage() for record in caplog.records] == [True, True]


def test_what_was_changed_in_the_file_is_not_used(file: WeightFile) -> None:
    (tensor,) = node(file, 1)
    with open(file.path, "r+b") as opened:
        opened.seek(ALIGNMENT + tensor.nbytes - 1)
        opened.write(b"\xab")
    assert not torch.equal(tensor, weight(1))
    (again,) = node(file, 1)
    assert torch.equal(again, weight(1))


def test_what_a_killed_node_left_is_overwritten(file: WeightFile) -> None:
    with open(file.path, "r+b") as opened:
        opened.seek(ALIGNMENT)
        opened.write(b"\xab" * 1000)  # data without its header
    (tensor,) = node(file, 1)
    assert torch.equal(tensor, weight(1))
    (again,) = node(file, 1)
    assert torch.equal(again, weight(1))
    assert used(file) < 2 * tensor.nbytes


def test_a_locked_or_full_file_is_done_without(
    file: WeightFile, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "LOCK_TIMEOUT_S", 0.0)
    holder = os.open(file.path, os.O_RDWR)
    fcntl.flock(holder, fcntl.LOCK_EX)
    tensors = node(file, 1, 2)
    os.close(holder)
    assert [permissions(tensor)[3] for tensor in tensors] == ["p", "p"]
    assert torch.equal(tensors[1], weight(2))
    assert len(caplog.records) == 1
    os.truncate(file.path, tensors[0].nbytes + 2 * ALIGNMENT)
    fits, does_not = node(file, 1, 2)
    assert (permissions(fits)[3], permissions(does_not)[3]) == ("s", "p")
    assert torch.equal(does_not, weight(2))
    assert "full" in caplog.records[-1].getMessage()


def test_without_a_file_each_has_its_own(tmp_path: Path) -> None:
    for path in ("", str(tmp_path / "nowhere")):
        with shared_weights(path):
            assert permissions(keep(weight(1)))[3] == "p"
    assert permissions(keep(weight(1)))[3] == "p"


def test_small_tensors_are_each_nodes_own(file: WeightFile) -> None:
    with shared_weights(file.path):
        assert torch.equal(keep(torch.ones(8)), torch.ones(8))
    assert used(file) == 0


def test_weights_of_one_process_lie_side_by_side_from_a_huge_page_on() -> None:
    """Mutants: each has memory of its own, or two have the same."""
    with shared_weights(""):
        kept_here = [keep(weight(seed)) for seed in range(3)]
        size = module.RUN - 3 * kept_here[0].nbytes
        other = kept((size + 64,), torch.uint8, lambda copy: copy.fill_(7))  # does not fit behind them
        large = kept((module.RUN + 1,), torch.uint8, lambda copy: copy.fill_(9))
        after = keep(weight(3))
    assert [torch.equal(one, weight(seed)) for seed, one in enumerate([*kept_here, after])] == [True] * 4
    assert [int(one.min()) for one in (other, large)] == [7, 9]
    assert [one.data_ptr() % HUGE_PAGE for one in (kept_here[0], other, large)] == [0, 0, 0]
    starts = [one.data_ptr() for one in kept_here]
    assert [b - a for a, b in itertools.pairwise(starts)] == [kept_here[0].nbytes] * 2
    assert after.data_ptr() == other.data_ptr() + other.nbytes


@pytest.mark.parametrize(
    ("enabled", "shared", "on_demand", "own"),
    [
        ("always [madvise] never", "always within_size advise [never] deny force", False, False),
        ("[always] madvise never", "always within_size advise [never] deny force", False, True),
        ("[always] madvise never", "always within_size advise [never] deny force", True, False),
        ("[always] madvise never", "always within_size [advise] never deny force", False, False),
    ],
)
def test_weights_are_not_shared_where_only_own_memory_gets_huge_pages(
    tmp_path: Path, enabled: str, shared: str, on_demand: bool, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_file, "collapses", lambda: on_demand)
    assert not huge_pages_need_own_memory(tmp_path)
    (tmp_path / "enabled").write_text(enabled)
    (tmp_path / "shmem_enabled").write_text(shared)
    assert huge_pages_need_own_memory(tmp_path) is own


def test_copies_leave_most_of_the_memory_to_others() -> None:
    assert [copies_fit(100, copies, 1000) for copies in (1, 2, 3)] == [True, True, False]
