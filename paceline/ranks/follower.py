"""What every rank but the first does: it runs the commands of rank 0, in their order, and serves its rows and its lanes
beside them.

It holds no sequence and decides nothing. It ends when rank 0 says so, when rank 0 is gone, and after its first error.
"""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from dataclasses import replace
from importlib import import_module

import numpy as np
import torch

from paceline.attention.base import AttentionBackend
from paceline.errors import NodeUnavailable
from paceline.kvcache.pool import KvPool
from paceline.models.base import ForwardContext, TargetModel
from paceline.ranks.channel import Channel, Closed, Frame, Kind
from paceline.ranks.commands import (
    MAX_ERROR_BYTES,
    RowsCommand,
    bytes_of,
    read_batch,
    read_copy,
    read_ids,
    read_rows,
    text_fields,
)
from paceline.ranks.devices import take_device
from paceline.ranks.group import Group

log = logging.getLogger(__name__)

LANES = "kv_transfer.lanes.follower:LaneServer"  # imported for the first link with lanes
ORDER_TIMEOUT_S = 30.0  # that rows wait for commands which rank 0 has run already


class Follower:
    """One rank's loop. ``run`` returns when it has ended."""

    def __init__(
        self,
        model: TargetModel,
        pool: KvPool,
        attention: AttentionBackend,
        commands: Channel,
        rows: Channel,
        lanes: Channel,
        group: Group,
    ) -> None:
        """model: this rank's part; pool: with this rank's heads."""
        self._model, self._pool, self._attention, self._group = model, pool, attention, group
        self._commands, self._rows, self._lanes, self._device = commands, rows, lanes, pool.device
        self._done = 0  # commands
        self._stepped = threading.Condition()

    def run(self) -> None:
        """Serve until rank 0 has gone or says stop, and close what connects it. What fails is raised, and told to
        rank 0."""
        work = (self._serve_rows, self._serve_lanes)
        serving = [threading.Thread(target=serve, name="rank-rows", daemon=True) for serve in work]
        for thread in serving:
            thread.start()
        try:
            take_device(self._device)
            self._group.join()
            while (frame := self._commands.receive(None)).kind is not Kind.STOP:
                self._run(frame)
        except Closed:
            return
        except Exception as error:
            self._tell(error)
            raise
        finally:
            for channel in (self._commands, self._rows, self._lanes, self._group):
                channel.shut()
            for thread in serving:
                thread.join()
            for end in (self._commands, self._rows, self._lanes, self._group):
                end.close()

    def _run(self, frame: Frame) -> None:
        if frame.number != self._done + 1:
            raise ValueError(f"command {frame.number} came after command {self._done}")
        match frame.kind:
            case Kind.FORWARD:
                batch = read_batch(frame, self._device)
                batch = replace(batch, token_ids=self._carried(batch.token_ids))
                self._model.forward(ForwardContext.build(batch, self._pool, self._attention))
            case Kind.LOGITS:
                self._model.logits(self._carried(read_rows(frame, self._device)))
            case Kind.EMBED:
                self._model.embed(self._carried(read_ids(frame, self._device)))
            case Kind.COPY_SLOTS:
                self._pool.copy_slots(*read_copy(frame))
            case _:
                raise ValueError(f"{frame.kind.name} is no command")
        with self._stepped:
            self._done = frame.number
            self._stepped.notify_all()

    def _carried(self, found: torch.Tensor) -> torch.Tensor:
        """What belongs to a command. found: as its frame has it."""
        return self._group.broadcast(None, found) if self._group.carries else found

    # ---- rows, on a thread of their own. On a GPU they are read and written in the order of the thread that computes

    def _serve_rows(self) -> None:
        take_device(self._device)
        try:
            while True:
                self._move(self._rows.receive(None))
        except Closed:
            return
        except Exception as error:
            self._broken(error)

    def _move(self, frame: Frame) -> None:
        if frame.kind is Kind.GATHER:
            head, slots = frame.fields(np.int64, np.int64)
            command = RowsCommand.read(head, slots)
            self._wait_for(command.after)
            self._rows.send(Kind.ROWS, 0, [bytes_of(self._pool.gather(command.layers, command.slots))])
        elif frame.kind is Kind.SCATTER:
            head, slots, data = frame.fields(np.int64, np.int64, np.uint8)
            command = RowsCommand.read(head, slots)
            self._wait_for(command.after)
            rows = torch.from_numpy(data).view(self._pool.layout.dtype)
            self._pool.scatter(command.layers, command.slots, rows)
            self._rows.send(Kind.DONE)
        else:
            raise ValueError(f"{frame.kind.name} is no command for rows")

    # ---- lanes, likewise

    def _serve_lanes(self) -> None:
        try:
            self._lanes.wait()  # what serves them is loaded for the first link that has any
        except NodeUnavailable:
            return
        module, _, name = LANES.partition(":")
        try:
            server = getattr(import_module(module), name)
            server(self._lanes, self._group.rank, self._pool, self._wait_for, self._broken).run()
        except Exception as error:
            self._broken(error)

    def _broken(self, error: Exception) -> None:
        """Rows or lanes cannot be served: this rank ends."""
        log.error("rows cannot be served", exc_info=error)
        self._tell(error)
        self._commands.shut()

    def _wait_for(self, number: int) -> None:
        """Until that command has run here too."""
        with self._stepped:
            if not self._stepped.wait_for(lambda: self._done >= number, ORDER_TIMEOUT_S):
                raise NodeUnavailable(f"command {number} did not run within {ORDER_TIMEOUT_S:g} s")

    def _tell(self, error: Exception) -> None:
        with suppress(NodeUnavailable):
            text = f"{type(error).__name__}: {error}"[:MAX_ERROR_BYTES]
            self._commands.send(Kind.FAILED, 0, text_fields(text))
