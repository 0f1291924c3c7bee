"""A checkpoint's identity: what two nodes compare before they share a request."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from paceline.errors import ConfigError
from paceline.model_files import quantization_config, read_json
from paceline.models.weight_files import MAX_HEADER_BYTES, gguf_file, weight_files

EDGE_BYTES = 64 * 1024
SAMPLE_BYTES = 512


def weights_digest(folder: Path) -> str:
    """Identity of a folder's weights: cheap, stable across copies, 32 hex digits.

    Hashes names, sizes, headers, the first and last 64 KiB of each file, and 512 bytes in the middle of every tensor:
    a fine-tune that kept the embeddings and norms differs from its base only there. Where layers are quantised, also
    what config.json says about them, which decides what their codes mean.
    """
    digest = hashlib.blake2b(digest_size=16)
    config = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    if (quantised := quantization_config(config)) is not None:
        digest.update(json.dumps(quantised, sort_keys=True).encode())
    if (gguf := gguf_file(folder)) is not None:
        return _gguf_digest(gguf, digest)
    for file in weight_files(folder):
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as opened:
            header = opened.read(min(int.from_bytes(opened.read(8), "little"), MAX_HEADER_BYTES))
            digest.update(header)
            digest.update(opened.read(EDGE_BYTES))
            opened.seek(max(size - EDGE_BYTES, 0))
            digest.update(opened.read(EDGE_BYTES))
            for middle in _middles(file, header, size):
                opened.seek(middle)
                digest.update(opened.read(SAMPLE_BYTES))
    return digest.hexdigest()


def _gguf_digest(file: Path, digest: hashlib.blake2b) -> str:
    from paceline.models.gguf.file import GgufFile

    opened = GgufFile(file)
    for i, part in enumerate(opened.parts):
        places = [tensor for tensor in opened.tensors.values() if tensor.part == i]
        places.sort(key=lambda tensor: tensor.offset)
        size = part.stat().st_size
        begin = places[0].offset if places else min(size, MAX_HEADER_BYTES)
        digest.update(f"gguf\0{size}\0".encode())
        with part.open("rb") as stream:
            digest.update(stream.read(begin))
            for tensor in places:
                stream.seek(tensor.offset + tensor.num_bytes // 2)
                digest.update(stream.read(min(SAMPLE_BYTES, tensor.num_bytes)))
            stream.seek(max(size - EDGE_BYTES, 0))
            digest.update(stream.read(EDGE_BYTES))
    return digest.hexdigest()


def _middles(file: Path, header: bytes, size: int) -> list[int]:
    """Byte offset in the file, of ``size`` bytes, of the middle of every tensor. Raises ConfigError for a header whose
    offsets are none: whoever asks for a digest need not have opened the file as safetensors."""
    begin = 8 + len(header)
    try:
        entries = json.loads(header)
        ranges = [entry["data_offsets"] for name, entry in entries.items() if name != "__metadata__"]
        if all(isinstance(at, int) for low_high in ranges for at in low_high) and all(
            0 <= low <= high <= size - begin for low, high in ranges
        ):
            return [begin + (low + high) // 2 for low, high in ranges]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError("model", f"{file} has a damaged safetensors header") from error
    raise ConfigError("model", f"{file} has a safetensors header whose offsets do not fit the file")
