"""Weights from safetensors, each tensor consumed exactly once (algorithms.md E12).

Quantised layers arrive as ``QuantizedWeight`` under the name that their weight has in a checkpoint of floats
(models.quantization), so whoever takes weights sees no difference in names.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open

from paceline.errors import ConfigError
from paceline.layers.bits import by_kernels
from paceline.layers.quantized import LinearWeight, QuantizedWeight
from paceline.layers.shared_weights import SMALLEST, kept
from paceline.model_files import read_json
from paceline.models.one_rank import ONE_RANK, OneRank
from paceline.models.quantization.round_to_nearest import head_scheme, round_to_nearest
from paceline.models.weight_files import weight_files
from paceline.models.wrapped import Naming, naming, same_name

log = logging.getLogger(__name__)

NOT_ROUNDED = "none"
HARMLESS = ("rotary_emb.inv_freq",)  # derived from the config, written by old versions of transformers
TIED = "lm_head.weight"
REPORT_EVERY_S = 2.0


class WeightBag:
    """Tensors by name, each read when it is taken. ``finish`` complains about what nobody took.

    ``scheme``: what weights of linear layers are rounded to as they are taken, see ``rounded``. ``ranks``: of the node
    whose weights they are.
    """

    ranks: OneRank = ONE_RANK

    def __init__(self, tensors: Mapping[str, LinearWeight]) -> None:
        self._tensors: Mapping[str, Any] = tensors
        self._left = set(tensors)
        self._device: torch.device | None = None
        self.scheme = NOT_ROUNDED
        self._dtype = torch.bfloat16
        self._reported = time.monotonic()
        self._expanded: list[str] = []  # quantised weights that were taken as floats

    def onto(self, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> WeightBag:
        """Tensors are taken from now on onto ``device``, whatever they were read on. Returns itself.

        dtype: of quantised weights that are needed as floats.
        """
        self._device, self._dtype = device, dtype
        return self

    def rounded(self, scheme: str) -> WeightBag:
        """Weights of linear layers are rounded from now on as they are taken. Returns itself.

        scheme: one of quantization.round_to_nearest.SCHEMES, or ``none``.
        """
        self.scheme = scheme
        return self

    def take(self, name: str, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        """The tensor called ``name``, of ``shape``; floats where it is quantised. Raises ConfigError when it is missing
        or shaped otherwise."""
        tensor = self._claimed(name, shape)
        if isinstance(tensor, QuantizedWeight):
            self._expanded.append(name)
            tensor = tensor.dequantised().to(self._dtype)
        # A view would keep the whole file in memory for as long as a norm lives.
        return tensor.clone() if tensor.nbytes < SMALLEST else tensor

    def take_linear(self, name: str, shape: tuple[int, int] | None = None) -> LinearWeight:
        """The weight of a linear layer, [out_features, in_features], as the checkpoint has it or ``rounded``. See
        ``take``."""
        return self.take_head(name, shape) if name == TIED else rounded_weight(self._linear(name, shape), self.scheme)

    def take_head(self, name: str, shape: tuple[int, int] | None = None) -> LinearWeight:
        """The same of an LM head, whatever its name."""
        return self.as_head(self._linear(name, shape))

    def _linear(self, name: str, shape: tuple[int, int] | None) -> LinearWeight:
        found = self._claimed(name, shape)
        return found.clone() if isinstance(found, torch.Tensor) and found.nbytes < SMALLEST else found

    def as_head(self, weight: LinearWeight) -> LinearWeight:
        """The weight of an LM head, which may be the embedding: ``rounded`` where linear layers are."""
        return rounded_weight(weight, head_scheme(self.scheme))

    def _claimed(self, name: str, shape: tuple[int, ...] | None) -> LinearWeight:
        if name not in self._left:
            raise ConfigError("model", f"tensor {name} is missing from the checkpoint, or was asked for twice")
        self._left.remove(name)
        self._report()
        tensor = self._tensors[name]
        if shape is not None and tuple(tensor.shape) != tuple(shape):
            raise ConfigError("model", f"tensor {name} has shape {tuple(tensor.shape)}, expected {tuple(shape)}")
        found: LinearWeight = tensor if self._device is None else moved(tensor, self._device)
        if isinstance(found, QuantizedWeight) and found.float4 and not by_kernels(found.codes.device):
            return found.dequantised().to(self._dtype)
        return found

    def _report(self) -> None:
        """A line in the log now and then: the weights of a large model take minutes."""
        now = time.monotonic()
        if now - self._reported >= REPORT_EVERY_S:
            self._reported = now
            taken = len(self._tensors) - len(self._left)
            log.info("%d of %d weights are loaded", taken, len(self._tensors))

    def take_table(self, name: str, shape: tuple[int, int]) -> tuple[torch.Tensor, LinearWeight]:
        """A table of rows, such as an embedding, twice: as floats to look rows up in, and as the checkpoint has it for
        an LM head that shares it. On the CPU the floats are a copy, shared where weights are (layers.shared_weights).
        """
        found = self._claimed(name, shape)
        table = found.dequantised().to(self._dtype) if isinstance(found, QuantizedWeight) else found
        if table.device.type == "cpu":
            table = kept(shape, table.dtype, lambda copy: copy.copy_(table))
        return table, found if isinstance(found, QuantizedWeight) else table

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor that is still there. Raises ConfigError when it is missing."""
        if name not in self._left:
            raise ConfigError("model", f"tensor {name} is missing from the checkpoint, or was taken before")
        return tuple(self._tensors[name].shape)

    def holds(self, name: str) -> bool:
        """Whether a tensor is still there."""
        return name in self._left

    def finish(self) -> None:
        """Raise ConfigError naming every tensor left over; a tied head's copy and rotary buffers are harmless."""
        left = sorted(n for n in self._left if n != TIED and not n.endswith(HARMLESS) and not self._adds_nothing(n))
        self._tensors, self._left = {}, set()  # the files may be closed now
        if self._expanded:
            first, dtype = self._expanded[0], str(self._dtype).removeprefix("torch.")
            log.info("%d quantised weights are kept as %s, for example %s", len(self._expanded), dtype, first)
        if left:
            raise ConfigError("model", f"{len(left)} tensors that this architecture does not know: {', '.join(left)}")

    def _adds_nothing(self, name: str) -> bool:
        """Whether it is a bias of zeros: GPTQ's writers put one beside layers that have none."""
        tensor = self._tensors[name] if name.endswith(".bias") else None
        return isinstance(tensor, torch.Tensor) and not tensor.is_meta and not bool(tensor.any())


def moved(weight: LinearWeight, device: torch.device) -> LinearWeight:
    """``weight`` on ``device``; itself where it is there."""
    if isinstance(weight, torch.Tensor) or weight.codes.device == device:
        return weight.to(device) if isinstance(weight, torch.Tensor) else weight
    minimums = None if weight.minimums is None else weight.minimums.to(device)
    codes, scales = weight.codes.to(device), weight.scales.to(device)
    return replace(weight, codes=codes, scales=scales, minimums=minimums, tables=None)  # which only the CPU reads


def rounded_weight(weight: LinearWeight, scheme: str) -> LinearWeight:
    """``weight`` by a scheme of ``--quantize``. Raises ConfigError where the checkpoint has rounded it already."""
    if scheme == NOT_ROUNDED:
        return weight
    if isinstance(weight, QuantizedWeight):
        raise rounded_already()
    return round_to_nearest(weight, scheme)


def rounded_already() -> ConfigError:
    """What is said to a scheme for a checkpoint that has one."""
    return ConfigError("quantize", f"the checkpoint is quantised already: set quantize to {NOT_ROUNDED}")


class LazyTensors(Mapping[str, torch.Tensor]):
    """Tensors of several safetensors files, read on access; floating ones are converted to ``dtype``."""

    def __init__(self, files: list[Path], dtype: torch.dtype, names: Naming = same_name) -> None:
        self._dtype = dtype
        self._where: dict[str, tuple[Any, str]] = {}  # tensor name -> the open file that holds it, its name there
        for file in files:
            opened = _open(file)
            for stored in opened.keys():  # noqa: SIM118  (not a mapping)
                if (name := names(stored)) is None:
                    continue
                if name in self._where:
                    raise ConfigError("model", f"tensor {name} is twice in the files of {file.parent}")
                self._where[name] = (opened, stored)

    @classmethod
    def of(cls, folder: Path, dtype: torch.dtype) -> Self:
        """The tensors of a folder's language model, by its own names (models.wrapped)."""
        return cls(weight_files(folder), dtype, naming(read_json(folder / "config.json")))

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self.stored(name)
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor

    def stored(self, name: str) -> torch.Tensor:
        """The tensor as it lies in its file."""
        opened, stored = self._where[name]
        tensor: torch.Tensor = opened.get_tensor(stored)
        return tensor

    def part(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        """The rows, or rows and columns, ``index`` of a tensor; the rest is not read."""
        opened, stored = self._where[name]
        tensor: torch.Tensor = opened.get_slice(stored)[index]
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor

    def layout(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Type, by safetensors' name for it (``BF16``, ``F8_E4M3``, ``I32``), and shape; nothing else is read."""
        opened, stored = self._where[name]
        found = opened.get_slice(stored)
        return str(found.get_dtype()), tuple(found.get_shape())

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ConfigError("model", f"{file} is not a readable safetensors file: {error}") from error
