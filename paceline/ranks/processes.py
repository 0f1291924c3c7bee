"""The followers of a node as child processes: how they are started, watched and ended.

Nothing of them can outlive rank 0. The kernel kills them when the thread that started them ends (PR_SET_PDEATHSIG);
hence that thread lives until they are gone. Should that fail, the end of file on their command channel ends them.
Commands, rows and lanes have socket pairs that they inherit, and parts too unless a collective carries them.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from paceline.errors import NodeUnavailable
from paceline.ranks.channel import Channel, Kind
from paceline.ranks.commands import read_text, text_fields
from paceline.ranks.devices import channels_of, make_group
from paceline.ranks.leader import RANK_TIMEOUT_S, Followers
from paceline.ranks.options import FollowerOptions

log = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 280.0  # until each has imported torch and loaded its part; a node's start may take 300
END_TIMEOUT_S = 5.0  # for a follower to end in order
POLL_S = 0.5  # how soon the death of a follower is seen on an idle node
STOPPED_S = 2.0  # that a follower may be stopped, as by SIGSTOP
MODULE = "paceline.ranks.process"


class FollowerProcesses:
    """Started at once; ``end`` them before it is dropped."""

    def __init__(self, options: Sequence[FollowerOptions]) -> None:
        """options: of each follower, from rank 1 on. Raises OSError when a process cannot be started, NodeUnavailable
        when one does not come up."""
        kinds = channels_of(options[0])
        pairs = [[socket.socketpair() for _ in options] for _ in range(kinds)]
        commands, rows, lanes, *sums = ([Channel(ours) for ours, _ in kind] for kind in pairs)
        self._theirs = [[theirs for _, theirs in ends] for ends in zip(*pairs, strict=True)]
        self._commands = commands
        self.group = make_group(options[0], 0, [channel for kind in sums for channel in kind], RANK_TIMEOUT_S)
        self.followers = Followers(commands, rows, lanes, self.group)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ended, self._started = threading.Event(), threading.Event()
        self._start_error: OSError | None = None
        self._ready = False  # they listen to what rank 0 says
        self._thread = threading.Thread(target=self._run, name="ranks", daemon=True)
        self._thread.start()
        self._started.wait()
        try:
            if self._start_error is not None:
                raise self._start_error
            for channel, option in zip(commands, options, strict=True):
                channel.send(Kind.OPTIONS, 0, text_fields(option.text()))
        except BaseException:
            self.end()
            raise

    def wait_ready(self) -> None:
        """Until every follower has loaded its part, and the ranks have met. Raises NodeUnavailable with what one that
        cannot says."""
        for rank, text in enumerate(self._await(Kind.READY, LOAD_TIMEOUT_S), 1):
            log.info("rank %d has its part of the model: %s", rank, text)
        self._ready = True
        try:
            self.group.join()
        except NodeUnavailable as error:
            raise self.followers.fail(error) from error

    def end(self) -> None:
        """End the followers, whatever they do, and wait until they are gone. Idempotent."""
        self.followers.stop()
        self._ended.set()
        self._thread.join()

    def _await(self, kind: Kind, timeout_s: float) -> list[str]:
        """The texts of a frame that every follower sends."""
        texts, end = [], time.monotonic() + timeout_s
        for rank, channel in enumerate(self._commands, 1):
            try:
                frame = channel.receive(max(0.0, end - time.monotonic()))
            except NodeUnavailable as error:
                raise NodeUnavailable(f"rank {rank} did not come up: {self.followers.failure or error}") from error
            text = read_text(frame)
            if frame.kind is not kind:
                raise NodeUnavailable(f"rank {rank} did not come up: {text}")
            texts.append(text)
        return texts

    # ---- the thread whose end is the end of the followers

    def _run(self) -> None:
        try:
            for ends in self._theirs:
                self._processes.append(self._spawn(ends))
        except OSError as error:
            self._start_error = error
        finally:
            for end in chain.from_iterable(self._theirs):
                end.close()
            self._started.set()
        self._watch()
        deadline = time.monotonic() + (END_TIMEOUT_S if self._ready else 0.0)
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.followers.close()

    def _watch(self) -> None:
        """Until ``end``: give the ranks up when one has ended, or is stopped for longer than a moment. A wait for it
        would end much later, as a rank that computes may be slow."""
        stopped = [0] * len(self._processes)
        while not self._ended.wait(POLL_S):
            for rank, process in enumerate(self._processes, 1):
                stopped[rank - 1] = stopped[rank - 1] + 1 if is_stopped(process.pid) else 0
                if self.followers.failure:
                    continue
                if late := self.group.late():
                    self.followers.fail(NodeUnavailable(late))
                if process.poll() is not None:
                    self.followers.fail(NodeUnavailable(f"rank {rank} ended with {process.returncode}"))
                elif stopped[rank - 1] * POLL_S > STOPPED_S:
                    self.followers.fail(NodeUnavailable(f"rank {rank} is stopped for {STOPPED_S:g} s"))

    def _spawn(self, ends: list[socket.socket]) -> subprocess.Popen[bytes]:
        """Its modules are those of this process: the working directory may hold others of the same names."""
        files = [end.fileno() for end in ends]
        arguments = [sys.executable, "-P", "-m", MODULE, *map(str, files), str(os.getpid())]
        path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
        environment = os.environ | {"PYTHONPATH": path}
        return subprocess.Popen(arguments, pass_fds=files, stdin=subprocess.DEVNULL, env=environment)


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal; false for one that is gone."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state == "T"
