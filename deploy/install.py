"""Set up .venv for ``make``: what requirements.lock pins, and the build of torch that this machine can use.

    python deploy/install.py [--torch auto|cpu|cuda] [--dev] [--venv .venv]

auto: the CUDA build where there is an NVIDIA GPU, else the CPU build. The CPU build is looked for where pip is
configured to look (a mirror, a folder of wheels), then in PyTorch's own index. Where neither can be reached, the CUDA
build of the ordinary index is installed, which runs on a CPU too; the script says so. Needs the standard library alone.
The CPU kernels are compiled meanwhile, for this machine.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "requirements.lock"
OLDEST = (3, 11)


def main() -> None:
    """See the module docstring."""
    if sys.version_info < OLDEST:
        raise SystemExit(f"Paceline needs Python {OLDEST[0]}.{OLDEST[1]} or newer; this is {sys.version.split()[0]}")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", choices=("auto", "cpu", "cuda"), default="auto", help="build of torch to install")
    parser.add_argument("--dev", action="store_true", help="also what tests and checks need")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="folder of the virtual environment")
    options = parser.parse_args()
    began = time.monotonic()
    with compiled_meanwhile():
        installer = Installer(options.venv)
        installer.install_torch(options.torch)
        installer.install_project("node,dev" if options.dev else "node")
    say(f"{options.venv} is ready after {time.monotonic() - began:.0f} s, with torch {installer.torch_build()}")


class Installer:
    """A virtual environment, and uv in it, which resolves and caches better than pip."""

    def __init__(self, venv: Path) -> None:
        """Make the environment where there is none, and install the locked uv in it."""
        self._python = venv / "bin" / "python"
        if not self._python.exists():
            say(f"making {venv}")
            run(sys.executable, "-m", "venv", str(venv))
        self._pip = (str(self._python), "-m", "pip", "--disable-pip-version-check")
        self._install_uv()
        self._uv = (str(venv / "bin" / "uv"), "pip", "install", "--python", str(self._python), "-c", str(LOCK))
        self._environment = os.environ | {"UV_SYSTEM_CERTS": os.environ.get("UV_SYSTEM_CERTS", "1")}
        if index := self._pip_setting("index-url"):
            self._environment.setdefault("UV_DEFAULT_INDEX", index)

    def _install_uv(self) -> None:
        """The locked uv, by pip, which wants its line of the lock in a file of its own to check the hashes."""
        with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as file:
            file.write(lock_entry("uv"))
            file.flush()
            run(*self._pip, "install", "-q", "--require-hashes", "-r", file.name)

    def install_torch(self, build: str) -> None:
        """Install the locked version of torch in the build that ``build`` names, unless it is there already."""
        wanted = build if build != "auto" else "cuda" if has_gpu() else "cpu"
        there = self.torch_build()
        version = locked("torch")
        if there.split("+")[0] == version and (build == "auto" or there.endswith("+cpu") == (wanted == "cpu")):
            return
        if wanted == "cpu" and self._install_cpu_torch(version):
            return
        if wanted == "cpu":
            say(
                "no CPU build of torch can be reached from here; installing the CUDA build, which runs on a CPU too "
                "(2.5 GB to download, 5 GB on disk)"
            )
        else:
            say(f"installing torch {version} with CUDA (2.5 GB to download, 5 GB on disk)")
        run(*self._uv, "--reinstall-package", "torch", f"torch=={version}", environment=self._environment)

    def _install_cpu_torch(self, version: str) -> bool:
        """The CPU build, from where pip looks or from PyTorch's index. Its wheels are in no lock: it is pinned by
        version, what it depends on by the lock."""
        say(f"looking for the CPU build of torch {version}")
        build = f"torch=={version}+cpu"
        if run(*self._pip, "install", "-q", "--no-deps", build, check=False):
            return True
        uv = tuple(part for part in self._uv if part not in ("-c", str(LOCK)))
        return run(*uv, "-q", "--no-deps", "--torch-backend", "cpu", build, check=False, environment=self._environment)

    def install_project(self, extras: str) -> None:
        """Install this project, editable, with everything that ``extras`` need, each file checked against the lock."""
        say(f"installing Paceline with [{extras}]")
        run(*self._uv, "-q", "-b", str(LOCK), "-e", f"{ROOT}[{extras}]", environment=self._environment)

    def torch_build(self) -> str:
        """The installed version of torch, such as 2.13.0+cpu; empty where there is none."""
        code = "from importlib.metadata import version; print(version('torch'))"
        found = subprocess.run([str(self._python), "-c", code], capture_output=True, text=True, check=False)
        return found.stdout.strip()

    def _pip_setting(self, name: str) -> str:
        command = [*self._pip, "config", "get", f"global.{name}"]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


@contextmanager
def compiled_meanwhile() -> Iterator[None]:
    """The CPU kernels are compiled while the rest is downloaded. What fails here, the first node tries and tells."""
    code = "from paceline.layers.build import load_kernels; load_kernels()"
    nowhere = subprocess.DEVNULL
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=nowhere, stderr=nowhere) as compiling:
        try:
            yield
        except BaseException:
            compiling.send_signal(signal.SIGINT)  # it ends after the file at hand, and leaves nothing behind
            raise
        if compiling.poll() is None:
            say("compiling the CPU kernels")


def lock_entry(package: str) -> str:
    """The lines of the lock that pin ``package``: its version and its hashes."""
    pattern = rf"^{package}==.*\n(?: .*\n)*"
    found = re.search(pattern, LOCK.read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        raise SystemExit(f"{LOCK.name} has no {package}: run `make lock`")
    return found[0]


def locked(package: str) -> str:
    """The version of ``package`` in the lock."""
    return lock_entry(package).split("==", 1)[1].split()[0]


def has_gpu() -> bool:
    """Whether this machine has an NVIDIA GPU with a driver."""
    return Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidia0").exists()


def run(*command: str, check: bool = True, environment: dict[str, str] | None = None) -> bool:
    """Run a command; whether it ended well. With ``check`` its failure ends the script."""
    quiet = None if check else subprocess.DEVNULL
    done = subprocess.run(command, check=False, env=environment, stdout=quiet, stderr=quiet, cwd=ROOT)
    if check and done.returncode:
        raise SystemExit(f"failed with {done.returncode}: {' '.join(command)}")
    return done.returncode == 0


def say(what: str) -> None:
    """A line of progress."""
    print(f"setup: {what}", flush=True)


if __name__ == "__main__":
    main()
