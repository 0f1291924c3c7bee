"""The schemes of quantised Hugging Face checkpoints. A new one is its own file and one record here. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from paceline.errors import ConfigError
from paceline.model_files import quantization_config

if TYPE_CHECKING:
    from paceline.models.quantization.base import Reader, Scheme

PACKAGE = "paceline.models.quantization"
SCHEMES = {  # by quant_method in config.json: the module whose ``read_config`` reads the rest
    "fp8": f"{PACKAGE}.fp8",
    "fbgemm_fp8": f"{PACKAGE}.fp8",
    "compressed-tensors": f"{PACKAGE}.compressed_tensors",
    "gptq": f"{PACKAGE}.gptq",
    "awq": f"{PACKAGE}.awq",
    "modelopt": f"{PACKAGE}.modelopt",
    "modelopt_fp4": f"{PACKAGE}.modelopt",
}


def read_scheme(raw: Mapping[str, Any]) -> Scheme | None:
    """The scheme that ``config.json`` names; None for a checkpoint of floats.

    Raises ConfigError naming a method, a width or a layout that is not known here.
    """
    config = quantization_config(raw)
    if config is None:
        return None
    method = config.get("quant_method")
    if not isinstance(method, str) or method not in SCHEMES:
        known = ", ".join(SCHEMES)
        raise ConfigError("model", f"quantised checkpoint: quant_method {method!r} is not supported ({known})")
    reader: Reader = import_module(SCHEMES[method]).read_config
    try:
        return reader(config)
    except (TypeError, ValueError, AttributeError) as error:  # a text where an object belongs, and the like
        raise ConfigError("model", f"quantised checkpoint: its config cannot be read: {error}") from None
