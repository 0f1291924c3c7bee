"""Counts TLS handshakes of a gRPC server that fail, of which gRPC tells nobody.

gRPC asks for the server's certificate whenever a connection begins its handshake. A connection that came through is in
gRPC's own list while it is open (channelz, read every ``LOOK_EVERY_S``), and every call names the one that it came
over. What began, and is found in neither within ``OVER_S``, has failed. One that came through and left within
``LOOK_EVERY_S`` without a call is not told apart from those. Who failed is not known, only how many.
"""

from __future__ import annotations

import asyncio
import json
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
MOST_BEGUN = 65_536  # that are waited for; further ones are accounted for at once
LISTED_AT_ONCE = 500
LISTED = (("grpc.enable_channelz", 1),)  # options of a server that is watched


@dataclass
class _Connection:
    number: int | None = None  # in gRPC's list; None: not seen there yet
    open: int = 0  # calls


class Handshakes(grpc.aio.ServerInterceptor):  # type: ignore[misc, unused-ignore]
    """Made on the server's event loop; the first of its interceptors, so that it hears of refused calls."""

    def __init__(self, on_failed: Callable[[str], None]) -> None:
        """on_failed: told of each, with ``WHY``, on the event loop."""
        self._on_failed = on_failed
        self._loop = asyncio.get_running_loop()
        self._server = 0
        self._secure = False  # whether any handshake began: none does where the port is in the clear
        self._begun = 0  # handshakes that are not accounted for
        self._through = 0  # connections that came through, likewise
        self._next_look: asyncio.TimerHandle | None = None
        self._known: dict[str, _Connection] = {}  # by the caller's address and port

    def make(self, make: Callable[[], grpc.aio.Server]) -> grpc.aio.Server:
        """The server that ``make`` makes with the options ``LISTED``; it is watched from now on."""
        before = _servers()
        server = make()
        self._server = max(_servers() - before, default=0)  # it has a number once it is listed
        return server

    def began(self) -> None:
        """A connection begins its handshake. From any thread."""
        with suppress(RuntimeError):  # the event loop is closed: the server ends
            self._loop.call_soon_threadsafe(self._begin)

    async def intercept_service(self, continuation: Continuation, details: grpc.HandlerCallDetails) -> Any:
        """See grpc.aio.ServerInterceptor."""
        handler: Any = await continuation(details)
        return checked(handler, self._note) if self._secure and handler is not None else handler

    def _begin(self) -> None:
        self._begun, self._secure = self._begun + 1, True
        if self._begun > MOST_BEGUN:
            return self._over()
        self._loop.call_later(OVER_S, self._over)
        if self._begun == 1:
            self._look()  # connections that are gone by now may have had the port of this one

    def _over(self) -> None:
        """One of those that began so long ago must be through by now. Which of them does not matter."""
        self._begun -= 1
        if self._through:
            self._through -= 1
        else:
            self._on_failed(WHY)

    def _look(self) -> None:
        if self._next_look is not None:
            self._next_look.cancel()  # there is one at a time
        try:
            listed = dict(_connections(self._server))
        except ValueError:
            return  # the server has ended
        for peer, number in listed.items():
            connection = self._connection(peer)
            if connection.number not in (None, number):  # another one from the same port
                self._through += 1
            connection.number = number
        for peer in [peer for peer, known in self._known.items() if not known.open and peer not in listed]:
            del self._known[peer]
        if self._begun:
            self._next_look = self._loop.call_later(LOOK_EVERY_S, self._look)

    async def _note(self, context: Context) -> None:
        connection = self._connection(context.peer())
        connection.open += 1
        at_end: Any = partial(_ended, connection)
        context.add_done_callback(at_end)

    def _connection(self, peer: str) -> _Connection:
        if peer not in self._known:
            self._through += 1
            self._known[peer] = _Connection()
        return self._known[peer]


def _ended(connection: _Connection, _: Context) -> None:
    connection.open -= 1


def _servers() -> set[int]:
    found, first = set[int](), 0
    while True:
        listed = json.loads(cygrpc.channelz_get_servers(first))
        found |= {int(server["ref"]["serverId"]) for server in listed.get("server", ())}
        if listed.get("end") or not listed.get("server"):
            return found
        first = max(found) + 1


def _connections(server: int) -> Iterator[tuple[str, int]]:
    """The peer, as calls name it, and number of each open connection. Raises ValueError without the server."""
    first = 0
    while True:
        listed = json.loads(cygrpc.channelz_get_server_sockets(server, first, LISTED_AT_ONCE))
        for socket in listed.get("socketRef", ()):
            number = int(socket["socketId"])
            first = max(first, number + 1)
            yield socket["name"].rpartition(" ")[2], number
        if listed.get("end") or not listed.get("socketRef"):
            return
