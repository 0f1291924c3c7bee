"""Huge pages for memory that processes read together. Needs no torch.

Linux gives a memory file huge pages by itself only where ``shmem_enabled`` says so, and mostly that says ``never``.
MADV_COLLAPSE, of Linux 6.1 on, makes them on demand: the kernel moves what lies in small pages into huge ones, for
every process that maps the file. A process reads through them where its map begins at a multiple of a huge page.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import time
import weakref
from contextlib import suppress

HUGE_PAGE = 2 * 1024 * 1024  # bytes, of x86-64 and of arm64 with pages of 4 KiB
PIECE = 128 * HUGE_PAGE  # bytes of one call: a process that is killed ends after it
RETRIES = 5  # of one file, while another process has hold of a page
PAUSE_S = 0.01
PROT_NONE, MAP_FIXED, MADV_COLLAPSE = 0, 0x10, 25  # which Python does not name

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class ReadableMap:
    """A memory file from an address on where a huge page may begin. Nobody can write through it. It lasts as long as
    this object."""

    def __init__(self, file: int, size: int) -> None:
        """file: a descriptor, which may be closed afterwards. size: bytes of the file. Raises OSError where there is no
        address space for it."""
        room = size + HUGE_PAGE
        reserved = _map(None, room, PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
        # At the end of the process it stays, for other threads may read until the last moment.
        weakref.finalize(self, _libc.munmap, reserved, room).atexit = False
        self.address = _whole_pages(reserved)
        self._size = size
        _map(self.address, size, mmap.PROT_READ, mmap.MAP_SHARED | MAP_FIXED, file)
        _libc.madvise(self.address, size, mmap.MADV_HUGEPAGE)  # where shmem_enabled is advise

    def collapse(self, num_bytes: int) -> int:
        """Have the first bytes of the file in huge pages. Returns 0, or the errno that says why some stay in small
        ones: the kernel is too old, or there is no memory that hangs together, or none below the limit of a group."""
        end = min(_whole_pages(num_bytes), self._size // HUGE_PAGE * HUGE_PAGE)
        failed, retries = 0, RETRIES
        for start in range(0, end, PIECE):
            piece = (self.address + start, min(PIECE, end - start))
            error = _collapsed(*piece)
            while error == errno.EAGAIN and retries:
                retries -= 1
                time.sleep(PAUSE_S)
                error = _collapsed(*piece)
            failed = error or failed
            if error not in (0, errno.EAGAIN):
                break
        return failed


@functools.cache
def collapses() -> bool:
    """Whether this host makes huge pages of memory files on demand. It is tried with one."""
    with suppress(OSError):
        file = os.memfd_create("paceline-probe", os.MFD_CLOEXEC)
        try:
            os.ftruncate(file, HUGE_PAGE)
            os.pwrite(file, b"\1", 0)  # takes a small page
            failed = ReadableMap(file, HUGE_PAGE).collapse(HUGE_PAGE)
            return not failed and os.fstat(file).st_blocks * 512 == HUGE_PAGE
        finally:
            os.close(file)
    return False


def _collapsed(address: int, num_bytes: int) -> int:
    return ctypes.get_errno() if _libc.madvise(address, num_bytes, MADV_COLLAPSE) else 0


def _map(address: int | None, num_bytes: int, protection: int, flags: int, file: int) -> int:
    found = _libc.mmap(address, num_bytes, protection, flags, file, 0)
    if found in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), "a memory file cannot be mapped")
    return int(found)


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // HUGE_PAGE) * HUGE_PAGE
