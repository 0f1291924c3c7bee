"""The cores of a host, shared by the nodes on it.

A node uses all cores while the others are idle; as soon as a second one works they get equal parts
(``python -m benchmarks.mixed`` compares that with fixed parts).

Each node has a byte in a file that all of them map (in ``/dev/shm`` where there is one): 1 while its engine has work.
The kernels read the bytes at the start of every parallel region (``kernels/host.cpp``), so a part changes within a
millisecond. Results do not depend on the number of threads.

Other processes may want the cores too. A step is hundreds of parallel regions, and each ends when its last thread has
done its part: where a core is taken, a region of 30 microseconds waits for milliseconds, and two threads take longer
than one. A step whose threads miss too much goes on with fewer, and so does the node for a while, then it tries again
(`Crowd`).

A node that is killed while it works leaves its byte at 1: the others then keep to a smaller part until its successor,
which has the same byte, is there. The file goes with the last node that closes it; one that a crash left behind goes
when a later node of the same user starts.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.layers.build import current_threads, limit_threads, share_cores, take_regions

log = logging.getLogger(__name__)

PREFIX = "paceline-cores-"
MAX_NODES = 256  # of a deployment


# The cores are crowded when their threads missed this share of the time that they had work for, over so many seconds of
# it. One that shares its core with a program that never waits misses half. A router of eight streams takes a tenth, in
# bursts, and threads that wait for it are still faster than fewer threads.
CROWDED_SHARE, JUDGED_S = 0.4, 0.05
FEWER = 0.75  # of the threads, then; of two, one
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 8.0  # on fewer threads before the next try; each try in vain doubles it


@dataclass
class Crowd:
    """Whether others crowd the cores, judged by what threads miss. Times are seconds of one monotonic clock."""

    most: int = 0  # threads of the next step; 0: any number
    _pause_s: float = FIRST_PAUSE_S
    _until: float = 0.0
    _took_s: float = 0.0
    _missed_s: float = 0.0

    def stepped(self, now: float, took_s: float, missed_s: float, threads: int) -> None:
        """A step ended at ``now``. Its parallel regions, on ``threads`` at most, took ``took_s``, for ``missed_s`` of
        which one of the threads did not run."""
        if self.most and now >= self._until:
            self.most, self._took_s, self._missed_s = 0, 0.0, 0.0  # what was judged on fewer threads is no judgement
            return
        self._took_s, self._missed_s = self._took_s + took_s, self._missed_s + missed_s
        if self._took_s < JUDGED_S:
            return
        if self._missed_s > CROWDED_SHARE * self._took_s:
            self.most, self._until = max(1, int(FEWER * threads)), now + self._pause_s
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        elif not self.most:
            self._pause_s = max(self._pause_s / 2, FIRST_PAUSE_S)
        self._took_s = self._missed_s = 0.0


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
        self._crowd = Crowd()
        self._shared_s = self._missed_s = 0.0  # since the start
        self.busy = False
        share_cores(self._map, MAX_NODES, slot, num_cores(), JUDGED_S, CROWDED_SHARE, FEWER)

    @property
    def busy(self) -> bool:
        """Whether this node's engine has work. Set on the engine thread alone."""
        return bool(self._map[self._slot])

    @busy.setter
    def busy(self, value: bool) -> None:
        self._map[self._slot] = int(value)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around a step of the engine, on its thread."""
        try:
            yield
        finally:
            most = self._crowd.most
            took_s, missed_s = take_regions()
            limit_threads(most)  # kernels that found the cores crowded took fewer for the rest of the step
            self._shared_s, self._missed_s = self._shared_s + took_s, self._missed_s + missed_s
            self._crowd.stepped(time.monotonic(), took_s, missed_s, current_threads())
            if self._crowd.most != most:
                limit_threads(self._crowd.most)
                log.debug("threads of a step, as other processes crowd the cores: %s", self._crowd.most or "any number")

    def counts(self) -> dict[str, int]:
        """Milliseconds of steps that several threads shared, and those in which one of them had no core, by field of
        the registry's record. From any thread."""
        return {"shared_ms": int(1e3 * self._shared_s), "missed_ms": int(1e3 * self._missed_s)}

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
