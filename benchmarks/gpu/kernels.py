"""FlashInfer's kernels for Hopper, compiled on a machine without a GPU: ``python -m benchmarks.gpu.kernels``.

It needs FlashInfer, a CUDA build of torch, ninja and nvcc. The packages ``nvidia-cuda-nvcc``, ``nvidia-nvvm``,
``nvidia-cuda-crt``, ``nvidia-cuda-runtime`` and ``nvidia-cuda-cccl`` bring nvcc without an installation of CUDA. A
kernel takes some minutes of a core; one that is there already is not compiled again. The folder that the last line
names is for ``benchmarks.gpu.carry --kernels``. ``--list`` names them and compiles nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from paceline.attention.flashinfer_kernels import BACKEND, HOPPER_BACKEND

HOPPER = "9.0a"
HEAD_DIMS = (64, 128)
LATENT, ROPE = 512, 64  # of MLA
NO_POSITIONS = 0  # FlashInfer's mode: rows come with their rotation


def specs() -> list[Any]:
    """What Paceline launches for bf16: pages of each head width, decode by tensor cores included, latents, and long
    prompts on Hopper."""
    from flashinfer.jit.attention import modules

    types = (torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.int32)
    anyhow = modules.gen_batch_prefill_module
    # From 0.7.2 on its wrapper loads another library, for pages whose keys and values lie alike, as ours do.
    alike = getattr(modules, "_gen_batch_prefill_primary_module", anyhow)
    found = [
        make(family, *types, dim, dim, NO_POSITIONS, False, False, False)  # no window, no cap
        for family, make in ((BACKEND, alike), (HOPPER_BACKEND, anyhow))
        for dim in HEAD_DIMS
    ]
    return [*found, modules.gen_batch_mla_module(BACKEND, *types, LATENT, ROPE, False)]


def set_compiler(folder: Path) -> None:
    """Name the target and, where the packages are installed and nothing else was named, their nvcc and what an
    installation of CUDA may lack: headers, and libraries under the names that a linker looks for. folder: for these."""
    os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", HOPPER)
    found = importlib.util.find_spec("nvidia")
    homes = [Path(place) / "cu13" for place in found.submodule_search_locations or ()] if found else []
    for home in homes:
        if (home / "bin/nvcc").is_file():
            os.environ.setdefault("CUDA_HOME", str(home))
        _also("CPATH", home / "include")
        for runtime in sorted((home / "lib").glob("libcudart.so.*"))[:1]:
            (folder / "libcudart.so").symlink_to(runtime)
    # The driver's library is the GPU machine's own. What is linked here has its name and nothing else.
    stub = ["c++", "-shared", "-x", "c++", os.devnull, "-Wl,-soname,libcuda.so.1", "-o", str(folder / "libcuda.so")]
    subprocess.run(stub, check=True)
    _also("LIBRARY_PATH", folder)


def _also(name: str, folder: Path) -> None:
    """Have the compiler look there, after where it was told to look."""
    os.environ[name] = os.pathsep.join(filter(None, (os.environ.get(name), str(folder))))


def keep(compiled: Path, archive: Path) -> None:
    """The libraries alone, for ``benchmarks.gpu.carry --kernels`` once they are unpacked."""
    with tarfile.open(archive, "w:xz") as packed:
        for library in sorted(file for file in compiled.glob("*/*.so") if file.stem == file.parent.name):
            packed.add(library, library.relative_to(compiled))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.kernels", description=__doc__)
    parser.add_argument("--list", action="store_true", help="name the kernels, and compile none")
    parser.add_argument("--keep", type=Path, default=None, help="archive to write the libraries to, after each")
    given = parser.parse_args(arguments)
    if importlib.util.find_spec("flashinfer") is None:
        print("error: FlashInfer is not installed (flashinfer-python)", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        set_compiler(Path(folder))
        if given.list:
            print(*(spec.name for spec in specs()), sep="\n")
            return 0
        return build(given.keep)


def build(archive: Path | None) -> int:
    """Each library, and all of them into ``archive`` after each. Returns 1 when one could not be built."""
    from flashinfer.jit import env

    failed = False
    for spec in specs():
        began, said = time.monotonic(), ""
        try:
            spec.build(verbose=False)
        except RuntimeError as error:  # the others are worth having
            failed, said = True, f"  FAILED: {error}"
        print(f"{time.monotonic() - began:6.0f} s  {spec.name}{said}", flush=True)
        if archive is not None:
            keep(env.FLASHINFER_JIT_DIR, archive)
    print(env.FLASHINFER_JIT_DIR)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
