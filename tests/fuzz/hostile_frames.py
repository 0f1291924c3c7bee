"""Frames that no honest peer writes: HTTP/2 under gRPC, HTTP/1.1, and TLS. Each maker gives the frames of a connection.

None of them is a request: whatever of it is handled is a fault. The requests that smuggling hides are well formed, so
that a server that sees them answers them.
"""

from __future__ import annotations

import asyncio
import random
import ssl
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress

Maker = Callable[[random.Random], list[bytes]]

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST, SETTINGS, PUSH, PING, GOAWAY, WINDOW, CONTINUATION = range(10)
END_STREAM, END_HEADERS = 0x1, 0x4
HIDDEN_BODY = b'{"prompt": "smuggled", "max_tokens": 4}'
HIDDEN = (
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
    % (
        len(HIDDEN_BODY),
        HIDDEN_BODY,
    )
)
READ_S = 0.2  # for what a server says to it
METHODS = ("Decode", "Pair", "Handoff", "Status", "Trace", "Recall")


def frame(kind: int, flags: int, stream: int, payload: bytes, length: int | None = None) -> bytes:
    """One of HTTP/2. length: that it says, where that is not the payload's."""
    size = len(payload) if length is None else length
    return struct.pack(">I", size)[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def headers_block(path: str) -> bytes:
    """The headers of a gRPC call: literals without indexing, not compressed."""
    fields = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "x"}
    fields |= {"content-type": "application/grpc", "te": "trailers"}
    return b"".join(_literal(name.encode(), value.encode()) for name, value in fields.items())


def _literal(name: bytes, value: bytes) -> bytes:
    return b"\x00" + b"".join(_length(len(part)) + part for part in (name, value))


def _length(value: int) -> bytes:
    if value < 127:
        return bytes((value,))
    found, value = bytearray((127,)), value - 127
    while value >= 128:
        found.append(value % 128 + 128)
        value //= 128
    return bytes((*found, value))


def begin() -> list[bytes]:
    """What every HTTP/2 client says first."""
    return [PREFACE + frame(SETTINGS, 0, 0, b"")]


# -- HTTP/2 -------------------------------------------------------------------------------------------------------


def random_frames(rng: random.Random) -> list[bytes]:
    """Frames of every type, at every stream, with any payload."""
    return begin() + [
        frame(
            rng.randrange(12), rng.randrange(256), rng.choice((0, 1, 2, 3, 2**31 - 1)), rng.randbytes(rng.randrange(64))
        )
        for _ in range(24)
    ]


def noise(rng: random.Random) -> list[bytes]:
    """No HTTP/2 at all, or only its first line."""
    return [*(begin() if rng.random() < 0.5 else []), *(rng.randbytes(rng.randrange(1, 400)) for _ in range(4))]


def half_frame(rng: random.Random) -> list[bytes]:
    """It says more than it brings."""
    kind, payload = rng.choice((DATA, HEADERS, SETTINGS)), rng.randbytes(rng.randrange(40))
    return [*begin(), frame(kind, END_HEADERS, 1, payload, rng.choice((16384, 2**24 - 1)))]


def endless_headers(rng: random.Random) -> list[bytes]:
    """A block that goes on and on."""
    first = frame(HEADERS, 0, 1, headers_block("/paceline.v1.Inference/Generate"))
    more = [frame(CONTINUATION, 0, 1, _literal(b"x-%d" % i, b"a" * 8000)) for i in range(40)]
    return [*begin(), first, *more]


def header_bomb(rng: random.Random) -> list[bytes]:
    """One large field, put into the table and named again and again."""
    large = b"\x40" + _length(3) + b"x-y" + _length(3500) + b"a" * 3500
    return [*begin(), frame(HEADERS, END_HEADERS, 1, headers_block("/x") + large + b"\xbe" * 12000)]


def rapid_resets(rng: random.Random) -> list[bytes]:
    """Streams that are opened and reset at once."""
    block = headers_block(rng.choice(("/paceline.v1.Inference/Generate", "/paceline.v1.DecodeNode/Decode")))
    streams = range(1, 60, 2)
    return begin() + [frame(HEADERS, END_HEADERS, i, block) + frame(RST, 0, i, struct.pack(">I", 8)) for i in streams]


def floods(rng: random.Random) -> list[bytes]:
    """What a server answers each, or keeps account of."""
    kind, payload = rng.choice(
        ((PING, bytes(8)), (SETTINGS, struct.pack(">HI", rng.randrange(9), rng.randrange(2**32))), (PRIORITY, bytes(5)))
    )
    return begin() + [frame(kind, 0, 1 if kind == PRIORITY else 0, payload) for _ in range(60)]


def windows(rng: random.Random) -> list[bytes]:
    """Windows above all bounds, and of nothing."""
    return begin() + [
        frame(WINDOW, 0, rng.choice((0, 1)), struct.pack(">I", rng.choice((0, 2**31 - 1)))) for _ in range(8)
    ]


def long_messages(rng: random.Random) -> list[bytes]:
    """A call of any method whose message says that it is larger than it is, or is noise."""
    service = rng.choice(("Inference/Generate", *(f"DecodeNode/{name}" for name in METHODS), "PrefillNode/Prefill"))
    said = rng.choice((0, 17, 2**31, 2**32 - 1))
    message = bytes((rng.choice((0, 1, 255)),)) + struct.pack(">I", said) + rng.randbytes(17)
    opened = frame(HEADERS, END_HEADERS, 1, headers_block(f"/paceline.v1.{service}"))
    return [*begin(), opened, frame(DATA, rng.choice((0, END_STREAM)), 1, message)]


def wrong_messages(rng: random.Random) -> list[bytes]:
    """Calls of every method, each with bytes that are no message of it."""
    services = ("Inference/Generate", *(f"DecodeNode/{name}" for name in METHODS), "PrefillNode/Status")
    calls = begin()
    for stream, service in enumerate(services):
        opened = frame(HEADERS, END_HEADERS, 2 * stream + 1, headers_block(f"/paceline.v1.{service}"))
        data = b"\x00" + struct.pack(">I", 17) + b"\xff" * 17
        calls.append(opened + frame(DATA, END_STREAM, 2 * stream + 1, data))
    return calls


HTTP2: tuple[Maker, ...] = (
    *(random_frames, noise, half_frame, endless_headers, header_bomb, rapid_resets, floods, windows, long_messages),
    wrong_messages,
)

# -- HTTP/1.1 -----------------------------------------------------------------------------------------------------

POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
SMUGGLING = (
    b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n5c\r\n" + HIDDEN,
    b"transfer-encoding: chunked\r\ncontent-length: 6\r\n\r\n0\r\n\r\n" + HIDDEN,
    b"content-length: 6\r\ncontent-length: 5\r\n\r\n{}    " + HIDDEN,
    b"content-length: +6\r\n\r\n{}    " + HIDDEN,
    b"content-length: 0x6\r\n\r\n{}    " + HIDDEN,
    b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    b"transfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n" + HIDDEN,
    b"transfer-encoding:\x0bchunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    b"transfer-encoding : chunked\r\n\r\n0\r\n\r\n" + HIDDEN,
    b"transfer-encoding: chunked\r\n\r\n-1\r\n" + HIDDEN,
    b"transfer-encoding: chunked\r\n\r\nffffffffffffffff\r\n" + HIDDEN,
    b"transfer-encoding: chunked\r\n\r\n3\r\n{}\n" + HIDDEN,
    b"x: a\x00b\r\n\r\n" + HIDDEN,
    b"x: a\r\n y\r\ncontent-length : 3\r\n\r\n" + HIDDEN,
    b"content-length: 999999999999\r\n\r\n" + HIDDEN,
)


def smuggling(rng: random.Random) -> list[bytes]:
    """A request in what may be taken for the body of another."""
    return [POST + rng.choice(SMUGGLING)]


def broken_heads(rng: random.Random) -> list[bytes]:
    """Heads that are too long, cut off, or none."""
    shapes = (
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        POST + b"x-large: " + b"a" * 200_000 + b"\r\n\r\n",
        POST + b"".join(b"x-%d: y\r\n" % i for i in range(5000)) + b"\r\n",
        POST[: rng.randrange(len(POST))],
        b"GET /health HTTP/9.9\r\n\r\n",
        b"\r\n" * 500 + rng.randbytes(100),
        bytes(range(256)),
    )
    return [rng.choice(shapes)]


HTTP1: tuple[Maker, ...] = (smuggling, broken_heads, noise)

# -- TLS ----------------------------------------------------------------------------------------------------------


def tls_records(rng: random.Random) -> list[bytes]:
    """Records of any type, and the beginning of a handshake that says to be longer."""
    hello = b"\x01\x00\xff\xff\x03\x03" + rng.randbytes(60)
    shapes = [bytes((rng.choice((20, 21, 22, 23, 24, 99)), 3, rng.randrange(5))) for _ in range(6)]
    records = [shape + struct.pack(">H", rng.choice((16, 16384, 65535))) + rng.randbytes(16) for shape in shapes]
    return [b"\x16\x03\x01" + struct.pack(">H", len(hello)) + hello, *records]


def some(makers: Sequence[Maker], number: int, seed: int) -> list[bytes]:
    """The frames of connection ``number``."""
    rng = random.Random(f"{seed}/{number}")
    return makers[number % len(makers)](rng)


async def throw(address: str, frames: Sequence[bytes], context: ssl.SSLContext | None = None, name: str = "") -> int:
    """Write frames until the server hangs up; how many were written."""
    host, _, port = address.rpartition(":")
    written = 0
    with suppress(ConnectionError, ssl.SSLError, TimeoutError, OSError):
        async with asyncio.timeout(10):
            reader, writer = await asyncio.open_connection(host, int(port), ssl=context, server_hostname=name or None)
            try:
                for one in frames:
                    if writer.transport.is_closing():
                        break
                    writer.write(one)
                    await writer.drain()
                    written += 1
                with suppress(TimeoutError):
                    async with asyncio.timeout(READ_S):
                        while await reader.read(1 << 16):
                            pass
            finally:
                writer.close()
    return written
