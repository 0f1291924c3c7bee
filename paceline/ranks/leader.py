"""Rank 0's side of the followers: it tells them what to run, in one order, and its own part runs meanwhile."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import numpy as np
import torch

from paceline.errors import NodeUnavailable
from paceline.ranks.asker import Asker
from paceline.ranks.channel import Array, Channel, Frame, Kind
from paceline.ranks.commands import RowsCommand, bytes_of, read_text
from paceline.ranks.group import Group

log = logging.getLogger(__name__)

# For a collective of a forward and for an answer: a follower that computes is never as late. It is less than the time
# after which a step counts as hung (serving.loop.STALL_S), so that the error comes first.
RANK_TIMEOUT_S = 30.0
LAST_WORD_S = 0.5  # that all ranks get to say why one failed


class Followers:
    """The other ranks of a node, as rank 0 talks to them.

    Four channels to each: ``commands`` is served in order, ``rows`` and ``lanes`` beside it; the last is the group's.
    After the first error every call raises NodeUnavailable with what that was. Thread-safe.
    """

    def __init__(
        self,
        commands: Sequence[Channel],
        rows: Sequence[Channel],
        lanes: Sequence[Channel],
        group: Group,
        timeout_s: float = RANK_TIMEOUT_S,
    ) -> None:
        """commands, rows, lanes: by rank, from rank 1 on. timeout_s: of an answer."""
        self._commands, self._rows, self.group, self._timeout_s = commands, rows, group, timeout_s
        self.lanes = [Asker(channel, self.fail) for channel in lanes]
        self._sent = 0
        self._done = 0  # commands that rank 0 has run to the end
        self._computing, self._moving, self._failing = threading.RLock(), threading.Lock(), threading.Lock()
        self.failure = ""

    @property
    def degree(self) -> int:
        """Ranks, rank 0 with them."""
        return len(self._commands) + 1

    @property
    def done(self) -> int:
        """The number of the last command that rank 0 has run to the end."""
        return self._done

    @contextmanager
    def running(self, kind: Kind, fields: Sequence[Array]) -> Iterator[None]:
        """Around what rank 0 does of a command that all ranks run. When that fails the ranks are out of step, so they
        are given up."""
        with self._computing:
            self._check()
            try:
                self._sent += 1
                for channel in self._commands:
                    channel.send(kind, self._sent, fields)
                yield
                self._done = self._sent
            except BaseException as error:
                raise self.fail(error) from error

    def gather(self, layers: range, slots: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
        """What each follower's pool has of the rows, flat in its own canonical order. slots: int64 [T]. On a GPU the
        caller's stream must hold what computes the rows here: the others have theirs when it is done."""
        with self._asking():
            self.group.finish()
            command = RowsCommand(layers, slots, self._done)
            for channel in self._rows:
                channel.send(Kind.GATHER, 0, command.fields())
            return [self._answer(channel, Kind.ROWS, dtype) for channel in self._rows]

    def scatter(self, layers: range, slots: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
        """Store ``parts``, one for each follower, in their pools; returns when they lie there."""
        with self._asking():
            command = RowsCommand(layers, slots, self._done)
            for channel, part in zip(self._rows, parts, strict=True):
                channel.send(Kind.SCATTER, 0, command.fields(bytes_of(part)))
            for channel in self._rows:
                self._frame(channel, Kind.DONE)

    def gather_of(self, rank: int, layers: range, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """``gather`` of rows that one follower alone has."""
        with self._asking():
            self.group.finish()
            channel = self._rows[rank - 1]
            channel.send(Kind.GATHER, 0, RowsCommand(layers, slots, self._done).fields())
            return self._answer(channel, Kind.ROWS, dtype)

    def scatter_of(self, rank: int, layers: range, slots: torch.Tensor, part: torch.Tensor) -> None:
        """``scatter`` of rows that one follower alone is to have."""
        with self._asking():
            channel = self._rows[rank - 1]
            channel.send(Kind.SCATTER, 0, RowsCommand(layers, slots, self._done).fields(bytes_of(part)))
            self._frame(channel, Kind.DONE)

    def finish(self) -> None:
        """Wait until what the caller's stream holds is done. Raises NodeUnavailable where ranks were lost before: then
        it is not to be used."""
        try:
            self.group.finish()
        except NodeUnavailable as error:
            raise self.fail(error) from error

    def stop(self) -> None:
        """Let the followers end in order. Idempotent."""
        with self._failing:
            if self.failure:
                return
            self.failure = "the ranks have ended"
        for channel in self._commands:
            with suppress(NodeUnavailable):
                channel.send(Kind.STOP)
        self._shut()

    def close(self) -> None:
        """Give the channels back, once the followers are gone and every wait for them has ended."""
        with self._computing, self._moving:
            for channel in (*self._commands, *self._rows):
                channel.close()
            for asker in self.lanes:
                asker.close()
            self.group.close()

    def fail(self, error: BaseException) -> NodeUnavailable:
        """Give the ranks up; every wait for them ends. Returns what to raise: the first error, whoever found it."""
        with self._failing:
            if not self.failure:
                said = self._last_words()
                self.failure = f"the ranks of this node are lost: {said or str(error) or repr(error)}"
                log.error("%s", self.failure)
        self._shut()
        return NodeUnavailable(self.failure)

    @contextmanager
    def _asking(self) -> Iterator[None]:
        with self._moving:
            self._check()
            try:
                yield
            except BaseException as error:
                raise self.fail(error) from error

    def _answer(self, channel: Channel, kind: Kind, dtype: torch.dtype) -> torch.Tensor:
        (data,) = self._frame(channel, kind).fields(np.uint8)
        return torch.from_numpy(data).view(dtype)

    def _frame(self, channel: Channel, kind: Kind) -> Frame:
        frame = channel.receive(self._timeout_s)
        if frame.kind is not kind:
            raise NodeUnavailable(read_text(frame) if frame.kind is Kind.FAILED else f"{frame.kind.name} came")
        return frame

    def _check(self) -> None:
        if self.failure:
            raise NodeUnavailable(self.failure)

    def _last_words(self) -> str:
        """Why followers failed, where one could say it."""
        said, end = [], time.monotonic() + LAST_WORD_S
        for rank, channel in enumerate(self._commands, 1):
            # RuntimeError: the thread that starts the node waits there too, and hears the word itself.
            with suppress(NodeUnavailable, ValueError, RuntimeError):
                frame = channel.receive(max(0.0, end - time.monotonic()))
                if frame.kind is Kind.FAILED:
                    said.append(f"rank {rank}: {read_text(frame)}")
        return "; ".join(said)

    def _shut(self) -> None:
        for channel in (*self._commands, *self._rows):
            channel.shut()
        for asker in self.lanes:
            asker.shut()
        self.group.shut()
