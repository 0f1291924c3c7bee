"""The deployment under test, a process each: a router with HTTP and gRPC in front of a prefill and a decode node, over
real Redis, gRPC and gloo, with a tiny model."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import httpx

from cluster.state.embedded_redis import EmbeddedRedis
from paceline.v1 import common_pb2, inference_pb2, inference_pb2_grpc, node_pb2, node_pb2_grpc
from tests.fuzz.honest import Honest
from tests.multihost.small_model import write_model
from tests.support.tiny_chat import CHAT_VOCAB
from tests.support.tiny_model import tiny_spec

SCRIPT = Path(__file__).with_name("process.py")
ROOT = SCRIPT.parents[2]
START_S = 120.0
STOP_S = 30.0
FAULT_LINES = 25  # that are shown after one in a log
REST_S = 40.0  # until a node has given everything back: above its deadlines for hand-offs that nobody makes
GOOD_PROMPT, GOOD_TOKENS, GOOD_SEED = "In a paceline the front rider", 24, 20


@dataclass
class Deployment:
    """All processes run."""

    processes: dict[str, subprocess.Popen[str]]
    logs: dict[str, Path]
    grpc: str
    http: str
    nodes: dict[str, str]  # role -> address
    honest: Honest  # clients that mean well
    answer: tuple[int, ...] = field(default=())  # to the good request

    def alive(self) -> None:
        """No process has ended."""
        dead = {name: process.poll() for name, process in self.processes.items() if process.poll() is not None}
        assert not dead, f"dead: {dead}\n{self.log_tails()}"

    def good(self) -> tuple[int, ...]:
        """Tokens of the good request, over gRPC and HTTP alike."""
        sampling = common_pb2.SamplingParams(temperature=1.0, seed=GOOD_SEED, max_tokens=GOOD_TOKENS, ignore_eos=True)
        asked = inference_pb2.GenerateRequest(text=GOOD_PROMPT, sampling=sampling)
        with grpc.insecure_channel(self.grpc) as channel:
            (choice,) = inference_pb2_grpc.InferenceStub(channel).Generate(asked, timeout=30).choices
        assert (choice.completion.nodes.prefill, choice.completion.nodes.decode) == ("prefill-0", "decode-0")
        body: dict[str, Any] = {"prompt": GOOD_PROMPT, "seed": GOOD_SEED, "max_tokens": GOOD_TOKENS}
        reply = httpx.post(f"http://{self.http}/v1/completions", json=body | {"ignore_eos": True}, timeout=30)
        assert reply.status_code == 200, reply.text
        assert tuple(reply.json()["paceline"]["token_ids"][0]) == tuple(choice.token_ids)
        return tuple(choice.token_ids)

    def check(self) -> None:
        """Every process lives, and the good request has the answer that it had before anything was sent."""
        self.alive()
        assert self.good() == self.answer, self.log_tails()

    def at_rest(self) -> None:
        """Soon no request is left anywhere and every page is free; books whole."""
        end = time.monotonic() + REST_S
        while left := self._left():
            assert time.monotonic() < end, f"{left}\n{self.log_tails()}"
            time.sleep(0.2)

    def _left(self) -> list[str]:
        left = []
        for role, address in self.nodes.items():
            status = self.node_status(role, address)
            assert status.integrity == "", status.integrity
            node = status.node
            if status.held or node.running or node.waiting or node.free_pages != node.total_pages:
                left.append(f"{role}: {status.held} held, {node}")
        for line in httpx.get(f"http://{self.http}/metrics", timeout=10).text.splitlines():
            if line.startswith(("paceline_requests_running ", "paceline_requests_queued ")) and float(line.split()[1]):
                left.append(line)
        return left

    @staticmethod
    def node_status(role: str, address: str) -> node_pb2.StatusResponse:
        """What a node says of itself."""
        with grpc.insecure_channel(address) as channel:
            stub: Any = (node_pb2_grpc.DecodeNodeStub if role == "decode" else node_pb2_grpc.PrefillNodeStub)(channel)
            status: node_pb2.StatusResponse = stub.Status(node_pb2.StatusRequest(), timeout=10)
        return status

    def log_tails(self) -> str:
        """The end of every process's log."""
        return "\n".join(f"--- {name}\n{_read(path)[-3000:]}" for name, path in self.logs.items())

    def faults_logged(self) -> list[str]:
        """Errors and tracebacks in the logs: none belongs to a message that was merely wrong."""
        found = []
        for name, path in self.logs.items():
            text = _read(path).splitlines()
            starts = [at for at, line in enumerate(text) if " ERROR " in line or line.startswith("Traceback")]
            found += ["\n".join([f"{name}: {text[at]}", *text[at + 1 : at + 1 + FAULT_LINES]]) for at in starts]
        return found


def _read(log: Path) -> str:
    """gRPC's own lines quote what strangers sent, whatever its bytes are."""
    return log.read_text(errors="replace")


@contextmanager
def deployment() -> Iterator[Deployment]:
    """Started; at the end every process stops when asked to."""
    with tempfile.TemporaryDirectory(prefix="paceline-fuzz-") as name, EmbeddedRedis() as redis:
        folder = Path(name)
        spec = replace(tiny_spec(CHAT_VOCAB), max_position_embeddings=512)
        write_model(folder / "tiny", spec)
        processes, logs = {}, {}
        for role in ("prefill", "decode", "router"):
            logs[role] = folder / f"{role}.log"
            processes[role] = _start(role, str(folder / "tiny"), redis.url, logs[role])
        made = Deployment(processes, logs, "", "", {}, Honest(folder / "honest.log"))
        try:
            made.nodes = {role: _line(made, role) for role in ("prefill", "decode")}
            router = processes["router"]
            assert router.stdin is not None
            router.stdin.write("\n")
            router.stdin.flush()
            made.grpc, made.http = _line(made, "router").split()
            made.answer = made.good()
            yield made
            made.alive()
        finally:
            made.honest.close()
            _stop(made)


def _start(role: str, folder: str, url: str, log: Path) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with log.open("w") as errors:
        return subprocess.Popen(
            [sys.executable, str(SCRIPT), role, folder, url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
        )


def _line(made: Deployment, role: str) -> str:
    process, end = made.processes[role], time.monotonic() + START_S
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    assert line, f"{role} did not start\n{made.log_tails()}"
    assert time.monotonic() < end
    return line


def _stop(made: Deployment) -> None:
    for role in ("router", "prefill", "decode"):
        process = made.processes[role]
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
    for role, process in made.processes.items():
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            print(f"{role} had to be killed\n{made.log_tails()}")
            raise
        finally:
            assert process.stdout is not None
            process.stdout.close()
