"""Weights that the nodes of a host have in common: what one of them keeps, the others need not keep a second time.

The deployment opens a memory file (``layers.weight_file``) and gives its path to its nodes. While a node loads its
model inside ``shared_weights(path)``, ``kept`` puts tensors into the file, or finds them there. A tensor is found by
comparing every byte with what this node would have kept otherwise, so nothing about the file has to be trusted: other
weights, another dtype or other kernels are other bytes and get places of their own.

The file is anonymous memory: it is on no disk, and the kernel frees it with the last process that has it open, however
that process ends. Nodes use it through maps that cannot be written; while one loads, it has a second map to write with.
A node that has loaded asks for huge pages under what is there (huge_pages): a decode step reads all of it.

Layout: records one after another, each a header (64-bit number of data bytes; 0 where no record begins yet) and the
data, both at multiples of 64 bytes. A header is written after its data, under a lock of the file: a node that dies
while it writes leaves no record.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import math
import mmap
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from paceline.file_lock import locked
from paceline.host_memory import ALIGNMENT, host_zeros
from paceline.huge_pages import ReadableMap

log = logging.getLogger(__name__)

SMALLEST = 64 * 1024  # bytes; smaller tensors stay each node's own
RUN = 32 * 1024 * 1024  # bytes of a process's own memory that are taken at once
LOCK_TIMEOUT_S = 20.0  # a node that was stopped while it held the lock must not hold up the others for ever
LOCK_POLL_S = 0.002
HEADER = struct.Struct("<Q")

_libc = ctypes.CDLL(None)
_libc.memcmp.argtypes, _libc.memcmp.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t], ctypes.c_int


class _Shelf:
    """The file as a node that loads its model sees it."""

    def __init__(self, path: str) -> None:
        """Raises OSError and ValueError where there is no such file, or no address space for it."""
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._size = os.fstat(self._file).st_size
            self._writable = mmap.mmap(self._file, self._size)
            self._writable.madvise(mmap.MADV_HUGEPAGE)  # where shmem_enabled is advise
            self._readable = ReadableMap(self._file, self._size)
        except BaseException:
            os.close(self._file)
            raise
        self._address = self._readable.address
        self._records: dict[int, list[int]] = {}  # offsets of data by number of bytes
        self._end = 0  # of the records known so far
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def keep(self, shape: Sequence[int], dtype: torch.dtype, fill: Callable[[torch.Tensor], object]) -> torch.Tensor:
        """See ``kept``. Raises OSError when the file is full, or locked for too long."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if self._scratch.numel() < num_bytes:
            self._scratch = torch.empty(num_bytes, dtype=torch.uint8)
        wanted = self._scratch[:num_bytes]
        fill(wanted.view(dtype).view(*shape))
        with locked(self._file, LOCK_TIMEOUT_S, LOCK_POLL_S):
            self._read_headers()
            offset = self._found(wanted)
            if offset is None:
                offset = self._append(wanted)
        data = (ctypes.c_uint8 * num_bytes).from_address(self._address + offset)
        data.map = self._readable  # type: ignore[attr-defined]  # lives as long as the tensor
        return torch.frombuffer(data, dtype=dtype).view(*shape)

    def _read_headers(self) -> None:
        while self._end + ALIGNMENT <= self._size:
            (num_bytes,) = HEADER.unpack(ctypes.string_at(self._address + self._end, HEADER.size))
            if not num_bytes:
                return
            self._records.setdefault(num_bytes, []).append(self._end + ALIGNMENT)
            self._end += ALIGNMENT + _aligned(num_bytes)

    def _found(self, wanted: torch.Tensor) -> int | None:
        for offset in self._records.get(wanted.numel(), ()):
            if _libc.memcmp(self._address + offset, wanted.data_ptr(), wanted.numel()) == 0:
                return offset
        return None

    def _append(self, wanted: torch.Tensor) -> int:
        header, num_bytes = self._end, wanted.numel()
        offset = header + ALIGNMENT
        if offset + _aligned(num_bytes) + ALIGNMENT > self._size:
            raise OSError(errno.ENOSPC, "the memory file is full")
        self._writable[offset : offset + num_bytes] = wanted.numpy().data
        HEADER.pack_into(self._writable, header, num_bytes)
        self._read_headers()
        return offset

    def close(self) -> None:
        """No more is kept; tensors stay mapped, for reading alone, in huge pages where the host has them."""
        self._writable.close()
        if failed := self._readable.collapse(self._end):
            log.info("weights that nodes share lie in small pages: %s", os.strerror(failed))
        os.close(self._file)


class _OwnMemory:
    """Weights of this process alone, side by side in runs that begin with a huge page.

    Memory of its own for each of them would begin anywhere: Linux gives a huge page only where a whole one is the
    process's when it is first touched, so that most weights would be read through small pages.
    """

    def __init__(self) -> None:
        self._left = torch.empty(0, dtype=torch.uint8)

    def keep(self, shape: Sequence[int], dtype: torch.dtype, fill: Callable[[torch.Tensor], object]) -> torch.Tensor:
        """See ``kept``."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes > RUN:
            memory = host_zeros(num_bytes)
        else:
            if num_bytes > self._left.numel():
                self._left = host_zeros(RUN)  # what was left is never touched, and takes no memory
            memory, self._left = self._left[:num_bytes], self._left[_aligned(num_bytes) :]
        tensor = memory.view(dtype).view(*shape)
        fill(tensor)
        return tensor

    def close(self) -> None:
        """No more is kept; a run lives as long as the last of its tensors."""


_shelf: ContextVar[_Shelf | _OwnMemory | None] = ContextVar("shelf", default=None)


@contextmanager
def shared_weights(path: str) -> Iterator[None]:
    """Inside, ``kept`` uses the memory file at ``path``; with an empty path, or where the file cannot be used, each
    process keeps its own copy. Not nested."""
    shelf = _opened(path)
    token = _shelf.set(shelf)
    try:
        yield
    finally:
        _shelf.reset(token)
        shelf.close()


def _opened(path: str) -> _Shelf | _OwnMemory:
    if path:
        try:
            return _Shelf(path)
        except (OSError, ValueError) as error:  # on another host, the path leads nowhere
            log.info("this node keeps weights of its own: %s", error)
    return _OwnMemory()


def kept(shape: Sequence[int], dtype: torch.dtype, fill: Callable[[torch.Tensor], object]) -> torch.Tensor:
    """A CPU tensor that ``fill`` has filled, every byte of it. Inside ``shared_weights`` it lies in memory that nodes
    share, and a write to it ends the process."""
    shelf = _shelf.get()
    if shelf is not None and math.prod(shape) * dtype.itemsize >= SMALLEST:
        try:
            return shelf.keep(shape, dtype, fill)
        except OSError as error:
            log.warning("%s: this node keeps the rest of its weights itself", error)
            own_memory = _OwnMemory()
            _shelf.set(own_memory)
            return own_memory.keep(shape, dtype, fill)
    own = torch.empty(*shape, dtype=dtype)
    fill(own)
    return own


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
