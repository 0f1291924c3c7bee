"""HTTP as bytes: what is written to a connection, and the answers that are read from it."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field

MOST_WRITTEN_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class Reply:
    """One answer."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    whole: bool = True  # False: the connection ended within it


async def exchange(address: str, parts: tuple[bytes, ...], hang_up: bool, timeout_s: float) -> list[Reply]:
    """Write the parts, one at a time, and read until the server closes. hang_up: say that nothing more comes."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 26)
    try:
        async with asyncio.timeout(timeout_s):
            writing = asyncio.create_task(_write(writer, parts, hang_up))
            try:
                with contextlib.suppress(ConnectionError):
                    return parse_replies(await reader.read())
                return []
            finally:
                writing.cancel()
                await asyncio.gather(writing, return_exceptions=True)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def _write(writer: asyncio.StreamWriter, parts: tuple[bytes, ...], hang_up: bool) -> None:
    for part in parts:
        for at in range(0, len(part), MOST_WRITTEN_AT_ONCE):
            writer.write(part[at : at + MOST_WRITTEN_AT_ONCE])
            await writer.drain()
        await asyncio.sleep(0)
    if hang_up:
        writer.write_eof()


def parse_replies(data: bytes) -> list[Reply]:
    """All answers of a connection. Raises ValueError for what is none."""
    replies = []
    while data:
        head, end, rest = data.partition(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        version, _, status = lines[0].partition(" ")
        if not end or version != "HTTP/1.1":
            raise ValueError(f"no answer: {data[:200]!r}")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
        code = int(status[:3])
        if code == 100:
            data = rest
            continue
        body, data, whole = _body(headers, rest)
        replies.append(Reply(code, headers, body, whole))
    return replies


def _body(headers: dict[str, str], data: bytes) -> tuple[bytes, bytes, bool]:
    """The body, what follows it, and whether all of it is there."""
    if headers.get("transfer-encoding") == "chunked":
        return _chunked(data)
    if "content-length" not in headers:
        return data, b"", True
    size = int(headers["content-length"])
    return data[:size], data[size:], len(data) >= size


def _chunked(data: bytes) -> tuple[bytes, bytes, bool]:
    body = b""
    while True:
        line, end, rest = data.partition(b"\r\n")
        size = int(line, 16) if end else 0
        if not end or len(rest) < size + 2:
            return body, b"", False
        body, data = body + rest[:size], rest[size + 2 :]
        if not size:
            return body, data, True
