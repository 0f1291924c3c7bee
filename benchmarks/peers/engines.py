"""What `benchmarks.peers.widths` compares: engines with weights of a width, each asked the same groups of requests.

Paceline and llama.cpp are servers that one HTTP client asks. OpenVINO has no server on the package index and runs
`benchmarks.peers.openvino_worker`. An engine starts for one round and ends with it, so that it runs alone.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers import openvino_worker, servers
from benchmarks.serving.client import Limits, Outcome, Server, drive, served_model
from benchmarks.serving.deployments import Setting, deployments
from benchmarks.serving.workload import Ask
from paceline.errors import ConfigError
from paceline.models.config import ModelSpec

GGUF_TYPES = ("Q8_0", "Q4_0", "Q4_1")
Q4_K, SUPER_BLOCK = "Q4_K", 256  # a type that takes so many weights of a row together
WORKER_TIMEOUT_S = 600.0
LIMITS = Limits(outstanding=servers.SLOTS, deadline_s=300.0)
ERROR_CHARACTERS = 300
BITS = {"bf16": 16, "w8a8": 8, "Q8_0": 8, "int8": 8, "w4a8": 4, "Q4_0": 4, "Q4_1": 4, Q4_K: 4, "int4": 4}
# OpenVINO's weights, and what it computes in. With f32 it may round the inputs of its layers to int8.
OPENVINO = {
    "bf16": ("bf16", "bf16"),
    "int8": ("int8", "bf16"),
    "int8, f32": ("int8", "f32"),
    "int4": ("int4", "bf16"),
    "int4, f32": ("int4", "f32"),
}

Groups = Sequence[Sequence[Ask]]  # of requests that are sent side by side, group after group


@dataclass(frozen=True)
class Timing:
    """One request, as it came back."""

    stamps: list[float]  # seconds after it was sent at which pieces of text came
    tokens: int  # of them all
    prompt_tokens: int


@dataclass(frozen=True)
class Engine:
    """One line of the table. ``ask`` starts it, asks the groups and ends it; it raises ConfigError, NotReady."""

    name: str
    weights: str  # and how they are computed with
    bits: int  # of a weight
    needs: tuple[Path, ...]  # that benchmarks.peers.install makes
    peer: str  # that makes it
    ask: Callable[[Groups], list[list[Timing]]]

    def missing(self) -> str:
        """Why it cannot start; empty where it can."""
        absent = [path for path in self.needs if not path.exists()]
        return f"{absent[0]} is not there: run `{servers.INSTALL} {self.peer}`" if absent else ""


def gguf_types(spec: ModelSpec) -> tuple[str, ...]:
    """Types of GGUF files that the model's rows can be written in. llama-quantize's Q4_K has layers of Q6_K too."""
    fits = spec.hidden_size % SUPER_BLOCK == 0 and spec.intermediate_size % SUPER_BLOCK == 0
    return (*GGUF_TYPES, Q4_K) if fits else GGUF_TYPES


def engines(model: str, folder: Path) -> list[Engine]:
    """All of them, by width, so that those which are compared run close to each other."""
    found = [_paceline(model, "bf16", ())]
    found += [_paceline(model, scheme, ("--quantize", scheme)) for scheme in ("w8a8", "w4a8")]
    kinds = gguf_types(ModelSpec.from_folder(folder))
    for kind in kinds:
        file = servers.gguf_file(folder.name, kind)
        found.append(_paceline(str(file), kind, (), (file,)))
    for kind in ("bf16", *kinds):
        file = servers.gguf_file(folder.name, kind)
        setting = Setting("llama.cpp", servers.llama_server(file))
        found.append(
            Engine("llama.cpp", kind, BITS[kind], (servers.LLAMA_SERVER, file), "llama.cpp", over_http(setting))
        )
    for name, (kind, precision) in OPENVINO.items():
        weights = servers.openvino_folder(folder.name, kind)
        needs, ask = (servers.installed(servers.OPENVINO_PYTHON), weights), in_process(weights, precision)
        found.append(Engine("openvino", name, BITS[kind], needs, "openvino", ask))
    return sorted(found, key=lambda engine: -engine.bits)


def _paceline(model: str, weights: str, options: Sequence[str], needs: tuple[Path, ...] = ()) -> Engine:
    (setting,) = deployments(model, ["one node"], ["none"], options)
    return Engine("paceline", weights, BITS[weights], needs, "llama.cpp", over_http(setting))


def over_http(setting: Setting) -> Callable[[Groups], list[list[Timing]]]:
    """Start a server, ask it the groups, end it."""

    async def asked(url: str, groups: Groups) -> list[list[Timing]]:
        server = Server(url, await served_model(url), ignore_eos=True)
        return [[_timing(outcome) for outcome in await drive(server, group, LIMITS)] for group in groups]

    def ask(groups: Groups) -> list[list[Timing]]:
        with setting.start() as url:
            return asyncio.run(asked(url, groups))

    return ask


def _timing(outcome: Outcome) -> Timing:
    if outcome.error:
        raise ConfigError("peers", f"a request failed: {outcome.error}")
    return Timing(outcome.stamps, outcome.output_tokens, outcome.prompt_tokens)


def in_process(
    weights: Path, precision: str, drafting: str = "", *, ignore_eos: bool = True
) -> Callable[[Groups], list[list[Timing]]]:
    """OpenVINO. drafting: as its worker is told it, by ``openvino_worker.PROMPT_LOOKUP`` or the folder of a head."""

    def ask(groups: Groups) -> list[list[Timing]]:
        texts = [[(one.text, one.max_tokens) for one in group] for group in groups]
        about = {"threads": servers.cores(), "slots": servers.SLOTS, "context": servers.CONTEXT, "precision": precision}
        about |= {"drafting": drafting, "draft_tokens": servers.DRAFT_TOKENS, "ignore_eos": ignore_eos}
        try:
            done = subprocess.run(
                [str(servers.OPENVINO_PYTHON), str(openvino_worker.__file__)],
                input=json.dumps(about | {"model": str(weights), "groups": texts}),
                env=os.environ | {"HF_HUB_OFFLINE": "1"},
                capture_output=True,
                text=True,
                timeout=WORKER_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise ConfigError("peers", f"not done after {WORKER_TIMEOUT_S:g} s") from None
        if done.returncode != 0:
            raise ConfigError("peers", done.stderr.strip()[-ERROR_CHARACTERS:])
        return [[Timing(**one) for one in group] for group in json.loads(done.stdout)]

    return ask
