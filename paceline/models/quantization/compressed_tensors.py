"""``compressed-tensors``: int8, packed 4 or 8 bits, float8 and float4, by groups of layers that patterns name.

A group says how its layers' weights are quantised and whether their inputs are. Inputs in int8 get a scale per row
here, whatever scales the file has for them; inputs in float8 and float4 stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from paceline.layers.quantized import LinearWeight, QuantizedWeight
from paceline.models.quantization.base import (
    FLOATS,
    LayerTensor,
    LayerTensors,
    Scheme,
    check_groups,
    matrix,
    need,
    refused,
    whole,
)
from paceline.models.quantization.fp4 import SCALE, check_mxfp4, check_nvfp4, float4_weight, nvfp4_weight, powers_of_two
from paceline.models.quantization.fp8 import check_scales, fp8_weight
from paceline.models.quantization.packing import check_order, ordered_weight, unpack

OF_FP4 = ("nvfp4-pack-quantized", "mxfp4-pack-quantized")
FORMATS = ("int-quantized", "float-quantized", "naive-quantized", "pack-quantized", *OF_FP4, "mixed-precision", "dense")
WITH_GLOBAL = "tensor_group"  # strategy: scales of groups over one of the tensor
INTS = ("tensor", "channel", "group")
STRATEGIES = {  # by type and bits
    ("int", 4): INTS,
    ("int", 8): INTS,
    ("float", 8): ("tensor", "channel", "block"),
    ("float", 4): (WITH_GLOBAL, "group"),
}
EVERY_LINEAR = "Linear"
IN_WEIGHTS = ("weight_input", "weight_output")  # where a rotation is part of the weights as they lie
MAX_PATTERN = 512  # characters
REPEATED_REPEAT = re.compile(r"[*+}]\)*\)[*+{]")  # could take for ever on a name that does not match
ZERO, PACKED, ORDER, DIVISOR = "weight_zero_point", "weight_packed", "weight_g_idx", "weight_global_scale"


@dataclass(frozen=True)
class Group:
    """How some layers are quantised."""

    targets: tuple[str, ...]
    bits: int
    is_float: bool
    strategy: str
    group_size: int  # of strategies with groups; else 0
    block: tuple[int, int] | None  # of strategy block
    int8_activations: bool


def read_config(config: Mapping[str, Any]) -> Scheme:
    """See schemes.read_scheme."""
    _check_format(config.get("format", "dense"))
    sparsity = config.get("sparsity_config") or {}
    if isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense":
        raise refused(f"compressed-tensors with sparsity {sparsity.get('format')!r} is not supported")
    _check_transforms(config.get("transform_config") or {})
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise refused("compressed-tensors without config_groups is not supported")
    read = [_group(str(name), group) for name, group in groups.items()]
    return CompressedTensors(read, _patterns(config.get("ignore") or []))


def _check_transforms(config: Mapping[str, Any]) -> None:
    """Raise ConfigError for rotations (SpinQuant, QuIP) that a layer's rows would need while the model runs."""
    for name, group in (config.get("config_groups") or {}).items():
        for applied in group.get("apply") or []:
            if (place := applied.get("location")) not in IN_WEIGHTS:
                raise refused(f"compressed-tensors with transform {name} of {place!r} is not supported")


def _check_format(name: object) -> None:
    if name not in FORMATS:
        raise refused(f"compressed-tensors of format {name!r} is not supported ({', '.join(FORMATS)})")


def _group(name: str, raw: Any) -> Group:
    weights = raw.get("weights") if isinstance(raw, Mapping) else None
    if not isinstance(weights, Mapping):
        raise refused(f"compressed-tensors: {name} does not say how weights are quantised")
    if raw.get("format") is not None:
        _check_format(raw["format"])
    bits, kind, strategy = whole(weights, "num_bits"), weights.get("type", "int"), weights.get("strategy", "tensor")
    if (kind, bits) not in STRATEGIES:
        raise refused(f"compressed-tensors: {name} has {kind} weights of {bits} bits (int, float: 4, 8)")
    if strategy not in STRATEGIES[kind, bits]:
        raise refused(f"compressed-tensors: {name} has {kind} weights of {bits} bits with strategy {strategy!r}")
    if weights.get("dynamic") or raw.get("output_activations"):
        raise refused(f"compressed-tensors: {name} has dynamic weights or quantised outputs")
    group_size = whole(weights, "group_size") if strategy in ("group", WITH_GLOBAL) else 0
    block = weights.get("block_structure") if strategy == "block" else None
    if strategy == "block" and not (isinstance(block, list) and len(block) == 2 and all(_positive(b) for b in block)):
        raise refused(f"compressed-tensors: {name} has block_structure {block!r} (two sizes)")
    if strategy in ("group", WITH_GLOBAL) and group_size < 1:
        raise refused(f"compressed-tensors: {name} has group_size {group_size}")
    return Group(
        targets=_patterns(raw.get("targets") or []),
        bits=bits,
        is_float=kind == "float",
        strategy=str(strategy),
        group_size=group_size,
        block=(block[0], block[1]) if block else None,
        int8_activations=_int8_inputs(name, raw.get("input_activations"), kind),
    )


def _positive(size: object) -> bool:
    return isinstance(size, int) and size > 0


def _int8_inputs(name: str, inputs: Any, weights: object) -> bool:
    if not inputs:
        return False
    bits, kind = inputs.get("num_bits"), inputs.get("type", "int")
    if kind != weights or (bits != 8 and (kind, bits) != ("float", 4)):
        raise refused(f"compressed-tensors: {name} has inputs of {bits} bits ({kind}) for {weights} weights")
    return bool(kind == "int")


def _patterns(raw: Any) -> tuple[str, ...]:
    if not isinstance(raw, list) or not all(isinstance(pattern, str) for pattern in raw):
        raise refused("compressed-tensors: targets and ignore are lists of names")
    for pattern in raw:
        if not pattern.startswith("re:"):
            continue
        if len(pattern) > MAX_PATTERN or REPEATED_REPEAT.search(pattern):
            raise refused(f"compressed-tensors: pattern {pattern[:80]!r} may take too long")
        try:
            re.compile(pattern[3:])
        except re.error as error:
            raise refused(f"compressed-tensors: pattern {pattern!r} cannot be read: {error}") from None
    return tuple(raw)


def _named(layer: str, patterns: Sequence[str]) -> bool:
    return any(
        re.match(pattern[3:], layer) is not None if pattern.startswith("re:") else pattern == layer
        for pattern in patterns
    )


class CompressedTensors(Scheme):
    """Several groups, and what none of them may hold."""

    marks = frozenset((SCALE, ZERO, PACKED, "weight_shape", ORDER, DIVISOR))
    ignored = frozenset(
        ("input_scale", "input_zero_point", "input_global_scale", "k_scale", "v_scale", "q_scale", "output_scale")
    )

    def __init__(self, groups: Sequence[Group], ignore: Sequence[str]) -> None:
        self.groups, self.ignore = groups, ignore

    def group_of(self, layer: str) -> Group:
        """The group of a layer: one that names it before one of every linear layer. Raises ConfigError."""
        if _named(layer, self.ignore):
            raise refused(f"{layer} is quantised, but the config ignores it")
        found = next((group for group in self.groups if _named(layer, group.targets)), None)
        found = found or next((group for group in self.groups if EVERY_LINEAR in group.targets), None)
        if found is None:
            raise refused(f"{layer} is quantised, but the config has no group for it")
        return found

    def says_of(self, layer: str) -> Group:
        """See Scheme."""
        return self.group_of(layer)

    def check(self, layer: str, parts: LayerTensors) -> None:
        """See Scheme."""
        group = self.group_of(layer)
        if group.is_float:
            _check_floats(layer, parts, group)
            return
        rows, columns = _int_shape(layer, parts, group)
        check_groups(layer, group.group_size or columns, columns)
        groups = _num_groups(group, columns)
        check_order(layer, parts, ORDER, columns, groups)
        if ORDER in parts and group.int8_activations:
            raise refused(f"{layer}.{ORDER} puts the groups out of order, beside inputs in int8")
        scale = need(layer, parts, SCALE, FLOATS)
        if scale.shape not in (((), (1,), (1, 1)) if group.strategy == "tensor" else ((rows, groups),)):
            raise refused(f"{layer}.{SCALE} has shape {scale.shape} for strategy {group.strategy} of {rows} rows")
        if ZERO in parts:
            _check_zeros(layer, parts, group, (rows, groups))

    def read(self, layer: str, parts: LayerTensors) -> LinearWeight:
        """See Scheme."""
        group = self.group_of(layer)
        if group.is_float:
            return _floats(parts, group)
        rows, columns = _int_shape(layer, parts, group)
        shape, middle = (rows, _num_groups(group, columns)), 1 << (group.bits - 1)
        if PACKED in parts:
            unsigned = unpack(parts[PACKED].load(), group.bits)[:, :columns]
        else:
            unsigned = (parts["weight"].load().to(torch.int16) + middle).to(torch.uint8)
        zeros = torch.full(shape, middle) if ZERO not in parts else _zeros(parts[ZERO], group.bits, rows) + middle
        scales = parts[SCALE].load().float().reshape(-1, shape[1]).expand(shape)
        order, size = parts[ORDER].load() if ORDER in parts else None, group.group_size or columns
        read = ordered_weight(unsigned, zeros.expand(shape), scales, (group.bits, size), order)
        if isinstance(read, torch.Tensor):
            return read
        return replace(read, int8_activations=group.int8_activations)


def _check_floats(layer: str, parts: LayerTensors, group: Group) -> None:
    if group.bits == 8:
        check_scales(layer, parts, SCALE, group.block)
    elif group.strategy == WITH_GLOBAL:
        check_nvfp4(layer, parts, PACKED, group.group_size, DIVISOR)
    else:
        check_mxfp4(layer, parts, PACKED, group.group_size)


def _floats(parts: LayerTensors, group: Group) -> QuantizedWeight:
    if group.bits == 8:
        return fp8_weight(parts["weight"], parts[SCALE], group.block)
    codes, scales = parts[PACKED].load(), parts[SCALE].load()
    if group.strategy == WITH_GLOBAL:
        return nvfp4_weight(codes, scales, parts[DIVISOR].load(), group.group_size, divides=True)
    return float4_weight(codes, powers_of_two(scales), group.group_size)


def _num_groups(group: Group, columns: int) -> int:
    return -(-columns // group.group_size) if group.group_size else 1


def _int_shape(layer: str, parts: LayerTensors, group: Group) -> tuple[int, int]:
    """Output and input features of a layer of whole numbers. Raises ConfigError."""
    if PACKED not in parts:
        return matrix(layer, parts, "weight", ("I8",))
    rows, words = matrix(layer, parts, PACKED, ("I32",))
    shape = need(layer, parts, "weight_shape", ("I64", "I32"), (2,)).load()
    said = (rows, words * 32 // group.bits) if shape.is_meta else tuple(shape.tolist())  # meta: a dry run
    if said[0] != rows or -(-said[1] * group.bits // 32) != words:
        raise refused(f"{layer}.weight_shape says {said}, but {PACKED} has shape {(rows, words)}")
    return rows, int(said[1])


def _check_zeros(layer: str, parts: LayerTensors, group: Group, shape: tuple[int, int]) -> None:
    packed = (-(-shape[0] * group.bits // 32), shape[1])
    zero = need(layer, parts, ZERO, ("I8", "I32"))
    fits = (packed,) if zero.dtype == "I32" else ((), (1,), (1, 1), shape)
    if zero.shape not in fits:
        raise refused(f"{layer}.{ZERO} has shape {zero.shape} for {shape} scales")


def _zeros(part: LayerTensor, bits: int, rows: int) -> torch.Tensor:
    """Zero points of signed codes, [rows, groups] or one for all. Packed ones lie along the output features."""
    stored = part.load()
    if part.dtype == "I8":
        return stored.reshape(-1, stored.shape[-1] if stored.ndim == 2 else 1).to(torch.int16)
    return unpack(stored.t(), bits)[:, :rows].t().to(torch.int16) - (1 << (bits - 1))
