"""What a node holds of a checkpoint's weights, in bytes: noted as a dry run reads them, by their shapes and types."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

import torch

from paceline.layers.file_tables import FileTables
from paceline.layers.packed import GROUP_MULTIPLE
from paceline.layers.quantized import LinearWeight, QuantizedWeight
from paceline.models.announced import Announced
from paceline.models.quantization.fusing import fuse_layers

PANEL = 32  # output features that lie together, of kernels/matrix.h
FLOAT32 = ("bias", ".gate.weight", ".router.weight", "sinks")  # ends of names: float32, whatever a node's dtype is
FLOAT32_NORMS = (*FLOAT32, "norm.weight")  # of a family whose norms are float32 too
FOLDED = "kv_b_proj.weight"  # into other products, as floats
TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # multiplied at once
SCALES = ("scales", "weight_scale", "weight_scale_inv")  # last parts of names, by scheme
IN_HALVES = ("F16", "BF16", "U8")  # stored types of scales that float16 is taken to hold; U8: MXFP4's powers of two


@dataclass(frozen=True)
class Node:
    """What is to hold the weights."""

    dtype: torch.dtype
    on_gpu: bool


@dataclass(frozen=True)
class Steps:
    """Runs of groups that share a step, as in GGUF's blocks of 256, of a weight on a CPU. A rank whose columns part a
    run has scales in float32."""

    columns: int
    run: int  # columns of one
    num_bytes: int  # that the whole weight takes more then

    def of_rank(self, degree: int) -> int:
        """Bytes on one rank of ``degree``, more than its share of the weight as it lies."""
        return -(-self.num_bytes // degree) if self.columns // degree % self.run else 0


class PlannedWeights(Mapping[str, LinearWeight]):
    """Weights without memory; it notes which were read."""

    def __init__(
        self,
        weights: Mapping[str, LinearWeight],
        announced: Mapping[str, Announced],
        node: Node,
        sources: Mapping[str, str] | None = None,
        float32: tuple[str, ...] = FLOAT32,
    ) -> None:
        """announced: the checkpoint's tensors. sources: their names there, by those of ``weights``; None: the same.
        float32: ends of names, see FLOAT32."""
        self._weights, self._announced, self._node, self._sources = weights, announced, node, sources or {}
        self._float32 = float32
        self.read: dict[str, LinearWeight] = {}

    def __getitem__(self, name: str) -> LinearWeight:
        found = self._weights[name]
        self.read[name] = found
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    def sizes(self) -> dict[str, int]:
        """Bytes of what was read, by name. What is multiplied at once, but lies in unlike ways, counts as the one
        weight that a node makes of it, under the name of the first."""
        found = {name: self._bytes(name, weight, self._has_halves(name)) for name, weight in self.read.items()}
        for name in self.read:
            together = next((names for names in TOGETHER if name.endswith(f".{names[0]}.weight")), ())
            layer = name.removesuffix(f"{together[0]}.weight") if together else ""
            parts = {own: self.read[own] for part in together if (own := f"{layer}{part}.weight") in self.read}
            if len({self._kind(own) for own in parts}) > 1:
                halves = all(map(self._has_halves, parts))
                found |= dict.fromkeys(parts, 0) | {name: self._bytes(name, fuse_layers(parts), halves)}
        return found

    def steps(self) -> dict[str, Steps]:
        """What was read in steps, by name."""
        return {name: found for name, weight in self.read.items() if (found := self._steps(weight)) is not None}

    def _steps(self, weight: LinearWeight) -> Steps | None:
        if self._node.on_gpu or not _in_steps(weight):
            return None
        assert isinstance(weight, QuantizedWeight)
        assert weight.tables is not None
        more = panels_bytes(replace(weight, tables=None), halves=False) - panels_bytes(weight, halves=False)
        return Steps(weight.shape[1], weight.tables.span * weight.group_size, more)

    def _kind(self, name: str) -> tuple[object, ...]:
        weight = self.read[name]
        if isinstance(weight, torch.Tensor):
            return ()
        return weight.bits, weight.group_size, weight.minimums is None, self._has_halves(name)

    def _has_halves(self, name: str) -> bool:
        """Whether float16 is taken to hold the scales of a weight: not where each is a step times a whole number."""
        if _in_steps(self.read[name]):
            return False
        layer = self._sources.get(name, name).removesuffix(".weight")
        scales = (self._announced[own] for last in SCALES if (own := f"{layer}.{last}") in self._announced)
        return all(found.dtype in IN_HALVES for found in scales)

    def _bytes(self, name: str, weight: LinearWeight, halves: bool) -> int:
        if name.endswith(self._float32):
            return 4 * prod(weight.shape)
        if isinstance(weight, torch.Tensor):
            return _tensor_bytes(name, weight, self._node)
        floats = self._node.dtype.itemsize * prod(weight.shape)
        if name.endswith(FOLDED):
            return floats
        codes = self._codes_bytes(weight, halves)
        if name != TABLE:
            return codes
        tied = HEAD not in self.read and not (self._node.on_gpu and weight.float4)
        return floats + codes if tied else floats  # rows are looked up as floats

    def _codes_bytes(self, weight: QuantizedWeight, halves: bool) -> int:
        if self._node.on_gpu:
            return gpu_bytes(weight, self._node.dtype)
        return panels_bytes(weight, halves and weight.minimums is None)


def _in_steps(weight: LinearWeight) -> bool:
    return isinstance(weight, QuantizedWeight) and weight.tables is not None and weight.tables.scale_steps is not None


def _tensor_bytes(name: str, tensor: torch.Tensor, node: Node) -> int:
    """Floats as they are; gpt-oss's MXFP4 as stored, with scales in float16, or unpacked on a GPU."""
    if tensor.is_floating_point():
        return tensor.nbytes
    if name.endswith("_blocks"):
        return (2 * node.dtype.itemsize if node.on_gpu else 1) * tensor.numel()
    return 0 if node.on_gpu else 2 * tensor.numel()


def panels_bytes(weight: QuantizedWeight, halves: bool) -> int:
    """Bytes of a weight for the CPU's kernels, as kernels/matrix.h lays it out. halves: its scales lie as float16."""
    rows, columns = weight.shape
    group = min(columns, weight.rounded_together)
    elements = columns // group * _padded(group) + _padded(columns % group)
    tables, groups = (2 if halves else 4) * (1 if weight.minimums is None else 2), -(-columns // group)
    tables *= 1 if weight.has_row_scales else groups
    if weight.tables is not None and not weight.has_row_scales:
        tables = _file_tables_bytes(weight.tables, groups)
    return -(-rows // PANEL) * PANEL * (tables + elements * weight.bits // 8)


def _file_tables_bytes(tables: FileTables, groups: int) -> int:
    """Bytes of an output feature's tables, as they lie in its file: NVFP4's with the row's number; GGUF's, in float16,
    or whole numbers with the steps of their runs."""
    if tables.numbers is not None:
        return groups + 4
    both = 1 if tables.lowest is None else 2
    if tables.scale_steps is None:
        return 2 * both * groups
    return both * groups + 2 * both * tables.scale_steps.shape[1]


def gpu_bytes(weight: QuantizedWeight, dtype: torch.dtype) -> int:
    """Bytes of a weight on a GPU, as exact_products.Matrices has it. dtype: what FP4 becomes, which has no kernel."""
    rows, columns = weight.shape
    if weight.float4:
        return dtype.itemsize * rows * columns
    together = weight.rounded_together if weight.int8_activations else weight.group_size
    in_halves = weight.bits == 4 and (together % 2 == 0 or together >= columns)
    tables = 4 * weight.scales.numel() * (1 if weight.minimums is None else 2)
    return rows * (-(-columns // 2) if in_halves else columns) + tables


def _padded(length: int) -> int:
    return -(-length // GROUP_MULTIPLE) * GROUP_MULTIPLE
