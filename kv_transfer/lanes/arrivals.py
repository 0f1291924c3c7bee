"""What comes over the lanes of a link at the destination, in step with the link's own pipe."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from torch import Tensor

from kv_transfer.lanes.leader import Lanes
from kv_transfer.layout.rows import RowTarget
from kv_transfer.transports.base import NUM_BUFFERS, Pending, TransportError
from paceline.errors import PacelineError

Message = tuple[range, int, int]  # layers, tokens, and bytes on the link's own pipe


class Arrivals:
    """The messages of all lanes at the destination, in step with those of the link's own pipe. One thread uses it.

    At most NUM_BUFFERS are on their way or in use, since the link's own pipe has as many.
    """

    def __init__(self, lanes: Lanes) -> None:
        self.lanes = lanes
        self._numbers = itertools.cycle(range(NUM_BUFFERS))
        self._expected: deque[tuple[range, int, int, Pending]] = deque()  # layers, tokens, buffer
        self._current: tuple[int, Pending] | None = None

    def expect(self, messages: Sequence[Message]) -> None:
        """What comes after the current message, in order. Those expected before are the first of them. TransportError
        for a message that no sender of ours announces."""
        for layers, count, num_bytes in [one for one in messages if self._carries(one)][len(self._expected) :]:
            if len(self._expected) == NUM_BUFFERS - 1:
                return
            self._start(layers, count, num_bytes)

    def take(self, message: Message) -> None:
        """The next message is the current one; the one before it is not needed any more. Errors as `expect`."""
        self.drop()
        layers, count, num_bytes = message
        if not self._carries(message):
            return
        if not self._expected:
            self._start(layers, count, num_bytes)
        wanted, tokens, number, wait = self._expected.popleft()
        if (wanted, tokens) != (layers, count):
            raise TransportError(f"{count} tokens of layers {layers} come where {tokens} of {wanted} are expected")
        self._current = number, wait

    def scatter(self, layers: range, slots: Tensor) -> None:
        """Store the current message, which comes, at ``slots`` of every rank."""
        if self._current is None:
            return
        (number, wait), self._current = self._current, None
        self.lanes.scatter(number, layers, slots, wait)

    def drop(self) -> None:
        """The current message, which comes, is of no use."""
        if self._current is not None:
            (_, wait), self._current = self._current, None
            wait()

    def settle(self) -> None:
        """The link is dead: wait until no message is written into a buffer any more. Call nothing else afterwards."""
        pending = [] if self._current is None else [self._current[1]]
        for wait in (*pending, *(wait for *_, wait in self._expected)):
            with suppress(PacelineError):
                wait()
        self._current = None
        self._expected.clear()

    def num_bytes(self, layers: range, count: int) -> int:
        """Bytes of ``count`` tokens on all lanes together."""
        return self.lanes.num_bytes(layers, count) if self.lanes.carry(layers) else 0

    def _carries(self, message: Message) -> bool:
        layers, _, num_bytes = message
        return num_bytes > 0 and self.lanes.carry(layers)

    def _start(self, layers: range, count: int, num_bytes: int) -> None:
        due = self.lanes.lead_bytes(layers, count)
        if num_bytes != due:
            raise TransportError(f"{num_bytes} bytes announced for {count} tokens of layers {layers}, which take {due}")
        number = next(self._numbers)
        self._expected.append((layers, count, number, self.lanes.receive(number, layers, count)))


class LaneTarget:
    """Where a decode node puts the rows of a message: what the link's own pipe brought into rank 0's pool, what came
    over lanes into those of all ranks. ``RowTarget.scatter``."""

    def __init__(self, arrivals: Arrivals) -> None:
        self._own = RowTarget(arrivals.lanes.own_pool, arrivals.lanes.options.lead)
        self._arrivals = arrivals

    def scatter(self, layers: range, slots: Tensor, data: Tensor) -> None:
        """See RowTarget. TransportError: the link broke."""
        self._own.scatter(layers, slots, data)
        self._arrivals.scatter(layers, slots)
