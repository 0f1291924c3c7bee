"""What clients on a host see, as it comes: streams, and the nodes that the router has."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from tests.multihost.hosts import Host, wait_until

CLIENT = Path(__file__).with_name("client_process.py")

CLOSE_TIMEOUT_S = 10.0


class _Client:
    """A client process and the thread that reads it."""

    def __init__(self, host: Host, address: str, *arguments: str) -> None:
        self._log = host.folder / "client.log"
        with self._log.open("ab") as errors:
            self.process = subprocess.Popen(
                host.command(sys.executable, str(CLIENT), address, *arguments),
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self._reader = threading.Thread(target=self._read, name="client", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.take(json.loads(line))

    def take(self, event: dict[str, Any]) -> None:
        """One line of the client's."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End the client. Idempotent."""
        self.process.kill()
        self.process.wait()
        self._reader.join(CLOSE_TIMEOUT_S)
        assert not self._reader.is_alive()

    @property
    def errors(self) -> str:
        return self._log.read_text()[-3000:]


class Watch(_Client):
    """The router's view of its nodes, and what its decode nodes say that they run."""

    def __init__(self, host: Host, address: str) -> None:
        self.nodes: dict[str, str] = {}  # id -> host:port
        self.running: dict[str, int] = {}  # decode node's id -> streams that it counted after ``asked_at``
        self.asked_at = 0.0  # monotonic clock
        super().__init__(host, address)

    def take(self, event: dict[str, Any]) -> None:
        self.nodes, self.running, self.asked_at = event["nodes"], event["running"], event["at"]

    def on(self, host: Host) -> str:
        """The node that serves on a host; empty without one."""
        return next((node for node, at in self.nodes.items() if at.rpartition(":")[0] == host.address), "")


@dataclass
class Stream:
    """One stream."""

    tokens: list[int] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)  # of chunks, monotonic clock
    misplaced: list[str] = field(default_factory=list)  # chunks that did not go on where the last one ended
    end: dict[str, Any] | None = None

    def silence_s(self, since: float) -> float:
        """The longest time without a chunk, of those that ended after ``since``."""
        pairs = zip(self.arrivals, self.arrivals[1:], strict=False)
        return max((b - a for a, b in pairs if b >= since), default=0.0)


class Streams(_Client):
    """Streams in progress, all begun together."""

    def __init__(self, host: Host, address: str, requests: Sequence[dict[str, Any]]) -> None:
        self.streams = [Stream() for _ in requests]
        with tempfile.NamedTemporaryFile("w", dir=host.folder, suffix=".json", delete=False) as file:
            json.dump(list(requests), file)
        super().__init__(host, address, file.name)

    def take(self, event: dict[str, Any]) -> None:
        stream = self.streams[event["stream"]]
        if (end := event.get("end")) is not None:
            stream.end = end
            return
        if event["first_index"] != len(stream.tokens):
            stream.misplaced.append(f"{event['first_index']} after {len(stream.tokens)} tokens")
        stream.tokens += event["token_ids"]
        stream.arrivals.append(event["at"])

    def wait_for(self, num_tokens: int, timeout_s: float = 60.0) -> None:
        """Until every stream has so many tokens."""
        wait_until(f"{num_tokens} tokens of each: {self.errors}", lambda: self._has(num_tokens), timeout_s)

    def _has(self, num_tokens: int) -> bool:
        assert self.process.poll() in (None, 0), self.errors
        return all(len(stream.tokens) >= num_tokens for stream in self.streams)

    @property
    def under_way(self) -> int:
        """Streams that have not ended."""
        return sum(stream.end is None for stream in self.streams)

    def results(self, timeout_s: float = 90.0) -> list[Stream]:
        """All of them, complete, each token once."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            counts = [len(stream.tokens) for stream in self.streams]
            raise AssertionError(f"streams did not end in {timeout_s:g} s: {counts}\n{self.errors}") from None
        finally:
            self.close()
        assert code == 0, self.errors
        assert [stream.misplaced for stream in self.streams] == [[]] * len(self.streams)
        assert self.under_way == 0
        return self.streams
