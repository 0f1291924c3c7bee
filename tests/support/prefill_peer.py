"""A prefill engine in a process of its own, which tests may kill, and this process's handle on it.

    python -m tests.support.prefill_peer '{"control": PORT, "store": PATH, "link_id": ..., ...}'

The control stream is a socket on this host; data goes by gloo or NCCL, with the sentinel beside it, as between nodes.
Behaviours: ``serve``; ``hang`` announces the first bytes of a chunk and sends none of them.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import torch

HOST = "127.0.0.1"
JOIN_S = 120.0  # python, torch and CUDA start, kernels are compiled
NCCL_ENVIRONMENT = {  # two ranks on one device: each says it is a host of its own, sockets over loopback are the path
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_PROTO": "Simple",
    "NCCL_MAX_CTAS": "2",
}


@dataclass(frozen=True)
class PeerOptions:
    """What the child is told."""

    control: int  # port
    store: str  # path of a store in a file
    link_id: str
    backend: Literal["gloo", "nccl"]
    device: str
    behaviour: Literal["serve", "hang"]
    timeout_s: float  # of a message, and to join
    geometry: str
    runner: dict[str, object]  # NodeConfig's options


class PrefillPeer:
    """The child, and what it says. ``on_message`` gets the hand-off's control messages."""

    def __init__(self, options: dict[str, Any]) -> None:
        server = socket.create_server((HOST, 0))
        server.settimeout(1.0)
        told = PeerOptions(control=server.getsockname()[1], **options)
        paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | NCCL_ENVIRONMENT | {"NCCL_HOSTID": "prefill", "PYTHONPATH": os.pathsep.join(paths)}
        command = [sys.executable, "-m", "tests.support.prefill_peer", json.dumps(asdict(told))]
        self.process = subprocess.Popen(command, env=environment)
        with server:
            accepted = self._accept(server)
        accepted.setblocking(True)
        self._connection: Connection[Any, Any] = Connection(accepted.detach())
        self.first_tokens: queue.Queue[tuple[str, int]] = queue.Queue()
        self.digests: queue.Queue[tuple[str, str]] = queue.Queue()
        self.hanging = threading.Event()
        self.on_message: Callable[[bytes], None] = lambda message: None
        self._thread = threading.Thread(target=self._read, daemon=True)

    def _accept(self, server: socket.socket) -> socket.socket:
        deadline = time.monotonic() + JOIN_S
        while time.monotonic() < deadline and self.process.poll() is None:
            with suppress(TimeoutError):
                return server.accept()[0]
        self.kill()
        raise RuntimeError("the prefill process did not come")

    def start(self, on_message: Callable[[bytes], None]) -> None:
        """Begin to listen, once the receiver is there."""
        self.on_message = on_message
        self._thread.start()

    def prefill(self, request: Any, ticket: str, first_token: int) -> None:
        """Ask for a prompt."""
        self._connection.send(("prefill", request, ticket, first_token))

    def acknowledge(self, ack: bytes) -> None:
        """Pass an acknowledgement on; a child that is gone needs none."""
        try:
            self._connection.send(("ack", ack))
        except OSError:
            return

    def stop(self) -> int:
        """End in order; its exit code."""
        self._connection.send(("stop",))
        return self.process.wait(30)

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait(10)

    def _read(self) -> None:
        while True:
            try:
                said = self._connection.recv()
            except (EOFError, OSError):
                return
            match said[0]:
                case "message":
                    self.on_message(said[1])
                case "first token":
                    self.first_tokens.put(said[1:])
                case "digest":
                    self.digests.put(said[1:])
                case "hanging":
                    self.hanging.set()


# Long, because what it imports is for its own process alone, so that its helpers stand inside it.
def child(options: PeerOptions) -> None:
    """The process."""
    from kv_transfer.transports.base import Transport
    from kv_transfer.transports.registry import open_transport
    from kv_transfer.transports.rendezvous import torch_dist
    from kv_transfer.transports.sentinel import Sentinel
    from paceline.v1.handoff_pb2 import HandoffAck
    from tests.support.device_runner import device_runner
    from tests.support.two_engines import Prefill

    torch.set_num_threads(1)
    runner = device_runner(options.device, options.geometry, **options.runner)
    connection: Connection[Any, Any] = Connection(socket.create_connection((HOST, options.control)).detach())
    lock = threading.Lock()

    def say(*what: Any) -> None:
        with lock:
            connection.send(what)

    class Hanging(Transport):
        """Never sends what was announced."""

        def _send_message(self, data: torch.Tensor) -> None:
            say("hanging")
            threading.Event().wait(JOIN_S)

        def _recv_message(self, data: torch.Tensor) -> None:
            raise AssertionError("a prefill node receives nothing")

        def close(self) -> None:
            return

        abort = close

    store = torch_dist.FileStore(options.store)
    staging = torch.device(options.device if options.backend == "nccl" else "cpu")
    real = open_transport(options.backend, store, options.link_id, 0, HOST, options.timeout_s, staging)
    transport = Hanging() if options.behaviour == "hang" else real
    side = Prefill(runner, transport, lambda message: say("message", message.SerializeToString()), staging)
    sentinel = Sentinel(store, options.link_id, 0, HOST, options.timeout_s, side.sender.link_lost)

    def emit(ticket: str) -> Callable[[Any], None]:
        def told(event: Any) -> None:
            if event.HasField("first_token"):
                say("first token", ticket, event.first_token.token_id)
            else:  # handed off
                say("digest", ticket, side.sent[ticket])

        return told

    while (asked := connection.recv())[0] != "stop":
        if asked[0] == "ack":
            side.sender.acknowledge(HandoffAck.FromString(asked[1]))
        else:
            _, request, ticket, first_token = asked
            side.submit(request, ticket, first_token, emit(ticket))
    side.close()
    sentinel.close()


if __name__ == "__main__":
    child(PeerOptions(**json.loads(sys.argv[1])))
