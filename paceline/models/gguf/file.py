"""The header of a GGUF file, read once and checked before anything in it is believed; tensors stay in the file.

A file that was split is read as one: its first part has the fields of the model, and each part has tensors of its own.
``gguf.GGUFReader`` takes every count and length of the file as it is: a made-up one keeps it busy for ever. It also
makes an array of each token, which takes seconds for a large vocabulary.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from paceline.errors import ConfigError
from paceline.models.weight_files import gguf_parts, part_name

MAGIC, VERSIONS = b"GGUF", (2, 3)
MAX_FIELDS, MAX_TENSORS = 1 << 16, 1 << 20
MAX_ITEMS = 1 << 22  # of one array; the largest vocabularies have some 2^18 tokens and merges
MAX_NAME, MAX_TEXT = 1 << 10, 1 << 24  # bytes
MAX_DIMS, MAX_ALIGNMENT = 4, 1 << 16
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # by value type
STRING, ARRAY = 8, 9
SPLIT_NO, SPLIT_COUNT, SPLIT_TENSORS = "split.no", "split.count", "split.tensors.count"


class _Damaged(Exception):
    """What is wrong with a file."""


@dataclass(frozen=True)
class GgufTensor:
    """One tensor's place. shape: as in PyTorch, the last dimension lies together."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int  # bytes from the beginning of the file
    num_bytes: int
    part: int = 0  # of a file that was split


class GgufFile:
    """A file that was checked, or all parts of one: its fields, and its tensors by name."""

    def __init__(self, path: Path) -> None:
        """path: the file, or any part of it. Raises ConfigError for one that is missing, or not a GGUF file that can be
        read here, and for parts that do not belong together."""
        self.parts = gguf_parts(path)
        self.path = self.parts[0]
        opened = [_opened(part) for part in self.parts]
        self._bytes = [data for data, _, _ in opened]
        self.fields = opened[0][1]
        _check_parts(self.parts, [fields for _, fields, _ in opened], sum(len(tensors) for _, _, tensors in opened))
        self.tensors: dict[str, GgufTensor] = {}
        for i, (_, _, tensors) in enumerate(opened):
            if (twice := next((name for name in tensors if name in self.tensors), None)) is not None:
                raise ConfigError("model", f"tensor {twice} is in two parts of {self.path.name}")
            self.tensors |= {name: replace(tensor, part=i) for name, tensor in tensors.items()}

    def rows(self, tensor: GgufTensor) -> npt.NDArray[np.uint8]:
        """The bytes of a tensor, [rows, bytes of a row], read when they are used."""
        data = np.frombuffer(self._bytes[tensor.part], np.uint8, tensor.num_bytes, tensor.offset)
        return data.reshape(math.prod(tensor.shape[:-1]), -1)


def _opened(path: Path) -> tuple[mmap.mmap, dict[str, Any], dict[str, GgufTensor]]:
    """The bytes of one file, and what its header says. Raises ConfigError."""
    try:
        with path.open("rb") as opened:
            data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        return data, *_Header(data).read()
    except (_Damaged, struct.error, UnicodeDecodeError, ValueError, OSError) as error:
        raise ConfigError("model", f"{path} is not a GGUF file that can be read here: {error}") from None


def _check_parts(parts: Sequence[Path], fields: Sequence[Mapping[str, Any]], num_tensors: int) -> None:
    """Raise ConfigError for parts that do not say of themselves which they are, or are of another file than the first.
    num_tensors: of all of them."""
    first, count = fields[0], len(parts)
    if count == 1:
        if (said := first.get(SPLIT_COUNT, 0)) not in (0, 1):
            named = f" in {part_name('', 0, said)}" if isinstance(said, int) else " as a part's"
            raise ConfigError(
                "model", f"{parts[0].name}: it is one of {said!r:.20} files, but its name does not end{named}"
            )
        return
    for i, (part, own) in enumerate(zip(parts, fields, strict=True)):
        for key, expected in ((SPLIT_NO, i), (SPLIT_COUNT, count), (SPLIT_TENSORS, num_tensors)):
            if (value := own.get(key)) != expected or isinstance(value, bool):
                raise ConfigError("model", f"{part.name}: {key} is {value!r:.20}, expected {expected}")
        others = [name for name in own if name != SPLIT_NO and name in first and own[name] != first[name]]
        if others:
            raise ConfigError("model", f"{part.name} is of another file than {parts[0].name}: {others[0]} differs")


class _Header:
    """A cursor over the header of a file."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._at = data, 0

    def read(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        """Fields and tensors. Raises _Damaged and struct.error."""
        if self._take(4) != MAGIC:
            raise _Damaged("it does not begin with GGUF")
        version, num_tensors, num_fields = self._unpack("IQQ")
        if version not in VERSIONS:
            raise _Damaged(f"version {version} is not supported ({VERSIONS[0]}, {VERSIONS[1]}, little-endian)")
        if num_tensors > MAX_TENSORS or num_fields > MAX_FIELDS:
            raise _Damaged(f"it announces {num_tensors} tensors and {num_fields} fields")
        fields: dict[str, Any] = {}
        for _ in range(num_fields):
            name = self._text(MAX_NAME)
            if name in fields:
                raise _Damaged(f"field {name} is there twice")
            (kind,) = self._unpack("I")
            fields[name] = self._value(kind)
        found = [self._tensor() for _ in range(num_tensors)]
        alignment = fields.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise _Damaged(f"general.alignment {alignment!r} is no power of two up to {MAX_ALIGNMENT}")
        begin = -(-self._at // alignment) * alignment
        return fields, dict(self._placed(found, begin, alignment))

    def _placed(self, found: list[GgufTensor], begin: int, alignment: int) -> Iterator[tuple[str, GgufTensor]]:
        """Tensors with offsets from the beginning of the file; none lies outside it or over another."""
        end = 0
        for tensor in sorted(found, key=lambda tensor: tensor.offset):
            if tensor.offset % alignment:
                raise _Damaged(f"tensor {tensor.name} does not begin at a multiple of {alignment} bytes")
            if tensor.offset < end:
                raise _Damaged(f"tensor {tensor.name} lies over another one")
            end = tensor.offset + tensor.num_bytes
            if begin + end > len(self._data):
                raise _Damaged(f"tensor {tensor.name} ends after the file")
            yield (
                tensor.name,
                GgufTensor(tensor.name, tensor.shape, tensor.kind, begin + tensor.offset, tensor.num_bytes),
            )
        if len({tensor.name for tensor in found}) != len(found):
            raise _Damaged("two tensors have one name")

    def _tensor(self) -> GgufTensor:
        name = self._text(MAX_NAME)
        (num_dims,) = self._unpack("I")
        if not 1 <= num_dims <= MAX_DIMS:
            raise _Damaged(f"tensor {name} has {num_dims} dimensions")
        shape = tuple(reversed(self._unpack(f"{num_dims}Q")))
        number, offset = self._unpack("IQ")
        if number not in set(GGMLQuantizationType):
            raise _Damaged(f"tensor {name} has the unknown type {number}")
        kind = GGMLQuantizationType(number)
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if min(shape) < 1 or math.prod(shape) > len(self._data) * block or shape[-1] % block:
            raise _Damaged(f"tensor {name} cannot have shape {shape} in {kind.name}")
        return GgufTensor(name, shape, kind, offset, math.prod(shape) // block * block_bytes)

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._text(MAX_TEXT)
        if kind != ARRAY:
            return self._scalars(kind, 1)[0]
        item, count = self._unpack("IQ")
        if count > MAX_ITEMS:
            raise _Damaged(f"an array of {count} values")
        if item == STRING:
            return [self._text(MAX_TEXT) for _ in range(count)]
        return list(self._scalars(item, count))

    def _scalars(self, kind: int, count: int) -> tuple[Any, ...]:
        if kind not in SCALARS:
            raise _Damaged(f"a value of type {kind}, which cannot stand here")
        return self._unpack(f"{count}{SCALARS[kind]}")

    def _text(self, limit: int) -> str:
        (length,) = self._unpack("Q")
        if length > limit:
            raise _Damaged(f"a text of {length} bytes")
        return self._take(length).decode("utf-8")

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        layout = f"<{layout}"
        values = struct.unpack_from(layout, self._data, self._at)
        self._at += struct.calcsize(layout)
        return values

    def _take(self, length: int) -> bytes:
        taken = self._data[self._at : self._at + length]
        if len(taken) < length:
            raise _Damaged("it ends within its header")
        self._at += length
        return taken
