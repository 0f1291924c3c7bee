"""Checkpoints of models that read images too, of which the language model alone is served. No torch here.

Their ``config.json`` has the language model's own under ``text_config``, and their tensors' names have a prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.errors import ConfigError
from paceline.model_files import QUANTISED

Naming = Callable[[str], str | None]  # a tensor's name in its file, to the one it is asked for by; None: not read
OUTER = (*QUANTISED, "eos_token_id", "dtype", "torch_dtype")  # said beside text_config, for all of the model
TIED = "tie_word_embeddings"
UNREAD = ("vision_tower.", "multi_modal_projector.")
TEXT = "language_model."  # as released; transformers 5 writes model.language_model.


@dataclass(frozen=True)
class Wrapped:
    """One architecture around a language model."""

    architecture: str  # of the language model, in families.py
    model_type: str  # of text_config
    defaults: Mapping[str, Any]  # what transformers takes for fields that text_config leaves out


GEMMA3 = Wrapped(
    "Gemma3ForCausalLM",
    "gemma3_text",
    {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "bos_token_id": 2,
        TIED: True,
    },
)
MISTRAL = Wrapped(
    "MistralForCausalLM",
    "mistral",
    {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "sliding_window": 4096,
        "bos_token_id": 1,
        TIED: False,
    },
)
MINISTRAL3 = Wrapped(
    "Ministral3ForCausalLM",
    "ministral3",
    {
        "vocab_size": 131072,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 34,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        TIED: False,
    },
)
# By the name of the architecture in config.json. The first is meant where text_config has no model_type.
WRAPPED = {
    "Gemma3ForConditionalGeneration": (GEMMA3,),
    "Mistral3ForConditionalGeneration": (MISTRAL, MINISTRAL3),
}


def wrapped(raw: Mapping[str, Any]) -> tuple[Wrapped, ...]:
    """The records of a ``config.json``; none for one that is a language model's own."""
    names = raw.get("architectures")
    return next((WRAPPED[name] for name in WRAPPED if isinstance(names, list) and name in names), ())


def text_config(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """What ``config.json`` says of the language model, as its own would; itself where it is one.

    The LM head is the embedding where both levels say so: the classes' defaults differ, and a checkpoint of a head of
    its own must not run without it. Raises ConfigError for another language model, and for a quantisation that tells
    layers apart by their wrapped names.
    """
    records = wrapped(raw)
    if not records:
        return raw
    text = raw.get("text_config")
    if not isinstance(text, Mapping):
        raise ConfigError("model", "text_config of config.json is missing, or not an object")
    kind = text.get("model_type", records[0].model_type)
    record = next((one for one in records if one.model_type == kind), None)
    if record is None:
        supported = ", ".join(one.model_type for one in records)
        raise ConfigError("model", f"text_config has model_type {kind!r}, which is not supported ({supported})")
    _check_targets(raw)
    found = {**record.defaults, **text, **{name: raw[name] for name in OUTER if raw.get(name) is not None}}
    tied = bool(found[TIED]) and bool(raw.get(TIED, True))
    return found | {TIED: tied, "architectures": [record.architecture]}


def _check_targets(raw: Mapping[str, Any]) -> None:
    """Raise ConfigError for groups of quantised layers that name the wrapped layers. Layers that stay floats are known
    by their tensors."""
    for section in (raw.get(name) for name in QUANTISED):
        if isinstance(section, Mapping) and TEXT.rstrip(".") in str(section.get("config_groups")):
            raise ConfigError("model", "quantised checkpoint: config_groups that name language_model are not supported")


def text_name(name: str) -> str | None:
    """The language model's own name of a wrapped tensor; None for one of the image's part."""
    inner = name.removeprefix("model.")
    if inner.startswith(UNREAD):
        return None
    if not inner.startswith(TEXT):
        return name
    own = inner.removeprefix(TEXT)
    return own if inner == name else f"model.{own}"


def same_name(name: str) -> str | None:
    """A tensor of a language model's own checkpoint keeps its name."""
    return name


def naming(raw: Mapping[str, Any]) -> Naming:
    """``text_name`` or ``same_name``: whichever the tensors beside a ``config.json`` need."""
    return text_name if wrapped(raw) else same_name
