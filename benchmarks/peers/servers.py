"""Servers of other engines on this machine's cores: how each is started plainly and with speculation of its own.

`benchmarks.peers.install` makes them. Each drafts by copying from its context, which needs no further weights. Both may
be given the EAGLE-3 head that Paceline has for the model as well.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from benchmarks.common.processes import running
from benchmarks.serving.client import answers
from benchmarks.serving.deployments import Setting
from paceline.errors import ConfigError
from paceline.spec_decode.heads.formats.config import aux_input_layers
from paceline.spec_decode.heads.shipped import shipped_heads

HOME = Path(__file__).resolve().parents[2] / "build" / "peers"
LLAMA_SERVER = HOME / "llama-build" / "bin" / "llama-server"
LLAMA_QUANTIZE = LLAMA_SERVER.with_name("llama-quantize")
VLLM_PYTHON = HOME / "vllm" / "bin" / "python"
OPENVINO_PYTHON = HOME / "openvino" / "bin" / "python"
INSTALL = "python -m benchmarks.peers.install"

SLOTS = 8  # sequences that a peer works on together
CONTEXT = 2048  # tokens of each
DRAFT_TOKENS = 4
# llama.cpp: copies what followed the last 3 tokens where they stood before.
LLAMA_NGRAM = ("--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "3", "--spec-ngram-simple-size-m", "4")
VLLM_NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": DRAFT_TOKENS,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 2,
}
LLAMA_HEAD = ("--spec-type", "draft-eagle3", "--spec-draft-n-max", str(DRAFT_TOKENS))
VLLM_HEAD = {"method": "eagle3", "num_speculative_tokens": DRAFT_TOKENS}
AUX_LAYERS, WEIGHTS = "eagle_aux_hidden_state_layer_ids", "model.safetensors"

Start = Callable[[], AbstractContextManager[str]]


def installed(python: Path) -> Path:
    """A file that an environment has once all of its packages are there. It names those."""
    return python.parents[1] / "installed"


def gguf_file(model: str, kind: str = "bf16") -> Path:
    """Weights for llama.cpp, of that type."""
    return HOME / f"{Path(model).name}-{kind}.gguf"


def head_file(model: str) -> Path:
    """The EAGLE-3 head for llama.cpp."""
    return gguf_file(model, "eagle3-bf16")


def openvino_folder(model: str, kind: str) -> Path:
    """Weights for OpenVINO, of that type."""
    return HOME / f"{Path(model).name}-openvino-{kind}"


def cores() -> int:
    """That every engine may use."""
    return len(os.sched_getaffinity(0))


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def peer_settings(names: Sequence[str], folder: Path) -> list[Setting]:
    """Each peer plainly and with speculation. Raises ConfigError naming what is unknown or not installed."""
    found = []
    for name in names:
        if name not in PEERS:
            raise ConfigError("peers", f"{name!r} is none of {', '.join(PEERS)}")
        require(name, PEERS[name][0](folder))
        start = PEERS[name][1]
        found += [Setting(name, start(folder, False)), Setting(f"{name}, n-gram", start(folder, True))]
    return found


def require(name: str, paths: Sequence[Path]) -> None:
    """Raises ConfigError naming what `benchmarks.peers.install` has not made for the peer."""
    missing = [path for path in paths if not path.exists()]
    if missing:
        raise ConfigError("peers", f"{missing[0]} is not there: run `{INSTALL} {name}`")


def _llama(folder: Path, drafts: bool) -> Start:
    return llama_server(gguf_file(folder.name), LLAMA_NGRAM if drafts else ())


def llama_server(file: Path, options: Sequence[str] = (), head: Path | None = None) -> Start:
    """llama.cpp's server of a GGUF file, which drafts with a head where there is one. A start may raise ConfigError."""

    @contextmanager
    def start() -> Iterator[str]:
        port, threads = free_port(), str(cores())
        command = [str(LLAMA_SERVER), "-m", str(file), "--host", "127.0.0.1", "--port", str(port)]
        command += ["-t", threads, "-tb", threads, "-np", str(SLOTS), "-c", str(SLOTS * CONTEXT), "--no-webui"]
        command += ["--no-cache-prompt", "--cache-ram", "0"]  # no prompt may be in a cache from another run
        if head is not None:
            require("llama.cpp", [head])
            command += ["-md", str(head), *LLAMA_HEAD]
        url = f"http://127.0.0.1:{port}"
        with running([*command, *options], ready=lambda: answers(url)):
            yield url

    return start


def head_setting(name: str, folder: Path) -> Setting | None:
    """A peer that drafts with the EAGLE-3 head that Paceline has for the model; None where there is no head."""
    head = shipped_heads(folder.name, "eagle3")
    if head is None:
        return None
    if name == "llama.cpp":
        start = llama_server(gguf_file(folder.name), head=head_file(folder.name))
    else:
        start = _vllm_server(folder, VLLM_HEAD | {"model": str(peer_head(head, folder.name))})
    return Setting(f"{name}, our head", start)


def peer_head(head: Path, model: str) -> Path:
    """A folder with the same weights and a config that counts layers by their inputs, as the peers do that read it."""
    folder = HOME / f"{Path(model).name}-eagle3"
    config = json.loads((head / "config.json").read_text())
    layers = list(aux_input_layers(config["eagle_config"][AUX_LAYERS]) or ())
    folder.mkdir(parents=True, exist_ok=True)
    config |= {AUX_LAYERS: layers, "eagle_config": config["eagle_config"] | {AUX_LAYERS: layers}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / WEIGHTS).unlink(missing_ok=True)
    (folder / WEIGHTS).symlink_to((head / WEIGHTS).resolve())
    return folder


def _vllm(folder: Path, drafts: bool) -> Start:
    return _vllm_server(folder, VLLM_NGRAM if drafts else None)


def _vllm_server(folder: Path, speculation: Mapping[str, object] | None) -> Start:
    @contextmanager
    def start() -> Iterator[str]:
        port = free_port()
        command = [str(VLLM_PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
        command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16", "--no-enable-prefix-caching"]
        command += ["--max-model-len", str(CONTEXT), "--max-num-seqs", str(SLOTS), "--served-model-name", folder.name]
        if speculation:
            command += ["--speculative-config", json.dumps(speculation)]
        bound = ",".join(map(str, sorted(os.sched_getaffinity(0))))  # every core, as the others
        environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": bound, "HF_HUB_OFFLINE": "1"}
        environment |= {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "PATH": _with(VLLM_PYTHON.parent)}
        url = f"http://127.0.0.1:{port}"
        with running(command, ready=lambda: answers(url), environment=environment, folder=HOME):
            yield url

    return start


def _with(folder: Path) -> str:
    return os.pathsep.join([str(folder), os.environ.get("PATH", "")])


# By name: what must be there, and how it starts.
PEERS: dict[str, tuple[Callable[[Path], list[Path]], Callable[[Path, bool], Start]]] = {
    "llama.cpp": (lambda folder: [LLAMA_SERVER, gguf_file(folder.name)], _llama),
    "vllm": (lambda folder: [installed(VLLM_PYTHON)], _vllm),
}
