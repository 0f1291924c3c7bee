"""How the two ends of a link find each other: each end's store, whose keys cross on the link's control stream.

torch builds a process group over a store, at which the ranks leave their addresses for each other. A store here belongs
to one end of one link and lives in memory. What this end sets is told to the peer over the control stream, which is
gRPC and knows who the peer is; what the peer sets comes the same way. There is no server and no port.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

MAX_KEYS = 64  # of one link; a pipe and a sentinel take 5, each lane of several ranks 3
MAX_KEY_CHARS = 1024
MAX_VALUE_BYTES = 16 * 1024

torch_dist: Any = dist  # torch's type stubs name neither stores nor the options of a group


class LinkStore(torch_dist.Store):  # type: ignore[misc]
    """One end's store. Methods but ``receive`` and ``close`` are what a process group of torch calls; they raise
    RuntimeError when a wait runs out or the store is closed, as torch expects. Thread-safe.

    ``tell(key, value)``: puts what this end sets on the control stream; thread-safe, never blocks.
    ``timeout_s``: of a wait for the peer.
    """

    def __init__(self, tell: Callable[[str, bytes], None], timeout_s: float) -> None:
        super().__init__()
        self._tell = tell
        self._timeout_s = timeout_s
        self._values: dict[str, bytes] = {}
        self._peers: list[str] = []  # keys that the peer set
        self._relays: list[tuple[str, Callable[[str, bytes], None]]] = []
        self._closed: str | None = None
        self._changed = threading.Condition()

    def receive(self, key: str, value: bytes) -> None:
        """The peer set a key. ValueError when that is not what a peer of ours does: it is set already, or too large."""
        if len(key) > MAX_KEY_CHARS or len(value) > MAX_VALUE_BYTES:
            raise ValueError(f"a rendezvous key of {len(key)} characters and {len(value)} bytes")
        with self._changed:
            if key in self._values:
                raise ValueError("a rendezvous key was set twice")
            self._put(key, value)
            self._peers.append(key)
            relays = [relay for prefix, relay in self._relays if key.startswith(prefix)]
        for relay in relays:
            relay(key, value)

    def relay(self, prefix: str, relay: Callable[[str, bytes], None]) -> None:
        """Pass what the peer sets under ``prefix``, now or before, to who needs it. ``relay`` must not block."""
        with self._changed:
            self._relays.append((prefix, relay))
            known = [(key, self._values[key]) for key in self._peers if key.startswith(prefix)]
        for key, value in known:
            relay(key, value)

    def close(self, reason: str) -> None:
        """Nothing comes from the peer any more: end the waits. Idempotent."""
        with self._changed:
            self._closed = self._closed or reason
            self._changed.notify_all()

    @property
    def timeout(self) -> timedelta:
        """How long `get` and `wait` wait."""
        return timedelta(seconds=self._timeout_s)

    def set_timeout(self, timeout: timedelta) -> None:
        """Change how long `get` and `wait` wait."""
        self._timeout_s = timeout.total_seconds()

    def set(self, key: str, value: bytes | str) -> None:
        """Set a key, here and at the peer."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        with self._changed:
            self._put(key, data)
        self._tell(key, data)

    def get(self, key: str) -> bytes:
        """The value of a key; waits for it, at most the timeout."""
        return self._await(key, self._timeout_s)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until every key is set."""
        deadline = time.monotonic() + (self._timeout_s if timeout is None else timeout.total_seconds())
        for key in keys:
            self._await(key, deadline - time.monotonic())

    def check(self, keys: list[str]) -> bool:
        """Whether every key is set now."""
        with self._changed:
            return all(key in self._values for key in keys)

    def num_keys(self) -> int:
        """How many keys are set."""
        with self._changed:
            return len(self._values)

    def _put(self, key: str, value: bytes) -> None:
        if len(self._values) >= MAX_KEYS:
            raise ValueError(f"a link's rendezvous holds {MAX_KEYS} keys already")
        self._values[key] = value
        self._changed.notify_all()

    def _await(self, key: str, timeout_s: float) -> bytes:
        with self._changed:
            self._changed.wait_for(lambda: key in self._values or self._closed is not None, timeout_s)
            if key not in self._values:
                raise RuntimeError(self._closed or f"the peer did not tell {key} within {timeout_s:g} s")
            return self._values[key]


def store_pair(timeout_s: float) -> tuple[LinkStore, LinkStore]:
    """The stores of both ends of a link within one process: rank 0's, then rank 1's."""
    first = LinkStore(lambda key, value: second.receive(key, value), timeout_s)
    second = LinkStore(first.receive, timeout_s)
    return first, second
