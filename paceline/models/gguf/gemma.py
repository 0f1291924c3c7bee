"""What a GGUF file says of a Gemma 3's language model, as the config.json of a Hugging Face folder says it."""

from __future__ import annotations

from typing import Any

from paceline.models.config import FULL, SLIDING
from paceline.models.families import GELU
from paceline.models.gguf.fields import Fields

CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
SQUARE_LAYERS = 62  # of the 27b, whose scores are scaled by its width over its heads; no field says so
PERIOD = 6  # one layer of so many sees all, the last one


def gemma3_config(fields: Fields, share: int, dim: int) -> dict[str, Any]:
    """Fields of config.json that only this family has. share: its width over its heads; dim: of a head.

    Raises ConfigError for capped logits and a pattern of windows that does not fit the layers.
    """
    for name in CAPS:
        if fields.get(name):
            raise fields.refused(f"{fields.architecture}.{name} {fields.get(name)!r:.20} is not supported")
    return {
        "hidden_activation": GELU,
        "query_pre_attn_scalar": share if fields.num_layers() == SQUARE_LAYERS else dim,
        "sliding_window": fields.whole("attention.sliding_window"),
        "rope_local_base_freq": _local_theta(fields),
    } | _pattern(fields)


def _local_theta(fields: Fields) -> float:
    """What rope's angles are powers of in layers with a window, which no scaling stretches."""
    if (theta := float(fields.number("rope.freq_base_swa", 10000.0))) <= 1:
        raise fields.refused(f"{fields.architecture}.rope.freq_base_swa is {theta}, expected more than 1")
    return theta


def _pattern(fields: Fields) -> dict[str, Any]:
    """Which layers have a window: all but each so-many-th, or as a list says of each."""
    given = fields.get("attention.sliding_window_pattern")
    if not isinstance(given, list):
        return {"sliding_window_pattern": fields.whole("attention.sliding_window_pattern", PERIOD)}
    if len(given) != fields.num_layers() or not all(isinstance(slides, bool) for slides in given):
        name, count = f"{fields.architecture}.attention.sliding_window_pattern", fields.num_layers()
        raise fields.refused(f"{name} is not a list of true and false for each of {count} layers")
    return {"layer_types": [SLIDING if slides else FULL for slides in given]}
