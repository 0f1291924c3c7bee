"""``modelopt`` (NVIDIA Model Optimizer): NVFP4 and FP8 weights, layer by layer. Activations stay as they are.

What a layer has says how it is quantised: codes of FP4 lie as bytes, those of FP8 as float8.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.layers.quantized import QuantizedWeight
from paceline.models.quantization.base import FP8, LayerTensors, Scheme, refused, whole
from paceline.models.quantization.fp4 import SCALE, check_nvfp4, nvfp4_weight
from paceline.models.quantization.fp8 import check_scales, fp8_weight

ALGORITHMS = ("NVFP4", "W4A16_NVFP4", "FP8", "MIXED_PRECISION")
WEIGHT, OF_TENSOR = "weight", "weight_scale_2"
GROUP_SIZE = 16


def read_config(config: Mapping[str, Any]) -> Scheme:
    """See schemes.read_scheme."""
    algorithm = config.get("quant_algo")
    if algorithm not in ALGORITHMS:
        raise refused(f"modelopt with quant_algo {algorithm!r} is not supported ({', '.join(ALGORITHMS)})")
    if (size := whole(config, "group_size", GROUP_SIZE)) != GROUP_SIZE:
        raise refused(f"modelopt with group_size {size} is not supported ({GROUP_SIZE})")
    return ModelOpt()


class ModelOpt(Scheme):
    """The layers of such a checkpoint."""

    marks = frozenset((SCALE, OF_TENSOR))
    ignored = frozenset(("input_scale", "k_scale", "v_scale"))

    def check(self, layer: str, parts: LayerTensors) -> None:
        """See Scheme."""
        if _is_fp8(parts):
            check_scales(layer, parts, SCALE, None)
        else:
            check_nvfp4(layer, parts, WEIGHT, GROUP_SIZE, OF_TENSOR)

    def read(self, layer: str, parts: LayerTensors) -> QuantizedWeight:
        """See Scheme."""
        if _is_fp8(parts):
            return fp8_weight(parts[WEIGHT], parts[SCALE], None)
        codes, scales, number = (parts[name].load() for name in (WEIGHT, SCALE, OF_TENSOR))
        return nvfp4_weight(codes, scales, number, GROUP_SIZE, divides=False)


def _is_fp8(parts: LayerTensors) -> bool:
    return WEIGHT in parts and parts[WEIGHT].dtype == FP8
