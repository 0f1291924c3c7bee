"""The rendezvous store of links: a small key-value server on the decode node, seen by torch as a store.

Two ends of a link exchange their addresses through it, once; nothing else. torch's own TCPStore is not used: for every
connection it asks the DNS for the peer's name, which stalls all rendezvous for 5 s whenever an answer is lost, and it
listens on every interface.

One operation is one connection: a line of JSON there, a line of JSON back.
"""

from __future__ import annotations

import json
import socket
import socketserver
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist

from kv_transfer.transports.base import Rank, TransportError

MAX_LINE = 64 * 1024  # bytes of one request or answer
MAX_KEYS = 65536
MAX_WAIT_S = 120.0
MAX_CONNECTIONS = 256  # requests served at once; more are refused

torch_dist: Any = dist  # torch's type stubs name neither stores nor the options of a group


class _Table:
    """The keys of one server. Waits are bounded by the caller."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._cond = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        with self._cond:
            if key not in self._values and len(self._values) >= MAX_KEYS:
                raise ValueError(f"the store holds {MAX_KEYS} keys already")
            self._values[key] = value
            self._cond.notify_all()

    def get(self, key: str, timeout_s: float) -> bytes:
        deadline = time.monotonic() + min(timeout_s, MAX_WAIT_S)
        with self._cond:
            while key not in self._values:
                if (remaining := deadline - time.monotonic()) <= 0:
                    raise TimeoutError(f"nobody set {key} within {timeout_s:g} s")
                self._cond.wait(remaining)
            return self._values[key]

    def add(self, key: str, amount: int) -> int:
        with self._cond:
            total = int(self._values.get(key, b"0")) + amount
            self.set(key, str(total).encode())
            return total

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """c10d's rule: an absent key is set when ``expected`` is empty."""
        with self._cond:
            present = self._values.get(key)
            if present == expected or (present is None and not expected):
                self.set(key, desired)
                return desired
            return expected if present is None else present

    def delete(self, key: str, is_prefix: bool) -> int:
        with self._cond:
            gone = [k for k in self._values if k == key or (is_prefix and k.startswith(key))]
            for name in gone:
                del self._values[name]
            return len(gone)

    def count(self) -> int:
        with self._cond:
            return len(self._values)


def _answer(table: _Table, request: dict[str, Any]) -> Any:
    """Do one request; the answer's JSON value."""
    key = str(request["key"])
    match request["op"]:
        case "set":
            table.set(key, bytes.fromhex(request["value"]))
            return None
        case "get":
            return table.get(key, float(request["timeout_s"])).hex()
        case "add":
            return table.add(key, int(request["value"]))
        case "compare_set":
            return table.compare_set(key, bytes.fromhex(request["expected"]), bytes.fromhex(request["value"])).hex()
        case "delete":
            return table.delete(key, bool(request["is_prefix"]))
        case "count":
            return table.count()
        case other:
            raise ValueError(f"unknown operation {other!r}")


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, host: str, port: int) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.table = _Table()
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__((host, port), _Handler)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        return self._free.acquire(blocking=False)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hung up or sent nothing in time is its own business."""


class _Handler(socketserver.StreamRequestHandler):
    timeout = 10.0  # of reading the request and writing the answer

    def handle(self) -> None:
        line = self.rfile.readline(MAX_LINE)
        try:
            answer = {"ok": _answer(cast(_Server, self.server).table, json.loads(line))}
        except (ValueError, KeyError, TypeError, TimeoutError) as error:
            answer = {"error": str(error)}
        self.wfile.write(json.dumps(answer).encode() + b"\n")


class Store(torch_dist.Store):  # type: ignore[misc]
    """A client of the server at ``host``:``port``; the master runs the server too, until `close`.

    Thread-safe; a wait of one thread delays no other. Methods are torch's ``Store`` interface; they raise RuntimeError
    when the server cannot be reached or a wait runs out, as torch expects.
    """

    def __init__(self, host: str, port: int, is_master: bool, timeout_s: float) -> None:
        super().__init__()
        self._server = _Server(host, port) if is_master else None
        self._host = host
        self._port = port if self._server is None else self._server.server_address[1]
        self._timeout_s = timeout_s
        if self._server is not None:
            thread = threading.Thread(
                target=self._server.serve_forever, args=(0.1,), name="rendezvous-store", daemon=True
            )
            thread.start()

    @property
    def port(self) -> int:
        """The port of the server."""
        return self._port

    @property
    def timeout(self) -> timedelta:
        """How long `get` and `wait` wait."""
        return timedelta(seconds=self._timeout_s)

    def set_timeout(self, timeout: timedelta) -> None:
        """Change how long `get` and `wait` wait."""
        self._timeout_s = timeout.total_seconds()

    def close(self) -> None:
        """Stop the server (master only); otherwise it ends with the last reference to the store."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()

    def __del__(self) -> None:
        # At interpreter exit the server's thread no longer runs: waiting for it would never end.
        if getattr(self, "_server", None) is not None and not sys.is_finalizing():
            self.close()

    def set(self, key: str, value: bytes | str) -> None:
        """Set a key."""
        self._ask(op="set", key=key, value=_bytes(value).hex())

    def get(self, key: str) -> bytes:
        """The value of a key; waits for it, at most the timeout."""
        return bytes.fromhex(self._ask(op="get", key=key, timeout_s=self._timeout_s))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until every key is set. RuntimeError when the timeout runs out."""
        limit = self._timeout_s if timeout is None else timeout.total_seconds()
        for key in keys:
            self._ask(limit, op="get", key=key, timeout_s=limit)

    def check(self, keys: list[str]) -> bool:
        """Whether every key is set now."""
        try:
            self.wait(keys, timedelta(0))
        except RuntimeError:
            return False
        return True

    def add(self, key: str, amount: int) -> int:
        """Add to the number at a key; returns the sum."""
        return int(self._ask(op="add", key=key, value=amount))

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        """Set a key to ``desired`` where it is ``expected``; returns what it is then."""
        expected, desired = _bytes(expected).hex(), _bytes(desired).hex()
        return bytes.fromhex(self._ask(op="compare_set", key=key, expected=expected, value=desired))

    def delete_key(self, key: str) -> bool:
        """Delete a key. False when it was not set."""
        return bool(self._ask(op="delete", key=key, is_prefix=False))

    def delete_prefix(self, prefix: str) -> int:
        """Delete every key that starts with ``prefix``; how many."""
        return int(self._ask(op="delete", key=prefix, is_prefix=True))

    def num_keys(self) -> int:
        """How many keys are set."""
        return int(self._ask(op="count", key=""))

    def clone(self) -> Store:
        """Another client of the same server."""
        return Store(self._host, self._port, False, self._timeout_s)

    def _ask(self, wait_s: float | None = None, **request: object) -> Any:
        limit = self._timeout_s if wait_s is None else wait_s
        try:
            # The server ends a wait by itself; the margin lets its answer arrive.
            with socket.create_connection((self._host, self._port), timeout=limit + 5.0) as connection:
                connection.sendall(json.dumps(request).encode() + b"\n")
                with connection.makefile("rb") as stream:
                    answer = json.loads(stream.readline(MAX_LINE) or b"{}")
        except (OSError, ValueError) as error:
            raise RuntimeError(f"rendezvous store at {self._host}:{self._port}: {error}") from error
        if "ok" not in answer:
            raise RuntimeError(f"rendezvous store: {answer.get('error', 'no answer')}")
        return answer["ok"]


def _bytes(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def create_store(host: str, port: int, is_master: bool, timeout_s: float) -> Store:
    """The rendezvous store of links. The master (the decode node) listens on ``host`` alone; with port 0 on a free port
    (``store.port`` says which). TransportError when it cannot be reached."""
    try:
        store = Store(host, port, is_master, timeout_s)
        if not is_master:
            store.num_keys()
    except (RuntimeError, OSError) as error:
        raise TransportError(f"rendezvous store at {host}:{port}: {error}") from error
    return store


def forget_keys(store: Store, prefix: str, rank: Rank) -> None:
    """Delete a link's rendezvous keys; the decode node does it, whose own process hosts the store."""
    if rank == 1:
        with suppress(RuntimeError):
            store.delete_prefix(f"{prefix}/")
