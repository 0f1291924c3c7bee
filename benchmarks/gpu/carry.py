"""What a GPU machine without a network needs, in two archives: ``python -m benchmarks.gpu.carry --into FOLDER``.

``tree.tar.xz`` is this repository as git has it, without ``heads/`` (``--heads`` keeps them). ``site.tar.xz`` holds the
packages that such machines lack, unpacked, by the versions of ``requirements.lock``. FlashInfer's wheel is mostly
sources of kernels that Paceline never compiles: of those, ``data/`` keeps what prefill, decode and MLA are made of.
``--kernels`` carries what ``benchmarks.gpu.kernels`` compiled, which FlashInfer then loads without a compiler.
``--try PYTHON`` unpacks both archives elsewhere and imports with that Python what the tour of a GPU imports; it should
have the torch and the triton of the GPU machine.
"""

from __future__ import annotations

import argparse
import ast
import lzma
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LOCK = ROOT / "requirements.lock"
PACKAGES = (
    "flashinfer-python",
    "apache-tvm-ffi",
    "pydantic",
    "pydantic-core",
    "annotated-types",
    "typing-inspection",
    "protobuf",
    "llguidance",
    "cryptography",
    "cffi",
)
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (39, 35, 34, 31, 28, 27, 24, 17)] + ["manylinux2014_x86_64"]
LIMIT_MIB = 60
DATA = "flashinfer/data/"
KEPT_FOLDERS = (  # of FlashInfer's data: what its compiler is told to look in
    "include/",
    "spdlog/include/",
    "cutlass/include/",
    "cutlass/tools/util/include/",
    "cccl/cub/",
    "cccl/libcudacxx/include/",
    "cccl/thrust/",
)
KEPT_SOURCES = re.compile(r"csrc/(batch_(prefill|mla|decode|attention)\w*\.\w+|[\w.]+\.(h|cuh|inc))")
# Methods of FlashInfer's classes, by file, and the parameters that Paceline hopes for: without them it plans worse, or
# not at all.
CALLED = (
    (
        "prefill.py",
        "BatchPrefillWithPagedKVCacheWrapper",
        "plan",
        ("packed_custom_mask", "non_blocking", "uniform_q_len"),
    ),
    (
        "prefill.py",
        "BatchPrefillWithPagedKVCacheWrapper",
        "__init__",
        ("backend", "custom_mask_buf", "mask_indptr_buf"),
    ),
    ("decode.py", "BatchDecodeWithPagedKVCacheWrapper", "_plan_impl", ("sm_scale", "non_blocking", "q_data_type")),
)
IMPORTED = (
    "torch",
    "triton",
    "flashinfer",
    "flashinfer.jit.attention",
    "paceline.assembly.build",
    "paceline.attention.flashinfer",
    "paceline.attention.triton_paged",
    "prefill_node.engine.engine",
    "decode_node.engine.engine",
    "decode_node.sink",
    "kv_transfer.transports.nccl",
    "benchmarks.gpu.__main__",
    "benchmarks.gpu.probes",
    "benchmarks.gpu.tour",
    "tests.support.device_runner",
    "tests.support.two_engines",
)
VERSIONS = (
    "import sys, torch, triton\n"
    "print(f'imported: Python {sys.version.split()[0]}, torch {torch.__version__}, triton {triton.__version__}')"
)
TRY_TIMEOUT_S = 240
COMPILED = DATA + "aot/"  # where FlashInfer looks for a kernel before it compiles one
UNUSED_CODE = ("flashinfer/experimental/", "flashinfer/moe_ep/")  # imported with the rest, their sources are not


def is_carried(name: str) -> bool:
    """Whether a file of FlashInfer's wheel is needed for Paceline's kernels."""
    if name.startswith(DATA):
        inside = name.removeprefix(DATA)
        return inside.startswith(KEPT_FOLDERS) or "/" not in inside or KEPT_SOURCES.fullmatch(inside) is not None
    return name.endswith(".py") or not name.startswith(UNUSED_CODE)


def locked(lock: str, packages: Sequence[str] = PACKAGES) -> list[str]:
    """``name==version`` of each package. Raises ValueError for one that the lock does not name."""
    found = dict(re.findall(r"^([\w-]+)==([^\s;]+)", lock, re.MULTILINE))
    missing = [name for name in packages if name not in found]
    if missing:
        raise ValueError(f"{LOCK.name} names no {', '.join(missing)}")
    return [f"{name}=={found[name]}" for name in packages]


def download(into: Path, python: str) -> list[Path]:
    """The wheels of ``locked`` for a version of Python. Raises CalledProcessError."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", python, "--implementation", "cp", "--dest", str(into)]
    command += [word for platform in PLATFORMS for word in ("--platform", platform)]
    subprocess.run([*command, *locked(LOCK.read_text(encoding="utf-8"))], check=True)
    return sorted(into.glob("*.whl"))


def unpack(wheels: Sequence[Path], into: Path) -> None:
    """All of each wheel, but of FlashInfer's what ``is_carried``."""
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as packed:
            slim = wheel.name.startswith("flashinfer")
            packed.extractall(into, [name for name in packed.namelist() if not slim or is_carried(name)])


def add_kernels(compiled: Path, site: Path) -> int:
    """Put FlashInfer's libraries, ``NAME/NAME.so`` in ``compiled``, where it finds them; returns how many. Raises
    FileNotFoundError where there is none."""
    libraries = sorted(file for file in compiled.glob("*/*.so") if file.stem == file.parent.name)
    if not libraries:
        raise FileNotFoundError(f"{compiled} holds no compiled kernels")
    for library in libraries:
        (into := site / COMPILED / library.stem).mkdir(parents=True)
        shutil.copy(library, into)
    return len(libraries)


def pack(files: Sequence[Path], root: Path, archive: Path) -> float:
    """``files`` as they lie under ``root``; returns MiB of the archive."""
    with tarfile.open(archive, "w:xz", preset=lzma.PRESET_DEFAULT) as packed:
        for file in files:
            packed.add(file, file.relative_to(root), recursive=False)
    return archive.stat().st_size / 2**20


def lacking(site: Path) -> list[str]:
    """What Paceline calls FlashInfer with and its unpacked source does not have, as ``class.method parameter``. It is
    read and not imported: that needs a CUDA build of torch."""
    found = []
    for file, kind, method, names in CALLED:
        tree = ast.parse((site / "flashinfer" / file).read_text(encoding="utf-8"))
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == kind]
        defined = [d for c in classes for d in c.body if isinstance(d, ast.FunctionDef) and d.name == method]
        there = {each.arg for d in defined for each in (*d.args.args, *d.args.kwonlyargs)}
        found += [f"{kind}.{method} {name}" for name in names if name not in there]
    return found


def try_imports(python: str, archives: Sequence[Path]) -> bool:
    """Unpack the archives and import what the tour needs with another Python; prints versions."""
    with tempfile.TemporaryDirectory(prefix="paceline-try-") as scratch:
        places = [Path(scratch) / name for name in ("tree", "site")]
        for archive, place in zip(archives, places, strict=True):
            with tarfile.open(archive) as packed:
                # As tarfile's page says it for a Python before 3.11.4, which has no filters.
                packed.extraction_filter = getattr(tarfile, "data_filter", lambda member, path: member)
                packed.extractall(place)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        environment["PYTHONPATH"] = os.pathsep.join(map(str, places))
        script = f"import importlib\nfor name in {IMPORTED!r}:\n    importlib.import_module(name)\n{VERSIONS}"
        done = subprocess.run(
            [python, "-c", script], cwd=places[0], env=environment, timeout=TRY_TIMEOUT_S, check=False
        )
    return done.returncode == 0


def tracked(heads: bool) -> list[Path]:
    """The repository's files as git has them."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    names = [name for name in listed.split("\0") if name and (heads or not name.startswith("heads/"))]
    return [ROOT / name for name in names if (ROOT / name).is_file()]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code: 1 where the archives are larger than the limit."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.carry", description=__doc__)
    parser.add_argument("--into", type=Path, required=True)
    parser.add_argument("--python", default="3.12", help="of the GPU machine")
    parser.add_argument("--wheels", type=Path, default=None, help="a folder that has them already: nothing is fetched")
    parser.add_argument("--kernels", type=Path, default=None, help="the folder that benchmarks.gpu.kernels names")
    parser.add_argument("--heads", action="store_true", help="carry the trained heads as well")
    parser.add_argument("--try", dest="tried", default="", metavar="PYTHON", help="import what was packed with it")
    parser.add_argument("--limit-mib", type=float, default=LIMIT_MIB)
    given = parser.parse_args(arguments)
    given.into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="paceline-carry-") as scratch:
        folder = Path(scratch)
        wheels = sorted(given.wheels.glob("*.whl")) if given.wheels else download(folder, given.python)
        site = folder / "site"
        unpack(wheels, site)
        if missing := lacking(site):
            print(f"error: this FlashInfer lacks {', '.join(missing)}", file=sys.stderr)
            return 1
        if given.kernels:
            add_kernels(given.kernels, site)
        sizes = {
            "tree.tar.xz": pack(tracked(given.heads), ROOT, given.into / "tree.tar.xz"),
            "site.tar.xz": pack(sorted(f for f in site.rglob("*") if f.is_file()), site, given.into / "site.tar.xz"),
        }
    for name, mib in sizes.items():
        print(f"{mib:6.1f} MiB  {given.into / name}")
    total = sum(sizes.values())
    print(f"{total:6.1f} MiB  of {given.limit_mib:g}")
    if total > given.limit_mib:
        print("error: this is more than can be carried", file=sys.stderr)
        return 1
    if given.tried and not try_imports(given.tried, [given.into / name for name in sizes]):
        print(f"error: {given.tried} cannot import what was packed", file=sys.stderr)
        return 1
    print("there: mkdir site && tar xf tree.tar.xz && tar xf site.tar.xz -C site && export PYTHONPATH=$PWD:$PWD/site")
    return 0


if __name__ == "__main__":
    sys.exit(main())
