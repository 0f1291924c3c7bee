"""The followers of a node as child processes: how they are started, watched and ended.

Nothing of them can outlive rank 0. The kernel kills them when the thread that started them ends (PR_SET_PDEATHSIG);
hence that thread lives until they are gone. Should that fail, the end of file on their command channel ends them. They
meet through an anonymous memory file and socket pairs that they inherit: there is no folder, no port to find them at,
and nothing to clean up.
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

from paceline.errors import NodeUnavailable
from paceline.ranks.channel import Channel, Kind
from paceline.ranks.commands import read_text, text_fields
from paceline.ranks.leader import Followers
from paceline.ranks.options import FollowerOptions

log = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0  # until a follower has imported torch
JOIN_TIMEOUT_S = 60.0  # until all of them have met, once each is there
LOAD_TIMEOUT_S = 280.0  # until each has loaded its part; a node's start may take 300
END_TIMEOUT_S = 5.0  # for a follower to end in order
POLL_S = 0.5  # how soon the death of a follower is seen on an idle node
MODULE = "paceline.ranks.process"


class FollowerProcesses:
    """Started at once; ``end`` them before it is dropped."""

    def __init__(self, options: Sequence[FollowerOptions]) -> None:
        """options: of each follower, from rank 1 on. Raises OSError when a process cannot be started, NodeUnavailable
        when one does not come up."""
        self._meeting = os.memfd_create("paceline-ranks", os.MFD_CLOEXEC)
        self.store = f"/proc/self/fd/{self._meeting}"
        self._ends: list[tuple[socket.socket, socket.socket]] = []
        commands, rows = [], []
        for _ in options:
            (ours, theirs), (our_rows, their_rows) = socket.socketpair(), socket.socketpair()
            commands.append(Channel(ours))
            rows.append(Channel(our_rows))
            self._ends.append((theirs, their_rows))
        self._commands, self._rows = commands, rows
        self.followers = Followers(commands, rows)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ended, self._started = threading.Event(), threading.Event()
        self._start_error: OSError | None = None
        self._thread = threading.Thread(target=self._run, name="ranks", daemon=True)
        self._thread.start()
        self._started.wait()
        try:
            if self._start_error is not None:
                raise self._start_error
            for channel, option in zip(commands, options, strict=True):
                channel.send(Kind.OPTIONS, 0, text_fields(option.text()))
            self._await(Kind.HERE, START_TIMEOUT_S)
        except BaseException:
            self.end()
            raise

    def wait_ready(self) -> None:
        """Until every follower has loaded its part. Raises NodeUnavailable with what one that cannot says."""
        for rank, text in enumerate(self._await(Kind.READY, LOAD_TIMEOUT_S), 1):
            log.info("rank %d has its part of the model: %s", rank, text)

    def met(self) -> None:
        """Every rank has joined: the file is not needed any more."""
        meeting, self._meeting = self._meeting, -1
        if meeting >= 0:
            os.close(meeting)

    def end(self) -> None:
        """End the followers, whatever they do, and wait until they are gone. Idempotent."""
        self.followers.stop()
        self._ended.set()
        self._thread.join()
        self.met()

    def _await(self, kind: Kind, timeout_s: float) -> list[str]:
        """The texts of a frame that every follower sends."""
        texts, end = [], time.monotonic() + timeout_s
        for rank, channel in enumerate(self._commands, 1):
            try:
                frame = channel.receive(max(0.0, end - time.monotonic()))
            except NodeUnavailable as error:
                raise NodeUnavailable(f"rank {rank} did not come up: {error}") from error
            text = read_text(frame)
            if frame.kind is not kind:
                raise NodeUnavailable(f"rank {rank} did not come up: {text}")
            texts.append(text)
        return texts

    # ---- the thread whose end is the end of the followers

    def _run(self) -> None:
        try:
            for ends in self._ends:
                self._processes.append(self._spawn(*ends))
        except OSError as error:
            self._start_error = error
        finally:
            for ends in self._ends:
                for end in ends:
                    end.close()
            self._started.set()
        while not self._ended.wait(POLL_S):
            for rank, process in enumerate(self._processes, 1):
                if process.poll() is not None and not self.followers.failure:
                    self.followers.fail(NodeUnavailable(f"rank {rank} ended with {process.returncode}"))
        deadline = time.monotonic() + END_TIMEOUT_S
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for channel in (*self._commands, *self._rows):
            channel.close()

    def _spawn(self, commands: socket.socket, rows: socket.socket) -> subprocess.Popen[bytes]:
        files = (commands.fileno(), rows.fileno(), self._meeting)
        arguments = [sys.executable, "-m", MODULE, *map(str, files), str(os.getpid())]
        return subprocess.Popen(arguments, pass_fds=files, stdin=subprocess.DEVNULL)
