"""The memory file that nodes of a host keep their weights in together (layers.shared_weights). Needs no torch: the
deployment opens it."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from paceline.huge_pages import collapses

THP = Path("/sys/kernel/mm/transparent_hugepage")
SPARE = 0.25  # of the memory that is available, which copies may take: caches and whatever else runs need the rest


class WeightFile:
    """An anonymous file as long as the host's memory. What nobody has written takes none of it."""

    def __init__(self) -> None:
        """Raises OSError where the host has no such files."""
        self._file = os.memfd_create("paceline-weights", os.MFD_CLOEXEC)
        os.ftruncate(self._file, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))

    @property
    def path(self) -> str:
        """Where processes of the same user and host can open it until it is closed here."""
        return f"/proc/{os.getpid()}/fd/{self._file}"

    def close(self) -> None:
        """Let go of it; what nodes have mapped stays theirs. Idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def copies_fit(num_bytes: int, copies: int, available: int) -> bool:
    """Whether ``copies`` of weights leave most of the memory to others. num_bytes: of one; available: bytes."""
    return num_bytes * copies <= SPARE * available


def huge_pages_need_own_memory(folder: Path = THP) -> bool:
    """Whether this host gives huge pages to a process's own memory unasked, and none to memory that is shared, not even
    on demand: weights read through small pages decode several percent slower."""
    with suppress(OSError):
        unasked = "[always]" in (folder / "enabled").read_text()
        shared = (folder / "shmem_enabled").read_text()
        given = any(f"[{word}]" in shared for word in ("always", "within_size", "advise", "force"))
        return unasked and not given and not collapses()
    return False
