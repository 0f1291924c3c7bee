"""``python -m benchmarks.pack_weights``: a model folder in pieces small enough to carry, and back.

    split FOLDER --into PIECES [--piece-mib 60] [--xz]
    join PIECES --into FOLDER

The pieces are one tar stream, cut; ``pieces.json`` beside them has their sizes and sha256. Joining checks every piece
before the folder appears under its name, so a piece that is missing or damaged leaves nothing behind.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, cast

from paceline.errors import ConfigError

MANIFEST = "pieces.json"
PIECE_MIB = 60
XZ_PRESET = 0  # bf16 weights: 0.58 of the bytes; higher presets gain little and take minutes


@dataclass(frozen=True)
class Piece:
    """One file of the stream."""

    name: str
    num_bytes: int
    sha256: str


class PieceWriter:
    """A file that is many: each at most ``piece_bytes`` long."""

    def __init__(self, folder: Path, piece_bytes: int) -> None:
        self.pieces: list[Piece] = []
        self._folder, self._piece_bytes = folder, piece_bytes
        self._file: IO[bytes] | None = None
        self._hash, self._size = hashlib.sha256(), 0

    def write(self, data: Any) -> int:
        """Append bytes."""
        rest = memoryview(data).cast("B")
        while len(rest):
            if self._file is None:
                self._file = (self._folder / f"piece-{len(self.pieces):03d}").open("wb")
            part = rest[: self._piece_bytes - self._size]
            self._file.write(part)
            self._hash.update(part)
            self._size += len(part)
            rest = rest[len(part) :]
            if self._size == self._piece_bytes:
                self.close()
        return memoryview(data).nbytes

    def close(self) -> None:
        """End the piece that is open."""
        if self._file is not None:
            self._file.close()
            self.pieces.append(Piece(Path(self._file.name).name, self._size, self._hash.hexdigest()))
            self._file, self._hash, self._size = None, hashlib.sha256(), 0


class PieceReader:
    """The pieces as one file."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._waiting = list(files)
        self._file: IO[bytes] | None = None

    def read(self, size: int = -1) -> bytes:
        """At most ``size`` bytes, all of them for -1; fewer only at the end."""
        parts: list[bytes] = []
        while size and (self._file is not None or self._waiting):
            self._file = self._file or self._waiting.pop(0).open("rb")
            part = self._file.read(size)
            if not part:
                self.close()
                continue
            parts.append(part)
            size = size - len(part) if size > 0 else size
        return b"".join(parts)

    def close(self) -> None:
        """Close the file that is open."""
        if self._file is not None:
            self._file.close()
            self._file = None


def split(folder: Path, into: Path, piece_bytes: int, xz: bool = False) -> list[Piece]:
    """Cut the files of ``folder`` (none of its subfolders) into pieces in ``into``, which must be empty or new.

    Raises ConfigError.
    """
    files = sorted(path for path in folder.iterdir() if path.is_file()) if folder.is_dir() else []
    if not files:
        raise ConfigError("folder", f"{folder} holds no files")
    if piece_bytes < 1:
        raise ConfigError("piece_mib", "must be above 0")
    into.mkdir(parents=True, exist_ok=True)
    if any(into.iterdir()):
        raise ConfigError("into", f"{into} is not empty")
    writer = PieceWriter(into, piece_bytes)
    with ExitStack() as stack:
        stack.callback(writer.close)
        stream = cast(IO[bytes], writer)
        if xz:
            stream = cast(IO[bytes], stack.enter_context(lzma.LZMAFile(stream, "w", preset=XZ_PRESET)))
        archive = stack.enter_context(tarfile.open(fileobj=stream, mode="w|"))
        for path in files:
            archive.add(path.resolve(), arcname=path.name, recursive=False)
    manifest = {"xz": xz, "pieces": [asdict(piece) for piece in writer.pieces]}
    (into / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    return writer.pieces


def join(pieces: Path, into: Path) -> list[str]:
    """Make ``into``, which must not exist, from the pieces in ``pieces``; returns its files. Raises ConfigError."""
    if into.exists():
        raise ConfigError("into", f"{into} exists already")
    xz, files = _checked(pieces)
    into.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=into.parent, prefix=f".{into.name}.tmp-"))
    try:
        with ExitStack() as stack:
            reader = PieceReader(files)
            stack.callback(reader.close)
            stream = cast(IO[bytes], reader)
            if xz:
                stream = cast(IO[bytes], stack.enter_context(lzma.LZMAFile(stream)))
            with tarfile.open(fileobj=stream, mode="r|") as archive:
                for member in archive:
                    _extract(archive, member, scratch)
        scratch.rename(into)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    return sorted(path.name for path in into.iterdir())


def _extract(archive: tarfile.TarFile, member: tarfile.TarInfo, folder: Path) -> None:
    """One file of the stream, by its name alone. Raises ConfigError for a link, a folder or a path."""
    content = archive.extractfile(member) if member.isfile() else None
    if content is None or Path(member.name).name != member.name:
        raise ConfigError("pieces", f"{member.name!r} in the stream is no plain file of the folder")
    with (folder / member.name).open("xb") as file:
        shutil.copyfileobj(content, file)


def _checked(folder: Path) -> tuple[bool, list[Path]]:
    """Whether the stream is compressed, and its pieces in order. Raises ConfigError for one that is not as it was."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        listed = [Piece(**piece) for piece in manifest["pieces"]]
        xz = bool(manifest["xz"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError("pieces", f"{folder / MANIFEST} cannot be read: {error}") from None
    files = [folder / piece.name for piece in listed]
    for piece, file in zip(listed, files, strict=True):
        if file.parent != folder or not file.is_file():
            raise ConfigError("pieces", f"{piece.name} is missing")
        with file.open("rb") as handle:
            found = hashlib.file_digest(handle, "sha256").hexdigest()
        if found != piece.sha256:
            raise ConfigError("pieces", f"{piece.name} has sha256 {found}, expected {piece.sha256}")
    return xz, files


def run(arguments: Sequence[str] | None = None) -> None:
    """The command. Raises ConfigError."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.pack_weights", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    cut = verbs.add_parser("split", help="a folder into pieces")
    cut.add_argument("folder", type=Path)
    cut.add_argument("--into", type=Path, required=True)
    cut.add_argument("--piece-mib", type=float, default=PIECE_MIB)
    cut.add_argument("--xz", action="store_true", help="compress: fewer bytes to carry, minutes on one core")
    paste = verbs.add_parser("join", help="pieces into a folder")
    paste.add_argument("pieces", type=Path)
    paste.add_argument("--into", type=Path, required=True)
    given = parser.parse_args(arguments)
    if given.verb == "split":
        made = split(given.folder, given.into, int(given.piece_mib * 2**20), given.xz)
        print(f"{len(made)} pieces, {sum(piece.num_bytes for piece in made) / 2**20:.1f} MiB in {given.into}")
    else:
        print(f"{given.into}: {', '.join(join(given.pieces, given.into))}")


def main() -> None:
    """Entry point."""
    try:
        run()
    except ConfigError as error:
        print(f"error {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
