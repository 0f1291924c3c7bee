"""What nodes log, beside what the router logs.

Ray sends a node's stderr to a file on the node's host. The node puts the path into its registry record, and the router
copies new lines to its own stderr where it can read the file, so an operator of one host sees all logs in one place.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cluster.state.registry_types import NodeRecord

log = logging.getLogger(__name__)

POLL_S = 0.25
MAX_READ_BYTES = 1 << 20  # of one file at a time, so that a node that logs without end does not hold up the router
MAX_LEFT = 64  # files of nodes that left the view whose place is kept
RAY_MARKS = (b":job_id:", b":actor_name:", b":task_name:")  # lines that Ray writes for its own log monitor


def stderr_file() -> str:
    """The file that this process's stderr goes to; empty when that is no file."""
    try:
        path = os.readlink("/proc/self/fd/2")
    except OSError:
        return ""
    return path if os.path.isfile(path) else ""


@dataclass
class _Tail:
    path: Path
    offset: int = 0  # of the first byte that was not read yet
    rest: bytes = b""  # of a line that is not complete yet

    def read(self) -> str:
        """The lines that were completed since the last call."""
        with self.path.open("rb") as file:
            file.seek(self.offset)
            new = file.read(MAX_READ_BYTES)
        self.offset += len(new)
        whole, newline, self.rest = (self.rest + new).rpartition(b"\n")
        lines = (whole + newline).splitlines(keepends=True)
        return b"".join(line for line in lines if not line.startswith(RAY_MARKS)).decode(errors="replace")


class NodeLogs:
    """Copies the log lines of the nodes on this host to stderr. Everything runs on one event loop."""

    def __init__(self) -> None:
        self._tails: dict[str, _Tail] = {}  # by path
        self._left: dict[str, _Tail] = {}  # of nodes that left the view: one whose lease lapsed may come back
        self._seen: set[str] = set()  # paths of the latest view
        self._task = asyncio.create_task(self._run(), name="node-logs")

    def follow(self, nodes: Iterable[NodeRecord]) -> None:
        """Copy the logs of these nodes from now on; what is left of the others', and then no more of them."""
        found = {node.log: node for node in nodes if node.log not in ("", stderr_file())}
        for path in found.keys() - self._seen:
            if path in self._left:
                self._tails[path] = self._left.pop(path)
                continue
            node = found[path]
            log.info("%s is process %d and logs to %s:%s", node.id, node.pid, node.hostname, path)
            if Path(path).is_file():  # else it is on another host
                self._tails[path] = _Tail(Path(path))
        self._seen = set(found)
        self._copy()
        for path in self._tails.keys() - found.keys():
            self._left[path] = self._tails.pop(path)
        while len(self._left) > MAX_LEFT:
            del self._left[next(iter(self._left))]

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            self._copy()

    def _copy(self) -> None:
        for tail in self._tails.values():
            with suppress(OSError):  # somebody removed it
                sys.stderr.write(tail.read())
        sys.stderr.flush()

    def close(self) -> None:
        """Copy what is left and stop."""
        self._task.cancel()
        self.follow(())
