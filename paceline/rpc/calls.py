"""gRPC plumbing that nodes and router share: servers, channel options, errors."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from collections.abc import Sequence as Seq
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any

import grpc
import grpc.aio
from grpc._cython import cygrpc  # type: ignore[attr-defined]  # the stubs lack it

from paceline.errors import NodeUnavailable, PacelineError, PermissionDenied
from paceline.rpc.connections import most_connections
from paceline.rpc.handshakes import LISTED, Handshakes
from paceline.rpc.malformed import RefuseMalformed
from paceline.rpc.wire_errors import error_from_status, metadata_for, status_for

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
# A peer that is stopped, or behind a cut cable, closes nothing: the connection is given up when it answers no ping.
# gRPC's own threads answer, so that a busy engine or event loop is not taken for a dead one.
PING_AFTER_MS = 500  # without anything heard; gRPC lets a second pass between two pings all the same
PING_TIMEOUT_MS = 1_000
# A connection costs memory and an open file. Who is closed for its silence connects anew within its next call, which
# takes a round trip or three.
IDLE_MS = 120_000  # without a call
HANDSHAKE_MS = 20_000  # for TLS and the first frames of HTTP/2; gRPC's own bound is two minutes
STOP_GRACE_S = 0.2  # for the last status of a call that is over, and for streams that stay open by design
_BOTH_ENDS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", PING_AFTER_MS),
    ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),
    ("grpc.http2.max_pings_without_data", 0),  # a stream may be silent for as long as a prompt is computed
]
CHANNEL_OPTIONS: list[tuple[str, Any]] = [
    *_BOTH_ENDS,
    # A node that came back on the same port must not wait for the back-off of its predecessor's death.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.min_reconnect_backoff_ms", 1_000),  # how long one attempt to connect may take
]
SERVER_OPTIONS: list[tuple[str, Any]] = [
    *_BOTH_ENDS,
    ("grpc.http2.min_ping_interval_without_data_ms", PING_AFTER_MS // 2),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),
]


class _CallersThatLeft(logging.Filter):
    """Keeps a caller that left just as its answer ended out of the log: gRPC logs a traceback at ERROR when the status
    that it then cannot send fails, and there is nobody to tell and nothing to do."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return not (isinstance(error, cygrpc.ExecuteBatchError) and "SendStatusFromServerOperation" in str(error))


_CALLERS_THAT_LEFT = _CallersThatLeft()  # one, so that adding it again changes nothing


def make_server(
    options: Seq[tuple[str, Any]],
    max_concurrent_rpcs: int | None,
    interceptors: Seq[grpc.aio.ServerInterceptor] = (),
    max_fields: int | None = None,
    on_malformed: Callable[[], None] = lambda: None,
    handshakes: Handshakes | None = None,
    connections: int | None = None,
) -> grpc.aio.Server:
    """A server that refuses what is no message of its RPC, closes connections that ask nothing or are too many, and
    logs no caller that left. max_concurrent_rpcs: None where one of ``interceptors`` bounds them. max_fields: of a
    large request; None: any number. on_malformed: hears of each message that is refused. handshakes: counts those that
    fail. connections: that may be open; None: as many as a process with one server has files for."""
    logging.getLogger(cygrpc.__name__).addFilter(_CALLERS_THAT_LEFT)
    first = [] if handshakes is None else [handshakes]
    asked = [*first, *interceptors, RefuseMalformed(max_fields, on_malformed)]
    bounds = (
        ("grpc.max_connection_idle_ms", IDLE_MS),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
        ("grpc.max_allowed_incoming_connections", most_connections() if connections is None else connections),
        # gRPC would take in up to 64 MiB of every call over a fast connection before anybody reads them, also of calls
        # that are refused. Without this it is 64 KiB, and what a message needs from when it is read.
        ("grpc.http2.bdp_probe", 0),
    )
    named = (*bounds, *LISTED, *options)
    make = partial(grpc.aio.server, interceptors=asked, options=named, maximum_concurrent_rpcs=max_concurrent_rpcs)
    return make() if handshakes is None else handshakes.make(make)


def _insecurely(server: grpc.aio.Server, address: str) -> int:
    return server.add_insecure_port(address)


async def start_server(
    register: Callable[[grpc.aio.Server], None],
    host: str,
    max_concurrent_rpcs: int,
    interceptors: Seq[grpc.aio.ServerInterceptor] = (),
    bind: Callable[[grpc.aio.Server, str], int] = _insecurely,
    on_malformed: Callable[[], None] = lambda: None,
    handshakes: Handshakes | None = None,
) -> tuple[grpc.aio.Server, str]:
    """Serve on a free port of ``host``; returns the server and its "host:port". bind: opens a port at an address.
    on_malformed, handshakes: see ``make_server``."""
    server = make_server(
        SERVER_OPTIONS, max_concurrent_rpcs, interceptors, on_malformed=on_malformed, handshakes=handshakes
    )
    register(server)
    at = f"[{host}]" if ":" in host else host
    port = bind(server, f"{at}:0")
    await server.start()
    return server, f"{at}:{port}"


async def end_server(server: grpc.aio.Server, active: Callable[[], int], grace_s: float) -> None:
    """Let the calls that ``active`` counts end for ``grace_s`` seconds, then cut off what is left.

    Not gRPC's own grace alone: a stream that stays open by design (a link's, a health watch) would make it take the
    whole. A short one ends it, since a call may be counted off a moment before its status is sent.
    """
    end = time.monotonic() + grace_s
    while active() and time.monotonic() < end:
        await asyncio.sleep(0.02)
    await server.stop(min(grace_s, STOP_GRACE_S))


@asynccontextmanager
async def answering_errors(context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[None]:
    """Turn what Paceline raises on purpose into the RPC's status."""
    try:
        yield
    except PacelineError as error:
        code, details = status_for(error)
        await context.abort(code, details, metadata_for(error))


async def answer_stream(answers: AsyncGenerator[Any, None], context: grpc.aio.ServicerContext[Any, Any]) -> None:
    """Write ``answers`` to the caller. However the RPC ends, the generator is closed before this returns, so that
    its ``finally`` gives back what the call holds (a generator handed to gRPC would wait for the collector)."""
    async with answering_errors(context), aclosing(answers):
        async for answer in answers:
            await context.write(answer)


def error_from_peer(error: grpc.aio.AioRpcError, peer: str) -> PacelineError:
    """The error that the status of a call between two nodes stands for. A peer that did not answer in time is
    unavailable: the deadline was that of the call, not of a request, as it is in `wire_errors.error_from_rpc`."""
    details = f"{peer}: {error.details()}"
    if error.code() in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED):
        return NodeUnavailable(details)
    known = error_from_status(error.code(), details, error.trailing_metadata())
    # A node that refuses another's certificate is no fault of the request, nor its client's business.
    return NodeUnavailable(details) if known is None or isinstance(known, PermissionDenied) else known
