"""Rank 0's questions to one follower about its lanes: many at once, each answered once, in any order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError

from paceline.errors import NodeUnavailable
from paceline.ranks.channel import Array, Channel, Frame, Kind
from paceline.ranks.commands import link_fields, read_link, read_text

Said = tuple[Kind, str]  # LANES_DONE; or LANES_BROKEN, LANES_CORRUPT and what went wrong, in the follower's words
Answer = Future[Said]
ANSWERS = (Kind.LANES_DONE, Kind.LANES_BROKEN, Kind.LANES_CORRUPT)
OnKey = Callable[[str, bytes], None]


class Asker:
    """One follower's channel for lanes, at rank 0. A thread reads the answers from the first question on. Thread-safe.

    ``failed(error)``: the follower is lost; returns what to raise.
    """

    def __init__(self, channel: Channel, failed: Callable[[BaseException], NodeUnavailable]) -> None:
        self._channel, self._failed = channel, failed
        self._sending, self._lock = threading.Lock(), threading.Lock()
        self._asked = 0
        self._open: dict[int, Answer] = {}
        self._on_key: dict[int, OnKey] = {}
        self._lost: NodeUnavailable | None = None
        self._thread: threading.Thread | None = None

    def ask(self, kind: Kind, fields: Sequence[Array]) -> Answer:
        """Tell the follower to do something. Its answer never comes as an error of another kind than NodeUnavailable,
        which this raises too."""
        answer: Answer = Future()
        with self._sending:
            with self._lock:
                if self._lost is not None:
                    raise self._lost
                self._asked += 1
                number, self._open[self._asked] = self._asked, answer
                if self._thread is None:
                    self._thread = threading.Thread(target=self._read, name="rank-lanes", daemon=True)
                    self._thread.start()
            self._send(kind, number, fields)
        return answer

    def wait(self, answer: Answer, timeout_s: float) -> Said:
        """What the follower says. NodeUnavailable, and it is given up, when no answer comes in time."""
        try:
            return answer.result(timeout_s)
        except FutureTimeoutError:
            raise self._failed(NodeUnavailable("a rank does not answer about its lanes")) from None

    def tell(self, kind: Kind, fields: Sequence[Array]) -> None:
        """Tell the follower something that it does not answer. NodeUnavailable when it is lost."""
        with self._sending:
            self._send(kind, 0, fields)

    def listen(self, link: int, on_key: OnKey) -> None:
        """What the follower tells its peers of the lanes of a link goes to ``on_key``."""
        with self._lock:
            self._on_key[link] = on_key

    def end(self, link: int) -> None:
        """A link is over: the follower ends its lanes. Nothing is raised."""
        with self._lock:
            heard = self._on_key.pop(link, None)
        if heard is not None:
            try:
                self.tell(Kind.LANES_END, link_fields(link))
            except NodeUnavailable:
                return  # its lanes end with it

    def shut(self) -> None:
        """End every wait. Idempotent, from any thread."""
        self._channel.shut()

    def close(self) -> None:
        """Give the channel back, once nobody asks any more."""
        self._channel.shut()
        if self._thread is not None:
            self._thread.join()
        self._channel.close()

    def _send(self, kind: Kind, number: int, fields: Sequence[Array]) -> None:
        try:
            self._channel.send(kind, number, fields)
        except NodeUnavailable as error:
            raise self._failed(error) from error

    def _read(self) -> None:
        try:
            while True:
                self._take(self._channel.receive(None))
        except Exception as error:
            lost = self._failed(error)
        with self._lock:
            self._lost = lost
            answers = list(self._open.values())
            self._open.clear()
        for answer in answers:
            answer.set_exception(lost)

    def _take(self, frame: Frame) -> None:
        """ValueError for what no follower of ours says."""
        if frame.kind is Kind.LANES_KEY:
            link, (key, value) = read_link(frame, 2)
            on_key = self._on_key.get(link)
            if on_key is not None:  # else the link has ended
                on_key(key.decode(), value)
            return
        with self._lock:
            answer = self._open.pop(frame.number, None)
        if frame.kind not in ANSWERS or answer is None:
            raise ValueError(f"{frame.kind.name} {frame.number} answers no question")
        answer.set_result((frame.kind, read_text(frame)))
