"""Memory files in huge pages: where they are mapped, what is asked for, and what is done without them."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline import huge_pages
from paceline.huge_pages import HUGE_PAGE, ReadableMap, collapses
from tests.support.needs import needs_collapse

PAGE = mmap.PAGESIZE


@pytest.fixture
def file() -> Iterator[int]:
    """A memory file as large as the host's memory, with a byte in each of its first small pages."""
    made = os.memfd_create("paceline-test")
    os.ftruncate(made, PAGE * os.sysconf("SC_PHYS_PAGES"))
    for start in range(0, 3 * HUGE_PAGE, PAGE):
        os.pwrite(made, bytes([start // PAGE % 251]), start)
    yield made
    os.close(made)


class Kernel:
    """What stands for libc: it answers one demand after another, with 0 or an errno, and the last answer stays."""

    def __init__(self, *answers: int) -> None:
        self.asked: list[tuple[int, int]] = []  # bytes from the first address that was asked for, and their number
        self._answers, self._first = list(answers), 0

    def madvise(self, address: int, num_bytes: int, advice: int) -> int:
        """As libc has it."""
        assert advice == huge_pages.MADV_COLLAPSE
        self._first = self._first or address
        self.asked.append((address - self._first, num_bytes))
        error = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        ctypes.set_errno(error)
        return -1 if error else 0


def collapsed(monkeypatch: pytest.MonkeyPatch, mapped: ReadableMap, num_bytes: int, *answers: int) -> tuple[int, Any]:
    """What ``collapse`` returns, and what it asks a kernel for that answers so."""
    kernel = Kernel(*answers)
    with monkeypatch.context() as patched:
        patched.setattr(huge_pages, "_libc", kernel)
        patched.setattr(huge_pages, "PIECE", 2 * HUGE_PAGE)
        patched.setattr(huge_pages, "PAUSE_S", 0.0)
        return mapped.collapse(num_bytes), kernel.asked


def comes_unasked() -> bool:
    """Whether this host gives a huge page to a memory file that it fits into."""
    made = os.memfd_create("paceline-test")
    os.ftruncate(made, HUGE_PAGE)
    os.pwrite(made, b"x", 0)
    taken = os.fstat(made).st_blocks * 512
    os.close(made)
    return taken == HUGE_PAGE


def address_space() -> int:
    """Bytes of addresses that this process has taken."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * PAGE


def test_a_map_begins_with_a_huge_page_wherever_there_is_room(file: int) -> None:
    """Mutant: it begins where the kernel puts it, which odd numbers of small pages move."""
    maps = [ReadableMap(file, (512 * 3 + odd) * PAGE) for odd in (1, 3, 5, 7)]
    assert [one.address % HUGE_PAGE for one in maps] == [0] * 4
    assert [ctypes.string_at(one.address + 5 * PAGE, 1) for one in maps] == [b"\5"] * 4


def test_a_map_gives_its_addresses_back(file: int) -> None:
    """Mutants: they stay taken, or only those of the file are free again."""
    size, before = 7 * HUGE_PAGE + PAGE, address_space()
    maps = [ReadableMap(file, size) for _ in range(256)]
    assert address_space() >= before + 256 * size
    maps.clear()
    assert address_space() < before + 128 * HUGE_PAGE


def test_without_address_space_it_raises(file: int) -> None:
    with pytest.raises(OSError, match="cannot be mapped"):
        ReadableMap(file, 1 << 60)


@needs_collapse
def test_the_file_lies_in_huge_pages_and_holds_what_it_held(file: int) -> None:
    mapped = ReadableMap(file, os.fstat(file).st_size)
    assert mapped.collapse(2 * HUGE_PAGE + 1) == 0
    assert os.fstat(file).st_blocks * 512 == 3 * HUGE_PAGE
    written = b"".join(bytes([number % 251]).ljust(PAGE, b"\0") for number in range(3 * HUGE_PAGE // PAGE))
    assert ctypes.string_at(mapped.address, 3 * HUGE_PAGE) == written


@pytest.mark.parametrize(
    ("num_bytes", "pieces"),
    [
        (0, []),
        (1, [(0, 1)]),
        (2 * HUGE_PAGE, [(0, 2)]),
        (4 * HUGE_PAGE + 1, [(0, 2), (2, 2), (4, 1)]),
        (6 * HUGE_PAGE, [(0, 2), (2, 2), (4, 1)]),  # the file ends within the sixth
    ],
)
def test_whole_pages_are_asked_for_in_pieces_within_the_file(
    num_bytes: int, pieces: list[tuple[int, int]], file: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mapped = ReadableMap(file, 5 * HUGE_PAGE + PAGE)
    error, asked = collapsed(monkeypatch, mapped, num_bytes, 0)
    assert (error, asked) == (0, [(start * HUGE_PAGE, many * HUGE_PAGE) for start, many in pieces])


def test_what_another_process_holds_is_asked_for_again_a_few_times(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    mapped = ReadableMap(file, 5 * HUGE_PAGE)
    error, asked = collapsed(monkeypatch, mapped, 5 * HUGE_PAGE, errno.EAGAIN, errno.EAGAIN, 0)
    assert (error, [start // HUGE_PAGE for start, _ in asked]) == (0, [0, 0, 0, 2, 4])
    error, asked = collapsed(monkeypatch, mapped, 5 * HUGE_PAGE, errno.EAGAIN)
    assert (error, [start // HUGE_PAGE for start, _ in asked]) == (errno.EAGAIN, [0] * 6 + [2, 4])


@pytest.mark.parametrize("error", [errno.EINVAL, errno.ENOMEM, errno.EBUSY])  # an old kernel, no memory, a full group
def test_after_any_other_failure_no_more_is_asked_for(error: int, file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    mapped = ReadableMap(file, 5 * HUGE_PAGE)
    found, asked = collapsed(monkeypatch, mapped, 5 * HUGE_PAGE, 0, error, 0)
    assert (found, [start // HUGE_PAGE for start, _ in asked]) == (error, [0, 2])


def test_a_host_is_tried_with_one_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutants: a kernel is believed that does nothing, or one that refuses."""
    descriptors = len(os.listdir("/proc/self/fd"))
    assert collapses.__wrapped__() is collapses()
    monkeypatch.setattr(ReadableMap, "collapse", lambda *_: errno.EINVAL)
    assert not collapses.__wrapped__()
    monkeypatch.setattr(ReadableMap, "collapse", lambda *_: 0)
    assert collapses.__wrapped__() is comes_unasked()
    assert len(os.listdir("/proc/self/fd")) == descriptors
