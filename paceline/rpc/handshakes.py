"""Counts TLS handshakes of a gRPC server that fail, of which gRPC tells nobody.

gRPC asks for the server's certificate whenever a connection begins its handshake. A connection that came through is in
gRPC's own list while it is open (channelz, read every ``LOOK_EVERY_S``), and every call names the one that it came
over. What began, and is found in neither within ``OVER_S``, has failed. One that came through and left within
``LOOK_EVERY_S`` without a call is not told apart from those. Who failed is not known, only how many.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
import grpc.aio
from grpc._cython import cygrpc  # type: ignore[attr-defined]  # the stubs lack it

from paceline.rpc.guard import Context, Continuation, checked

LOOK_EVERY_S = 1.0  # while a handshake may be under way
OVER_S = 30.0  # calls.HANDSHAKE_MS and a margin
WHY = "it failed"
MAX_CONNECTIONS = 65_536  # that are remembered; an older one that calls again is taken for a new one
LISTED_AT_ONCE = 500
LISTED = (("grpc.enable_channelz", 1),)  # options of a server that is watched


@dataclass
class _Calls:
    open: int = 0
    ended_at: float = 0.0  # the last one, or when the connection was seen first


class Handshakes(grpc.aio.ServerInterceptor):  # type: ignore[misc, unused-ignore]
    """Made on the server's event loop; the first of its interceptors, so that it hears of refused calls."""

    def __init__(self, on_failed: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        """on_failed: told of each, with ``WHY``, on the event loop."""
        self._on_failed, self._clock = on_failed, clock
        self._loop = asyncio.get_running_loop()
        self._server, self._idle_s = 0, 0.0
        self._next_id = 0  # of the next connection in gRPC's list
        self._begun = 0  # handshakes that are not accounted for
        self._through = 0  # connections that came through, likewise
        self._known: OrderedDict[str, _Calls] = OrderedDict()  # by the caller's address and port, the latest ones last

    def make(self, make: Callable[[], grpc.aio.Server], idle_s: float) -> grpc.aio.Server:
        """The server that ``make`` makes with the options ``LISTED``; it is watched from now on. idle_s: it closes
        connections that have no call for so long."""
        before = _servers()
        server = make()
        self._server, self._idle_s = max(_servers() - before, default=0), idle_s  # it has a number once it is listed
        return server

    def began(self) -> None:
        """A connection begins its handshake. From any thread."""
        with suppress(RuntimeError):  # the event loop is closed: the server ends
            self._loop.call_soon_threadsafe(self._begin)

    async def intercept_service(self, continuation: Continuation, details: grpc.HandlerCallDetails) -> Any:
        """See grpc.aio.ServerInterceptor."""
        handler: Any = await continuation(details)
        return checked(handler, self._note) if self._begun and handler is not None else handler

    def _begin(self) -> None:
        self._begun += 1
        if self._begun == 1:
            self._loop.call_later(LOOK_EVERY_S, self._look)
        self._loop.call_later(OVER_S, self._over)

    def _over(self) -> None:
        """One of those that began so long ago must be through by now. Which of them does not matter."""
        self._begun -= 1
        if self._through:
            self._through -= 1
        else:
            self._on_failed(WHY)

    def _look(self) -> None:
        for number, peer in _connections(self._server, self._next_id):
            self._next_id = max(self._next_id, number + 1)
            self._connection(peer)
        if self._begun:
            self._loop.call_later(LOOK_EVERY_S, self._look)

    async def _note(self, context: Context) -> None:
        peer = context.peer()
        known = self._connection(peer)
        known.open += 1
        at_end: Any = partial(self._ended, peer, known)
        context.add_done_callback(at_end)

    def _connection(self, peer: str) -> _Calls:
        known = self._known.get(peer)
        if known is None:
            self._through += 1
            known = self._known[peer] = _Calls(ended_at=self._clock())
            self._forget()
        return known

    def _ended(self, peer: str, known: _Calls, _: Context) -> None:
        known.open -= 1
        known.ended_at = self._clock()
        if self._known.get(peer) is known:
            self._known.move_to_end(peer)

    def _forget(self) -> None:
        """Connections that gRPC has closed by now, since they had no call for so long: their ports may be others'."""
        for _ in range(2):  # of the oldest, for each new one
            peer, known = next(iter(self._known.items()))
            if len(self._known) > MAX_CONNECTIONS or (not known.open and known.ended_at < self._clock() - self._idle_s):
                del self._known[peer]
            elif known.open:
                self._known.move_to_end(peer)


def _servers() -> set[int]:
    found, first = set[int](), 0
    while True:
        listed = json.loads(cygrpc.channelz_get_servers(first))
        found |= {int(server["ref"]["serverId"]) for server in listed.get("server", ())}
        if listed.get("end") or not listed.get("server"):
            return found
        first = max(found) + 1


def _connections(server: int, first: int) -> Iterator[tuple[int, str]]:
    """Number and peer, as a call's context has it, of a server's open connections from number ``first`` on."""
    while True:
        listed = json.loads(cygrpc.channelz_get_server_sockets(server, first, LISTED_AT_ONCE))
        for socket in listed.get("socketRef", ()):
            first = int(socket["socketId"]) + 1
            yield first - 1, socket["name"].rpartition(" ")[2]
        if listed.get("end") or not listed.get("socketRef"):
            return
