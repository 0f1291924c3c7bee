"""A model folder rounded to 8 or 4 bits and written in compressed-tensors' layout, which vLLM reads too."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import save_file

from paceline.errors import ConfigError
from paceline.layers.quantized import QuantizedWeight
from paceline.model_files import MADE_FROM, quantization_config, read_json
from paceline.models.loader import LazyTensors
from paceline.models.quantization.packing import pack
from paceline.models.quantization.round_to_nearest import GROUP_SIZE, ROWS_AT_ONCE, SCHEMES, round_to_nearest
from paceline.models.smoothed import Factors
from paceline.models.weight_files import INDEX_FILE, weight_files
from paceline.models.wrapped import text_config

Progress = Callable[[str, float], None]
SHARD_BYTES = 2 << 30  # a shard is held in memory until it is written
LINEAR = re.compile(r"\.layers\.\d+\..*(_proj|_proj_with_mqa)\.weight$")
LEFT_OUT = ("kv_b_proj.weight", "eh_proj.weight")  # split before use; the join of an MTP module
OWN_FILES = ("config.json", INDEX_FILE, "README.md")
COPIED = ("*.json", "*.jinja", "*.model", "*.txt")
TOP = 15  # of the codes of 4 bits
GROUP_SIZES = (32, 64, 128)  # input features that share a scale of 4 bits
PULLED_IN = (0.95, 0.9, 0.85, 0.8, 0.75, 0.7)


@dataclass(frozen=True)
class Written:
    """Bytes of the weights, and the layers that were rounded."""

    bytes_before: int
    bytes_after: int
    layers: int


@dataclass(frozen=True)
class FourBits:
    """A weight in groups with whole zero points: element (n, k) is scales[n, g] * (codes[n, k] - zeros[n, g]),
    g = k // group_size."""

    codes: torch.Tensor  # uint8 [out_features, in_features], 0 to TOP
    scales: torch.Tensor  # float16 [out_features, groups]
    zeros: torch.Tensor  # uint8, shaped as scales
    group_size: int

    @classmethod
    def joined(cls, parts: Sequence[FourBits], dim: int) -> FourBits:
        """Parts beside each other, of one group size: outputs along dimension 0, whole groups along dimension 1."""
        codes, scales, zeros = ([getattr(part, name) for part in parts] for name in ("codes", "scales", "zeros"))
        return cls(torch.cat(codes, dim), torch.cat(scales, dim), torch.cat(zeros, dim), parts[0].group_size)

    def dequantised(self) -> torch.Tensor:
        """The weight, float32 [out_features, in_features]."""
        groups = torch.arange(self.codes.shape[1]) // self.group_size
        return self.scales.float()[:, groups] * (self.codes.float() - self.zeros.float()[:, groups])


def write_quantised(
    source: Path,
    folder: Path,
    scheme: str,
    progress: Progress,
    found: Mapping[str, FourBits] = MappingProxyType({}),
    factors: Mapping[str, Factors] = MappingProxyType({}),
    group_size: int = GROUP_SIZE,
) -> Written:
    """Round the linear layers of ``source`` and write a model into ``folder``, which exists and is empty.

    found: codes of weights by name, for a scheme of 4 bits; other weights are rounded to the nearest code. Embedding,
    LM head, norms, routers, MLA's kv_b_proj and the joins of MTP modules stay as they are. factors: of tensors by name,
    which have them before anything is rounded. group_size: one of GROUP_SIZES, of schemes of 4 bits. Raises ConfigError
    for what ``check_source`` refuses.
    """
    raw = check_source(source, scheme, group_size)
    files = weight_files(source)
    stored = LazyTensors.of(source, torch.float32)
    rounded = _linear_names(stored)
    shards = _Shards(folder)
    for i, name in enumerate(stored):
        progress("rounding weights", i / len(stored))
        tensor = factors[name](stored.stored(name)) if name in factors else stored.stored(name)
        if name not in rounded:
            shards.add(name, tensor)
            continue
        for last, part in _rounded(tensor, scheme, group_size, found.get(name)).items():
            shards.add(f"{name.removesuffix('weight')}{last}", part)
    shards.finish()
    plain = sorted(name.removesuffix(".weight") for name in stored if _is_ignored(name, stored, rounded))
    config = raw | {MADE_FROM: source.name, "quantization_config": quantised_config(scheme, plain, group_size)}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for pattern in COPIED:
        for file in source.glob(pattern):
            if file.name not in OWN_FILES:
                shutil.copyfile(file, folder / file.name)
    progress("rounding weights", 1.0)
    return Written(sum(file.stat().st_size for file in files), shards.total, len(rounded))


def check_source(source: Path, scheme: str, group_size: int = GROUP_SIZE) -> dict[str, Any]:
    """The config.json of ``source``, of its language model alone. Raises ConfigError for what ``write_quantised``
    cannot write: another scheme or group size, weights that are quantised already, no layers that are known, and layers
    that are no whole groups."""
    if scheme not in SCHEMES:
        raise ConfigError("scheme", f"{scheme!r} is not one of {', '.join(SCHEMES)}")
    if group_size not in GROUP_SIZES:
        raise ConfigError("group_size", f"{group_size} is not one of {', '.join(map(str, GROUP_SIZES))}")
    raw = dict(text_config(read_json(source / "config.json")))
    if quantization_config(raw) is not None:
        raise ConfigError("model", f"{source} is quantised already; give the folder of its floats")
    stored = LazyTensors.of(source, torch.float32)
    names = _linear_names(stored)
    if not names:
        raise ConfigError("model", f"{source} has no linear layers that are known here")
    if group_size == GROUP_SIZE:  # whose last group may be a shorter one
        return raw
    if not scheme.startswith("w4"):
        raise ConfigError("group_size", f"{scheme} has a scale for each output feature; w4a8 and w4a16 have groups")
    for name in sorted(names):
        if (columns := stored.layout(name)[1][1]) % group_size:
            raise ConfigError("group_size", f"groups of {group_size} do not divide the {columns} columns of {name}")
    return raw


def quantised_config(scheme: str, ignore: list[str], group_size: int = GROUP_SIZE) -> dict[str, Any]:
    """The section of config.json about a scheme; ignore: layers that stay floats; group_size: of 4 bits."""
    four = scheme.startswith("w4")
    weights: dict[str, Any] = {
        "num_bits": 4 if four else 8, "type": "int", "symmetric": not four, "dynamic": False,
        "strategy": "group" if four else "channel", "group_size": group_size if four else None, "observer": "minmax",
    }  # fmt: skip
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token"}
    rounds_inputs = scheme.endswith("a8")
    layout = "int-quantized" if scheme == "w8a8" else "pack-quantized"
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs if rounds_inputs else None}
    return {
        "quant_method": "compressed-tensors", "format": layout, "quantization_status": "compressed",
        "config_groups": {"group_0": group | {"output_activations": None}}, "ignore": ignore, "kv_cache_scheme": None,
    }  # fmt: skip


def _linear_names(stored: LazyTensors) -> set[str]:
    """The weights that are rounded."""
    found = (name for name in stored if LINEAR.search(name) is not None and not name.endswith(LEFT_OUT))
    return {name for name in found if len(stored.layout(name)[1]) == 2}


def _is_ignored(name: str, stored: LazyTensors, rounded: set[str]) -> bool:
    matrix = name.endswith(".weight") and len(stored.layout(name)[1]) == 2
    return matrix and name not in rounded and "embed_tokens" not in name


def _rounded(tensor: torch.Tensor, scheme: str, group_size: int, found: FourBits | None) -> Mapping[str, torch.Tensor]:
    """What a weight becomes, by the last part of a name."""
    if scheme.startswith("w4"):
        return _in_file(_four_bits(tensor, group_size) if found is None else found)
    return _eight_bits(tensor, packed=scheme != "w8a8")


def as_written(weight: torch.Tensor, scheme: str, group_size: int = GROUP_SIZE) -> torch.Tensor:
    """What the nearest codes of a weight stand for, float32 [out_features, in_features]. group_size: of 4 bits."""
    if scheme.startswith("w4"):
        return _four_bits(weight, group_size).dequantised()
    return round_to_nearest(weight, "w8a8").dequantised()


def _eight_bits(tensor: torch.Tensor, packed: bool) -> Mapping[str, torch.Tensor]:
    weight: QuantizedWeight = round_to_nearest(tensor, "w8a8")
    if not packed:
        return {"weight": weight.codes, "weight_scale": weight.scales}
    return _packed(weight.codes.to(torch.int16) + 128, 8) | {"weight_scale": weight.scales}


def _four_bits(tensor: torch.Tensor, group_size: int) -> FourBits:
    """Groups with a whole zero point, which this layout has, where round_to_nearest has a minimum of any size."""
    return FourBits.joined([four_bit_rows(rows, group_size) for rows in torch.split(tensor, ROWS_AT_ONCE)], dim=0)


def _in_file(weight: FourBits) -> Mapping[str, torch.Tensor]:
    return _packed(weight.codes, 4) | {
        "weight_scale": weight.scales,
        "weight_zero_point": pack(weight.zeros.t().contiguous(), 4).t().contiguous(),
    }


def four_bit_rows(rows: torch.Tensor, group_size: int) -> FourBits:
    """The nearest codes of ``rows``, [rows, columns] of floats. Each group's ends are pulled in by the share that
    leaves the smallest sum of squared errors.
    """
    missing = -rows.shape[1] % group_size
    groups = torch.nn.functional.pad(rows.float(), (0, missing)).view(rows.shape[0], -1, group_size)
    low, high = groups.amin(dim=2).clamp(max=0.0), groups.amax(dim=2).clamp(min=0.0)
    best = _rounded_between(groups, low, high)
    for share in PULLED_IN:
        other = _rounded_between(groups, low * share, high * share)
        better = other[3] < best[3]
        codes = torch.where(better.unsqueeze(2), other[0], best[0])
        best = (codes, *(torch.where(better, new, old) for new, old in zip(other[1:], best[1:], strict=True)))
    codes, scales, zeros, _ = best
    codes = codes.view(rows.shape[0], -1)[:, : rows.shape[1]]
    return FourBits(codes.to(torch.uint8).contiguous(), scales.half(), zeros.to(torch.uint8), group_size)


def _rounded_between(groups: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Codes, scales, zero points and squared errors of groups whose codes go from ``low`` to ``high``."""
    scales = ((high - low) / TOP).half().float()
    scales = torch.where(scales == 0, torch.ones_like(scales), scales)
    zeros = (-low / scales).round().clamp(0, TOP)
    codes = ((groups / scales.unsqueeze(2)).round() + zeros.unsqueeze(2)).clamp(0, TOP)
    errors = ((codes - zeros.unsqueeze(2)) * scales.unsqueeze(2) - groups).square().sum(dim=2)
    return codes, scales, zeros, errors


def _packed(codes: torch.Tensor, bits: int) -> dict[str, torch.Tensor]:
    """codes: from 0, [rows, columns]."""
    return {
        "weight_packed": pack(codes.to(torch.uint8), bits),
        "weight_shape": torch.tensor(codes.shape, dtype=torch.int64),
    }


class _Shards:
    """Tensors as several files and their index."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._held, self._size = folder, dict[str, torch.Tensor](), 0
        self._map: dict[str, str] = {}
        self.total = 0  # bytes of the files written so far

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Hold a tensor, writing those before it where they fill a file."""
        if self._held and self._size + tensor.nbytes > SHARD_BYTES:
            self._write()
        self._held[name] = tensor.contiguous()
        self._size += tensor.nbytes

    def _write(self) -> None:
        name = f"model-{len(set(self._map.values())) + 1:05}.safetensors"
        save_file(self._held, self._folder / name, metadata={"format": "pt"})
        (self._folder / name).chmod(0o644)  # save_file makes it readable by its owner alone
        self._map |= dict.fromkeys(self._held, name)
        self.total += (self._folder / name).stat().st_size
        self._held, self._size = {}, 0

    def finish(self) -> None:
        """Write what is left, and the index."""
        self._write()
        index = {"metadata": {"total_size": self.total}, "weight_map": self._map}
        (self._folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
