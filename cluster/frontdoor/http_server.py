"""An HTTP server inside the running event loop, which keeps the process's signals as they are.

What no application sees is answered here, in the shape of every other error: bytes that are no HTTP, a request whose
head does not arrive, a connection beyond those that there is room for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
from collections.abc import Callable, Collection, Iterator
from functools import partial
from http import HTTPStatus
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from cluster.access.pace import Pace
from cluster.frontdoor.http_errors import HttpProblem
from cluster.nodes.listening import listen
from paceline.errors import ConfigError, DeadlineExceeded
from paceline.rpc.audit import network_of
from paceline.rpc.connections import PUBLIC_SERVERS, most_connections
from paceline.rpc.tls import TlsFolder

log = logging.getLogger(__name__)

START_TIMEOUT_S = 10.0
STOP_MARGIN_S = 2.0  # on top of the grace, for what was cancelled to end
MIN_OF_ADDRESS = 64  # connections that one address may always have; of more, half of all
KEEP_ALIVE_S = 60
HEAD_TIMEOUT_S = 60.0  # for the head of a request, from its first byte or from the connection's beginning
READ_BYTES = 32 * 1024
MAX_HEAD_BYTES = 16 * 1024
REST_TIMEOUT_S = 10.0  # for the rest of a body whose request is answered; it is thrown away
REST_PER_S = 16 * 2**20  # bytes of such rests of one address, of which as many may come at once
REST_PAUSE_S = 2.0  # longest wait before more of a rest is read
RETRY_AFTER_S = 1
MAX_DIGITS = 640  # of a whole number, the least bound that Python takes: it reads one in time by their square


class _OneLength(h11.Connection):
    """Refuses a request that says its length twice. h11 reads its chunks; a gateway before it that believes
    ``content-length`` would take what follows for the body, and let a request through that it has not seen."""

    def next_event(self) -> Any:
        """See h11.Connection."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            names = {name for name, _ in event.headers}
            if b"transfer-encoding" in names and b"content-length" in names:
                raise h11.RemoteProtocolError("both transfer-encoding and content-length")
        return event


class _Connection(H11Protocol):  # type: ignore[misc, unused-ignore]
    """One connection."""

    _head: asyncio.TimerHandle | None = None  # runs while a head is awaited
    _rest: asyncio.TimerHandle | None = None  # runs while the rest of a body is thrown away
    _pause: asyncio.TimerHandle | None = None  # runs until more of that is read

    def __init__(self, rests: Pace, *args: Any, **named: Any) -> None:
        """rests: how fast an address's rests of bodies are read."""
        super().__init__(*args, **named)
        self._rests = rests

    def connection_made(self, transport: asyncio.Transport) -> None:
        """See asyncio.Protocol."""
        super().connection_made(transport)
        self.conn = _OneLength(h11.SERVER, MAX_HEAD_BYTES)
        if hasattr(transport, "max_size"):  # asyncio's own, which reads 256 KiB of each ready connection at once
            transport.max_size = READ_BYTES
        _send_at_once(transport)
        self._await_head()
        if full := _full(self.connections, self.client):
            headers = {"retry-after": str(RETRY_AFTER_S)}
            self._refuse(HttpProblem(503, full, "service_unavailable_error", code="overloaded", headers=headers))

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        super().data_received(data)
        if self._rest is not None:
            if self.conn.their_state is h11.SEND_BODY:
                self._pause_rest(len(data))
            else:
                self._stop_rest()
        if self.conn.their_state is not h11.IDLE:
            self._stop_waiting()
        elif self._head is None:
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._stop_waiting()
        self._stop_rest()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Overrides uvicorn's. A client that was answered before it has sent its body may end it: who is cut off while
        it sends misses the answer."""
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY and not self.transport.is_closing():
            self._rest = self.loop.call_later(REST_TIMEOUT_S, self.transport.close)

    def send_400_response(self, msg: str) -> None:
        """Overrides uvicorn's, which calls it for bytes that are no HTTP."""
        self._refuse(HttpProblem(400, "what was sent is not an HTTP/1.1 request", code="invalid_http"))

    def _await_head(self) -> None:
        self._stop_waiting()
        self._head = self.loop.call_later(HEAD_TIMEOUT_S, self._head_is_late)

    def _stop_waiting(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None

    def _stop_rest(self) -> None:
        for timer in (self._rest, self._pause):
            if timer is not None:
                timer.cancel()
        self._rest = self._pause = None

    def _pause_rest(self, size: int) -> None:
        """Let ``size`` bytes of it count before more are read."""
        pause_s = self._rests.wait_s(network_of(self.client[0]) if self.client else "", size)
        if pause_s:
            self.transport.pause_reading()
            self._pause = self.loop.call_later(pause_s, self.transport.resume_reading)

    def _head_is_late(self) -> None:
        self._head = None
        if self.conn.their_state is h11.IDLE and (self.cycle is None or self.cycle.response_complete):
            late = f"the request did not arrive within {HEAD_TIMEOUT_S:g} s"
            self._refuse(HttpProblem(408, late, code="timeout"))

    def _refuse(self, problem: HttpProblem) -> None:
        """Answer without the application, and close. While an earlier request is still answered there is no place
        for it: the connection just ends."""
        body = problem.dumps().encode("ascii")
        headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
        reason = HTTPStatus(problem.status).phrase
        parts = (
            h11.Response(
                status_code=problem.status, headers=list((headers | problem.headers).items()), reason=reason.encode()
            ),
            h11.Data(data=body),
            h11.EndOfMessage(),
        )
        with contextlib.suppress(h11.LocalProtocolError):
            self.transport.write(b"".join(self.conn.send(part) or b"" for part in parts))
        self.transport.close()


def _send_at_once(transport: asyncio.Transport) -> None:
    """Without this the kernel keeps an event back until the client has acknowledged the one before, which may take 40
    ms on a connection that is used again. asyncio does it for sockets that name their protocol; accepted ones do not.
    """
    transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _full(connections: Collection[_Connection], client: tuple[str, int] | None) -> str:
    """Why there is no room for one more of ``connections``; empty when there is."""
    most = most_connections(PUBLIC_SERVERS)
    if len(connections) > most:
        return f"{most} connections are open"
    of_address = max(most // 2, MIN_OF_ADDRESS)
    if client is None or len(connections) <= of_address:
        return ""
    network = network_of(client[0])
    own = sum(other.client is not None and network_of(other.client[0]) == network for other in connections)
    return f"{of_address} connections of your address are open" if own > of_address else ""


class _Embedded(uvicorn.Server):  # type: ignore[misc, unused-ignore]
    """Leaves the signal handlers alone: the process belongs to the caller."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """A server that listens. ``stop`` ends it."""

    def __init__(self, server: uvicorn.Server, task: asyncio.Task[None], port: int) -> None:
        self.port = port
        self._server = server
        self._task = task

    async def stop(self, grace_s: float = 0.0) -> None:
        """Take no more connections, give requests ``grace_s`` seconds, then cancel them. Idempotent."""
        self._server.config.timeout_graceful_shutdown = grace_s
        self._server.should_exit = True
        done, _ = await asyncio.wait({self._task}, timeout=grace_s + STOP_MARGIN_S)
        if not done:
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=STOP_MARGIN_S)
        for request in list(self._server.server_state.tasks):
            request.cancel()
        if self._server.server_state.tasks:
            await asyncio.wait(set(self._server.server_state.tasks), timeout=STOP_MARGIN_S)


async def serve_http(
    app: ASGIApp, host: str, port: int, tls: TlsFolder | None = None, refused: Callable[[str], None] = log.info
) -> HttpServer:
    """Serve ``app``; port 0 takes a free one. tls: has the certificate of HTTPS; None: plain HTTP. refused: told why a
    handshake failed. Raises ConfigError when the address cannot be had. From then on this process reads no whole number
    of more than MAX_DIGITS digits."""
    sys.set_int_max_str_digits(MAX_DIGITS)
    context = None if tls is None else tls.public_context(refused)
    listener = listen("http", host, port)
    config = uvicorn.Config(
        app,
        http=partial(_Connection, Pace(REST_PER_S, REST_PER_S, REST_PAUSE_S)),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # X-Forwarded-For is the client's own word, in the audit and for limits of an address
        timeout_keep_alive=KEEP_ALIVE_S,
        ssl_context_factory=None if context is None else lambda config, default: context,
    )
    server = _Embedded(config)
    task = asyncio.create_task(server.serve(sockets=[listener]), name="http")
    try:
        await _started(server, task)
    except BaseException:
        task.cancel()
        listener.close()
        raise
    return HttpServer(server, task, listener.getsockname()[1])


async def _started(server: uvicorn.Server, task: asyncio.Task[None]) -> None:
    deadline = asyncio.get_running_loop().time() + START_TIMEOUT_S
    while not server.started:
        if task.done():
            await task
            raise ConfigError("http", "the HTTP server ended while starting")
        if asyncio.get_running_loop().time() > deadline:
            raise DeadlineExceeded(f"the HTTP server did not start within {START_TIMEOUT_S:g} s")
        await asyncio.sleep(0.005)
