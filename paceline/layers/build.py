"""Compile the C++ files of ``kernels/`` for this host once and load them as one library.

The library lands in ``$PACELINE_HOME/kernels`` (default ``~/.cache/paceline/kernels``), named by a hash of sources,
flags and processor, so that a changed source or another machine never meets a stale build. Without a C++ compiler the
layers fall back to torch, and the start-up probe then reports that the host is not bit-exact. A compiler that cannot
build for all that the processor has builds without AMX.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import mmap
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from paceline.file_lock import locked
from paceline.phases import phase

log = logging.getLogger(__name__)

SOURCES = Path(__file__).with_name("kernels")
FLAGS = (
    *("-O3", "-march=native", "-std=c++17", "-fopenmp", "-fPIC", "-Wno-psabi"),
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"),
)
EXACT = "integer_"  # files that start so round after every operation, for the same bits on every instruction set
COMPILE_TIMEOUT_S = 300
LOCK_POLL_S = 0.2
NO_AMX = "-DPACELINE_NO_AMX"


def cache_folder() -> Path:
    """Where models and kernels are kept."""
    return Path(os.environ.get("PACELINE_HOME", Path.home() / ".cache" / "paceline"))


def cpu_identity() -> str:
    """Model and instruction sets of this host's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(line for line in lines[:40] if line.startswith(("model name", "flags", "Features")))


def find_compiler() -> str | None:
    """The C++ compiler of this host, ``$CXX`` first; None where there is none."""
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")


def compile_kernels(extra_flags: tuple[str, ...] = ()) -> Path:
    """Path of the library for this host, compiled if it is not there yet. Raises RuntimeError if it cannot be."""
    compiler = find_compiler()
    if compiler is None:
        raise RuntimeError("no C++ compiler found: install g++ (Debian: apt-get install g++)")
    flags = [*FLAGS, *extra_flags]
    identity = "\0".join([_source_digest(), compiler, *flags, cpu_identity()])
    key = hashlib.blake2b(identity.encode(), digest_size=10).hexdigest()
    target = cache_folder() / "kernels" / f"{key}.so"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with phase("compiling the CPU kernels"), _alone(target.with_suffix(".lock")):
        if not target.exists():
            _build([compiler, *flags], target)
    return target


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Nodes that start together compile once. Where the lock cannot be had each compiles, which costs time alone."""
    with path.open("w") as file, ExitStack() as stack:
        with suppress(OSError):
            stack.enter_context(locked(file.fileno(), COMPILE_TIMEOUT_S, LOCK_POLL_S))
        yield


def _build(command: Sequence[str], target: Path) -> None:
    """command: the compiler and its flags."""
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        built = Path(scratch) / "kernels.so"
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            objects = list(pool.map(lambda file: _compile(command, file, Path(scratch)), _translation_units()))
        _run([*command, "-shared", *map(str, objects), "-o", str(built)])
        built.replace(target)  # atomic


def _translation_units() -> list[Path]:
    """The longest to compile first, so that none of them is left for the end."""
    return sorted(SOURCES.glob("*.cpp"), key=lambda file: (not file.name.startswith("attention"), file.name))


def _source_digest() -> str:
    """Hash of every source and header by name and content, 16 hex digits."""
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted(SOURCES.glob("*.[ch]*")):
        digest.update(f"{file.name}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()


def _compile(command: Sequence[str], source: Path, into: Path) -> Path:
    built = into / f"{source.stem}.o"
    rounding = ["-ffp-contract=off"] if source.stem.startswith(EXACT) else []
    _run([*command, *rounding, "-c", str(source), "-o", str(built)])
    return built


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")


@functools.cache
def load_kernels(extra_flags: tuple[str, ...] = ()) -> ctypes.CDLL | None:
    """The kernels of this host, or None (with a warning) where they cannot be built or run.

    ``PACELINE_KERNELS=torch`` turns them off; ``PACELINE_KERNELS=-DPACELINE_NO_AMX`` (or ``-DPACELINE_GENERIC``,
    ``-mno-avx512vnni``, ``-march=x86-64-v3``) builds a lesser instruction set, for tests and for a fleet of unlike
    processors.
    """
    choice = os.environ.get("PACELINE_KERNELS", "")
    if choice == "torch":
        return None
    if not extra_flags and choice:
        extra_flags = tuple(choice.split())
    lesser = (*extra_flags, NO_AMX)
    try:
        library = ctypes.CDLL(str(compile_kernels(extra_flags)))
    except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
        if find_compiler() and NO_AMX not in extra_flags:
            log.warning("the CPU kernels cannot be built for all of this processor; building without AMX: %s", error)
            return load_kernels(lesser)
        log.warning("CPU kernels are off, falling back to torch (slower, not bit-exact): %s", error)
        return None
    _declare(library)
    if library.pl_init() != 0:
        log.warning("this kernel refuses AMX state; building without AMX")
        return load_kernels(lesser)
    return library


def _declare(library: ctypes.CDLL) -> None:
    ptr, i64, i32, f32, f64 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float, ctypes.c_double
    signatures: dict[str, tuple[list[Any], Any]] = {
        "pl_init": ([], i32),
        "pl_isa": ([], ctypes.c_char_p),
        "pl_threads": ([], i32),
        "pl_set_threads": ([i32], None),
        "pl_share_cores": ([ptr, i32, i32, i32, i64, f64, f64], None),
        "pl_limit_threads": ([i32], None),
        "pl_take_regions": ([ptr, ptr], None),
        "pl_read": ([ptr, i64], f32),
        "pl_move_rows": ([ptr, i64, ptr, i64, i64, i64, ptr, i32], i32),
        "pl_packed_elems": ([i64, i64, i32], i64),
        "pl_pack_bf16": ([ptr, i64, i64, ptr], None),
        "pl_pack_f32": ([ptr, i64, i64, ptr], None),
        "pl_panels_bytes": ([ptr], i64),
        "pl_pack_panels": ([ptr] * 8, None),
        "pl_linear_bf16": ([ptr, ptr, i64, i64, ptr, i32], None),
        "pl_linear_f32": ([ptr, ptr, i64, i64, ptr, i32], None),
    }
    for t in ("bf16", "f32"):
        signatures[f"pl_rms_norm_{t}"] = ([ptr, ptr, ptr, i64, i64, f32, ptr], None)
        signatures[f"pl_rms_norm_wide_{t}"] = ([ptr, ptr, ptr, i64, i64, f32, ptr], None)
        signatures[f"pl_gated_{t}"] = ([ptr, i64, i64, i32, f32, f32, ptr], None)
        signatures[f"pl_silu_mul_{t}"] = ([ptr, i64, i64, ptr], None)
        signatures[f"pl_rope_write_{t}"] = ([ptr] * 3 + [i64] * 7 + [ptr] * 3 + [i64, ptr, ptr], None)
        signatures[f"pl_kv8_write_{t}"] = ([ptr, i64, i64, i64, ptr, i64, ptr], None)
        signatures[f"pl_attend_latent_{t}"] = ([ptr, ptr, i64, i64, i64, i64] + [ptr] * 5 + [f32, ptr], None)
        latent = [ptr, i64, i64, ptr, i64, i64, i64, i64, i64, ptr, f32] + [ptr] * 5
        signatures[f"pl_latent_write_{t}"] = (latent, None)
        signatures[f"pl_linear_heads_{t}"] = ([ptr] + [i64] * 4 + [ptr, i64, i64, ptr, i64, i64], None)
    for t in ("bf16", "f32", "kv8_bf16", "kv8_f32"):  # of a pool of codes: kv8
        attend = [ptr, ptr, i64, i64, i64, i64, i64] + [ptr] * 5 + [i64, ptr, f32, ptr]
        signatures[f"pl_attend_{t}"] = (attend, i32)
        signatures[f"pl_block_write_{t}"] = ([ptr, i64, ptr, ptr, ptr, ptr, i64, ptr, ptr, ptr], None)
        signatures[f"pl_block_finish_{t}"] = ([ptr, i64, ptr] + [ptr] * 6 + [i64, ptr, ptr, ptr], i32)
        signatures[f"pl_block_layers_{t}"] = ([ptr, i64, i64] + [ptr] * 4 + [i64] + [ptr] * 8, i32)
    signatures["pl_route"] = ([ptr, i64, i64, ptr, i64, i64, i64, i32, f32, i32, ptr, ptr], None)
    for name, (arguments, result) in signatures.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, result


def kernel_set() -> str:
    """Name of the kernels in use, part of the pairing fingerprint: bits depend on it."""
    library = load_kernels()
    if library is None:
        return "torch"
    isa: bytes = library.pl_isa()
    return f"{isa.decode()}/{_source_digest()[:8]}"


def set_threads(count: int) -> None:
    """Threads that the kernels use, whichever thread calls them."""
    library = load_kernels()
    if library is not None:
        library.pl_set_threads(count)


def share_cores(busy: mmap.mmap, slots: int, own: int, cores: int, over_s: float, share: float, fewer: float) -> None:
    """Threads follow ``busy`` from now on: a byte for each of ``slots`` processes of this host, not 0 while it works;
    this process is number ``own``. All use ``cores`` together (``kernels/host.cpp``). The map must stay open. Kernels
    whose threads miss more than ``share`` of ``over_s`` seconds go on with ``fewer`` of them, a share too."""
    library = load_kernels()
    if library is not None:
        address = ctypes.addressof(ctypes.c_char.from_buffer(busy))
        library.pl_share_cores(address, slots, own, cores, int(1e9 * over_s), share, fewer)


def limit_threads(most: int) -> None:
    """Kernels begin with no more than ``most`` threads, although more cores are shared; 0: with any number. It ends
    what they decided by themselves."""
    library = load_kernels()
    if library is not None:
        library.pl_limit_threads(most)


def take_regions() -> tuple[float, float]:
    """Seconds that kernels spent on several threads of shared cores since the last call, and how many of these a thread
    was not on its core: the worst of each parallel region's (``kernels/host.cpp``). 0 where there are no kernels."""
    library = load_kernels()
    if library is None:
        return 0.0, 0.0
    took, missed = ctypes.c_int64(), ctypes.c_int64()
    library.pl_take_regions(ctypes.byref(took), ctypes.byref(missed))
    return 1e-9 * took.value, 1e-9 * missed.value


def current_threads() -> int:
    """Threads that a kernel called now would use; 1 where there are no kernels."""
    library = load_kernels()
    return 1 if library is None else int(library.pl_threads())
