"""Crowds that take what there is: clients that do not read, idle connections, watchers, large bodies, false tenants.
Beside them stands a load of clients with a key.

Each is a context: the crowd is there while the block runs. Addresses are ``host:port``. ``beside`` runs one in a
process of its own, where it does not hold up whoever measures. ``missing`` says what a crowd did not do that it came
for.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc.aio
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.nodes.listening import raise_open_files

SLOW_BUFFER, SLOW_SEGMENT = 4096, 536  # bytes: with both the kernels take 100 KB for a client that does not read
WATCHES_OF_CHANNEL = 64
PAUSE_S = 0.01  # after a refusal
BODY_BYTES = 8 * 2**20
HELD_S = 30.0  # that a client reads nothing: longer than ``read_timeout_s``, whose default is 15
UNREAD_TOKENS = 4000  # that it asks for: more than buffers on the way take
REST_S = 10.0  # for what it is told once it reads
GIVEN_UP = "given up"
END_S = 20.0  # for a crowd to leave


@dataclass
class Doors:
    """Where to, with whose key, and what the crowd was told."""

    grpc: str
    http: str
    key: Mapping[str, str]  # header of another tenant's key
    told: Counter[str] = field(default_factory=Counter)


async def _again_and_again(ask: Callable[[], Awaitable[str]], told: Counter[str]) -> None:
    while True:
        try:
            told[await ask()] += 1
        except (OSError, httpx.HTTPError) as error:
            told[type(error).__name__] += 1
        await asyncio.sleep(PAUSE_S)


@asynccontextmanager
async def _beside(tasks: list[asyncio.Task[None]]) -> AsyncIterator[None]:
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _post(path: str, key: Mapping[str, str], length: int) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: x", "content-type: application/json", f"content-length: {length}"]
    return "\r\n".join([*lines, *(f"{name}: {value}" for name, value in key.items()), "", ""]).encode()


@asynccontextmanager
async def non_readers(doors: Doors, count: int = 5) -> AsyncIterator[None]:
    """Long streams that nobody reads for HELD_S; then each client hears what became of its own, and comes again."""
    host, _, port = doors.http.rpartition(":")
    asked = {"prompt": "x", "max_tokens": UNREAD_TOKENS, "ignore_eos": True, "stream": True, "logprobs": 5}
    body = json.dumps(asked).encode()

    async def ask() -> str:
        asking, loop = socket.socket(), asyncio.get_running_loop()
        try:
            asking.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SLOW_BUFFER)
            asking.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SLOW_SEGMENT)
            asking.setblocking(False)
            await loop.sock_connect(asking, (host, int(port)))
            await loop.sock_sendall(asking, _post("/v1/completions", doors.key, len(body)) + body)
            doors.told["asked"] += 1
            await asyncio.sleep(HELD_S)
            return await _became(asking)
        finally:
            asking.close()

    async with _beside([asyncio.create_task(_again_and_again(ask, doors.told)) for _ in range(count)]):
        yield


async def _became(asking: socket.socket) -> str:
    """What a client is told that reads at last."""
    said = b""
    try:
        async with asyncio.timeout(REST_S):
            while part := await asyncio.get_running_loop().sock_recv(asking, 1 << 16):
                said += part
                if not said.startswith(b"HTTP/1.1 200"):
                    return said.partition(b"\r\n")[0].decode()
                if b"chunks waiting" in said:
                    return GIVEN_UP
                if b"[DONE]" in said:
                    return "served to its end"
    except TimeoutError:
        return "no end"
    return "cut off"


@asynccontextmanager
async def idle_sockets(doors: Doors, count: int = 1100) -> AsyncIterator[None]:
    """Connections to either door that say nothing."""
    made = []
    for number in range(count):
        host, _, port = (doors.http, doors.grpc)[number % 2].rpartition(":")
        with suppress(OSError):
            made.append(await asyncio.open_connection(host, int(port)))
    doors.told["connected"] += len(made)
    try:
        yield
    finally:
        doors.told["open to the end"] += sum(not reader.at_eof() for reader, _ in made)
        for _, writer in made:
            writer.close()


@asynccontextmanager
async def watchers(doors: Doors, count: int = 1024) -> AsyncIterator[None]:
    """Watches of the health service, which needs no key."""
    channels: list[Any] = []
    calls: list[Any] = []
    for number in range(count // WATCHES_OF_CHANNEL):
        channels.append(grpc.aio.insecure_channel(doors.grpc, [("grpc.channel_id", number)]))
        watch: Any = health_pb2_grpc.HealthStub(channels[-1]).Watch
        calls += [watch(health_pb2.HealthCheckRequest()) for _ in range(WATCHES_OF_CHANNEL)]

    async def read(call: Any) -> None:
        try:
            await call.read()
            doors.told["watches"] += 1
        except grpc.aio.AioRpcError as error:
            doors.told[error.code().name] += 1

    await asyncio.gather(*map(read, calls))
    try:
        yield
    finally:
        await asyncio.gather(*(channel.close() for channel in channels))


@asynccontextmanager
async def large_bodies(doors: Doors, count: int = 4096, at_once: int = 512) -> AsyncIterator[None]:
    """Bodies of 8 MiB, each sent as far as it is taken."""
    host, _, port = doors.http.rpartition(":")
    left = iter(range(count))

    async def ask() -> str:
        if next(left, None) is None:
            await asyncio.Event().wait()
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            doors.told["begun"] += 1
            writer.write(_post("/v1/completions", doors.key, BODY_BYTES))
            answer = asyncio.ensure_future(reader.readline())  # may come while the body is sent, which goes on
            with suppress(ConnectionError):
                for _ in range(BODY_BYTES // 65536):
                    writer.write(b" " * 65536)
                    await writer.drain()
            return (await answer).decode().strip()
        finally:
            writer.close()

    async with _beside([asyncio.create_task(_again_and_again(ask, doors.told)) for _ in range(at_once)]):
        yield


@asynccontextmanager
async def claiming(doors: Doors, count: int, has_key: bool) -> AsyncIterator[None]:
    """Clients that claim a tenant each. They have the key of one other tenant, or no key and made-up ones."""
    async with httpx.AsyncClient(base_url=f"http://{doors.http}", timeout=30.0) as client:

        async def ask(number: int) -> str:
            body = {"prompt": "x", "max_tokens": 64, "ignore_eos": True, "cache_salt": f"tenant-{number}"}
            false = {"authorization": f"Bearer pl-{number}"} if number % 2 else {}
            key = dict(doors.key) if has_key else false
            return str((await client.post("/v1/completions", json=body, headers=key)).status_code)

        tasks = [asyncio.create_task(_again_and_again(partial(ask, n), doors.told)) for n in range(count)]
        async with _beside(tasks):
            yield


@dataclass(frozen=True)
class Crowd:
    """How it comes, and what shows that it came. least: of what it is told, how often. window_s: it is there for."""

    come: Callable[[Doors], AbstractAsyncContextManager[None]]
    least: Mapping[str, int]
    window_s: float = 15.0


LOAD = "10 with a key"  # they generate as any client does, so their share of the cores is theirs
CROWDS: dict[str, Crowd] = {
    "5 that do not read": Crowd(non_readers, {"asked": 5, GIVEN_UP: 2}, 45.0),
    "1,100 idle connections": Crowd(idle_sockets, {"connected": 1100}),
    "1,024 watchers": Crowd(watchers, {"watches": 64, "RESOURCE_EXHAUSTED": 960}),
    "4,096 bodies of 8 MiB": Crowd(large_bodies, {"begun": 512, "HTTP/1.1 429 Too Many Requests": 256}, 45.0),
    "100 false tenants": Crowd(partial(claiming, count=100, has_key=False), {"401": 200}),
    LOAD: Crowd(partial(claiming, count=10, has_key=True), {"200": 50}),
}


def missing(name: str, told: Mapping[str, int]) -> dict[str, int]:
    """What shows that a crowd came and was told too seldom, and how often it was; empty when it came."""
    return {what: told.get(what, 0) for what, least in CROWDS[name].least.items() if told.get(what, 0) < least}


@asynccontextmanager
async def beside(name: str, doors: Doors) -> AsyncIterator[None]:
    """A crowd in a process of its own, there while the block runs; ``doors.told`` is counted at its end. It gets what
    time of the cores is left, since strangers have their own."""
    asks = [name, doors.grpc, doors.http, json.dumps(dict(doors.key))]
    command = ["nice", "-n", "19", sys.executable, "-m", __name__, *asks]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    try:
        assert process.stdout is not None
        assert await process.stdout.readline() == b"there\n"
        yield
        told, _ = await asyncio.wait_for(process.communicate(b"end"), END_S)
        doors.told.update(json.loads(told))
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _crowd(name: str, grpc_address: str, http_address: str, key: str) -> None:
    """Until stdin ends."""
    raise_open_files()
    doors = Doors(grpc_address, http_address, json.loads(key))
    async with CROWDS[name].come(doors):
        print("there", flush=True)
        await asyncio.to_thread(sys.stdin.read)
    print(json.dumps(doors.told), flush=True)


if __name__ == "__main__":
    asyncio.run(_crowd(*sys.argv[1:]))
