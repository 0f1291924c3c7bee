"""The cores of a host, shared by the nodes on it.

A node uses all cores while the others are idle; as soon as a second one works they get equal parts
(``python -m benchmarks.mixed`` compares that with fixed parts).

Each node has a byte in a file that all of them map (in ``/dev/shm`` where there is one): 1 while its engine has work.
The kernels read the bytes at the start of every parallel region (``kernels/host.cpp``), so a part changes within a
millisecond. Results do not depend on the number of threads.

A node that is killed while it works leaves its byte at 1: the others then keep to a smaller part until its successor,
which has the same byte, is there. The file goes with the last node that closes it; one that a crash left behind goes
when a later node of the same user starts.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile
from contextlib import suppress
from pathlib import Path

from paceline.layers.build import share_cores

PREFIX = "paceline-cores-"
MAX_NODES = 256  # of a deployment


class CoreShare:
    """One node's place among those that share a host's cores."""

    def __init__(self, group: str, slot: int, folder: Path | None = None) -> None:
        """group: the same for all nodes of a deployment, letters, digits and ``-``. slot: this node's, 0..MAX_NODES-1.
        folder: where the file lies. Raises OSError when the file cannot be made."""
        folder = folder or shared_folder()
        _remove_abandoned(folder)
        self._path = folder / f"{PREFIX}{os.getuid()}-{group}"
        self._file = _open(self._path)
        self._map = _map(self._path)
        self._slot = slot
        self.busy = False
        share_cores(self._map, MAX_NODES, slot, num_cores())

    @property
    def busy(self) -> bool:
        """Whether this node's engine has work. Set on the engine thread alone."""
        return bool(self._map[self._slot])

    @busy.setter
    def busy(self, value: bool) -> None:
        self._map[self._slot] = int(value)

    def close(self) -> None:
        """Give the place back; the last one removes the file. The map stays for as long as the process lives, since
        kernels may still read it. Idempotent."""
        if self._file < 0:
            return
        self.busy = False
        with suppress(OSError):
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while another node holds its shared lock
            self._path.unlink(missing_ok=True)
        os.close(self._file)
        self._file = -1


def num_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def shared_folder() -> Path:
    """A folder in memory, or the one for temporary files."""
    memory = Path("/dev/shm")
    return memory if os.access(memory, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())


def _open(path: Path) -> int:
    """A file descriptor with a shared lock. Another user's file, or a link, is refused."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(file).st_uid != os.getuid():
                raise PermissionError(f"{path} belongs to another user")
            fcntl.flock(file, fcntl.LOCK_SH)
            os.ftruncate(file, MAX_NODES)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file), os.stat(path)):
                    return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)  # removed by the last of the others just before it was locked


def _map(path: Path) -> mmap.mmap:
    """The file's bytes, by a descriptor of their own: a map keeps its descriptor open, and with it any lock on it."""
    file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return mmap.mmap(file, MAX_NODES)
    finally:
        os.close(file)


def _remove_abandoned(folder: Path) -> None:
    """Remove files of this user that no process holds."""
    for path in folder.glob(f"{PREFIX}{os.getuid()}-*"):
        with suppress(OSError):
            file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(file)
