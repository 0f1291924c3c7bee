"""Paceline on hosts, brought up as an operator does it: ``ray up deploy/ray-cluster.yaml``, then ``paceline serve``."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from tests.multihost.client_process import SECRET
from tests.multihost.clients import Streams, Watch
from tests.multihost.hosts import Host, wait_until

DEPLOY = Path(__file__).parents[2] / "deploy"
RAY_UP_TIMEOUT_S = 150.0
READY_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 90.0


def ray_up(head: Host, workers: list[Host]) -> None:
    """Start Ray on all hosts over ssh, from the head, with the addresses put into the operator's file."""
    cluster = yaml.safe_load((DEPLOY / "ray-cluster.yaml").read_text())
    cluster["provider"] |= {"head_ip": head.address, "worker_ips": [host.address for host in workers]}
    file = head.folder / "ray-cluster.yaml"
    file.write_text(yaml.safe_dump(cluster))
    head.run("ray", "get-auth-token", "--generate")
    head.run("ray", "up", "-y", "--no-config-cache", str(file), timeout_s=RAY_UP_TIMEOUT_S)


@dataclass
class Deployment:
    """A running ``paceline serve`` on the head, and a watch on its nodes."""

    head: Host
    process: subprocess.Popen[str]
    grpc: str
    http: str
    log: Path
    watch: Watch

    def stream(self, requests: list[dict[str, Any]]) -> Streams:
        """Begin streams from a client on the head."""
        return Streams(self.head, self.grpc, requests)

    def wait_for(self, nodes: set[str], timeout_s: float) -> float:
        """Until the router has exactly these nodes; the seconds it took."""
        return wait_until(f"{nodes}, but {self.watch.nodes}", lambda: set(self.watch.nodes) == nodes, timeout_s)

    def events_since(self, offset: int, node: str) -> set[str]:
        """What the supervisor's log says of a node, from a byte of the log on."""
        return set(re.findall(rf"{node} generation \d+ (\w+)", self.log.read_bytes()[offset:].decode()))

    def retries(self) -> int:
        """Attempts that failed so far."""
        fetch = "import sys, urllib.request as web; print(web.urlopen(sys.argv[1], timeout=10).read().decode())"
        text = self.head.run("python", "-c", fetch, f"http://{self.http}/metrics")
        return sum(int(float(n)) for n in re.findall(r"^paceline_retries_total\{.*\} (\S+)$", text, re.M))


@contextmanager
def serve(head: Host, options: Mapping[str, Any]) -> Iterator[Deployment]:
    """Serve from ``deploy/serve.yaml`` with ``options`` over it; at the end Ctrl-C must end it with 0."""
    file, log, secret = head.folder / "serve.yaml", head.folder / "serve.log", head.folder / "secret"
    secret.write_text(SECRET)
    config = yaml.safe_load((DEPLOY / "serve.yaml").read_text()) | dict(options) | {"secret_file": str(secret)}
    file.write_text(yaml.safe_dump(config))
    command = ["env", "RAY_AUTH_MODE=token", "paceline", "serve", "--config", str(file), "--verbose"]
    with log.open("w") as errors:
        process = subprocess.Popen(head.command(*command), stdout=subprocess.PIPE, stderr=errors, text=True)
    try:
        grpc, http = _ready(process, log)
        watch = Watch(head, grpc)
        try:
            yield Deployment(head, process, grpc, http, log, watch)
        finally:
            watch.close()
        start = time.monotonic()
        _interrupt(head)
        assert process.wait(STOP_TIMEOUT_S) == 0, log.read_text()[-3000:]
        print(f"\nserve ended {time.monotonic() - start:.1f} s after Ctrl-C")
    except BaseException:
        print(log.read_text()[-8000:])
        raise
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def _ready(process: subprocess.Popen[str], log: Path) -> tuple[str, str]:
    """The addresses that a client on the head uses."""
    assert process.stdout is not None
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline and (line := process.stdout.readline()):
        if found := re.match(r"ready grpc=\S+:(\d+) http=\S+:(\d+)", line):
            return f"127.0.0.1:{found[1]}", f"127.0.0.1:{found[2]}"
    raise AssertionError(f"not ready: {log.read_text()[-3000:]}")


def _interrupt(head: Host) -> None:
    """Ctrl-C, to the process itself: it is in another pid namespace than the one that entered."""
    for process in head.processes():
        with suppress(psutil.Error):  # it ended, or is a zombie
            command = process.cmdline()
            if "serve" in command and any(part.endswith("/paceline") for part in command):
                process.send_signal(signal.SIGINT)
