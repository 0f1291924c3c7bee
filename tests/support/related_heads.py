"""A tiny target whose drafters are often right and often wrong, and for a reason: heads that are made of its own layer.

Most tokens are followed by the next higher id, so that lookups find something and Medusa heads, which see no draft
token, are right at times; a sharp attention over the whole context says otherwise often enough. A head has that same
attention over KV rows of its own, somewhat blurred: what it drafts rests on every row it has, at its place.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from paceline.models.config import ModelSpec
from paceline.models.llama import LlamaModel
from paceline.models.loader import WeightBag
from paceline.spec_decode.heads.formats.config import Eagle1Config, Eagle3Config, MedusaConfig, MtpConfig
from paceline.spec_decode.heads.formats.eagle import vocabulary_tensors
from paceline.spec_decode.heads.formats.layer import LayerShape
from paceline.spec_decode.heads.formats.write import write_eagle1, write_eagle3, write_medusa, write_mtp
from tests.support.tiny_model import VOCAB, tiny_spec

DTYPE = torch.bfloat16
SCALE = 0.35  # of embeddings and of what reads them
ADDED = 0.035  # of what a layer adds to the stream, which is then about as large as an embedding
LATER = 0.4  # the second layer adds less: heads have one layer
BLUR = 0.03  # of a head's weights
LOOK_BACK = 0.1  # share of the hidden row in a head's input
FIRST_DRAFTED, NUM_DRAFTED = 3, 160  # ids of EAGLE-3's smaller vocabulary
MAX_LEN = 2304
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
Tensors = dict[str, Tensor]


def kindred_spec(num_layers: int = 2) -> ModelSpec:
    """The target: long enough for prompts of 2,000 tokens, no token ends a text."""
    long = tiny_spec(num_layers=num_layers)
    return replace(long, max_position_embeddings=MAX_LEN, tie_word_embeddings=False, eos_token_ids=())


def kindred_weights(num_layers: int = 2) -> Tensors:
    """Float32, under a Llama checkpoint's names."""
    spec, generator = kindred_spec(num_layers), torch.Generator().manual_seed(21)
    hidden, wide, kv = spec.hidden_size, spec.intermediate_size, spec.num_kv_heads * spec.head_dim
    shapes = {"q_proj": (hidden, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, hidden)}
    embedding = SCALE * torch.randn(spec.vocab_size, hidden, generator=generator)
    tensors: Tensors = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": successor(embedding, 1),
    }
    for i in range(num_layers):
        layer, added = f"model.layers.{i}", ADDED * LATER**i
        for name, shape in shapes.items():
            scale = added if name == "o_proj" else SCALE
            tensors[f"{layer}.self_attn.{name}.weight"] = scale * torch.randn(shape, generator=generator)
        for name, shape in (("gate_proj", (wide, hidden)), ("up_proj", (wide, hidden)), ("down_proj", (hidden, wide))):
            scale = added / 4 if name == "down_proj" else SCALE
            tensors[f"{layer}.mlp.{name}.weight"] = scale * torch.randn(shape, generator=generator)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}.{name}.weight"] = torch.ones(hidden)
    return tensors


def successor(embedding: Tensor, steps: int) -> Tensor:
    """An LM head that says t + steps after t."""
    return embedding.roll(steps, 0) * 0.6


def kindred_target() -> LlamaModel:
    """The target, loaded."""
    bag = WeightBag({name: tensor.to(DTYPE) for name, tensor in kindred_weights().items()})
    model = LlamaModel(kindred_spec(), bag, DTYPE, torch.device("cpu"))
    bag.finish()
    return model


def write_kindred(folder: Path, name: str) -> None:
    """``name``: medusa, eagle, eagle3, mtp, mtp x3 or draft_model."""
    writers = {
        "medusa": _write_medusa,
        "eagle": _write_eagle,
        "eagle3": _write_eagle3,
        "mtp": lambda folder: _write_mtp(folder, 1),
        "mtp x3": lambda folder: _write_mtp(folder, 3),
        "draft_model": _write_model,
    }
    writers[name](folder)


def _layer(prefix: str) -> Tensors:
    """The target's first layer, blurred, under another prefix."""
    generator, own = torch.Generator().manual_seed(33), "model.layers.0."
    return {
        prefix + name.removeprefix(own): value * (1 + BLUR * torch.randn(value.shape, generator=generator))
        for name, value in kindred_weights().items()
        if name.startswith(own)
    }


def _looks_at(hidden: int, token: float, row: float) -> Tensor:
    """[H, 2H]: so much of the token, so much of the hidden row, element by element."""
    return torch.cat((token * torch.eye(hidden), row * torch.eye(hidden)), dim=1)


def _write_medusa(folder: Path) -> None:
    spec, embedding = kindred_spec(), kindred_weights()["model.embed_tokens.weight"]
    config = MedusaConfig(spec.hidden_size, 3, 1, spec.vocab_size)
    tensors: Tensors = {}
    for head in range(3):
        tensors[f"{head}.0.linear.weight"] = torch.zeros(spec.hidden_size, spec.hidden_size)
        tensors[f"{head}.0.linear.bias"] = torch.zeros(spec.hidden_size)
        tensors[f"{head}.1.weight"] = successor(embedding, head + 2)
    write_medusa(folder, tensors, config)


def _write_eagle(folder: Path) -> None:
    """Nothing norms the layer's input or its output, so both are brought to the size they have in the target."""
    spec, size = kindred_spec(), 0.7
    layer = _layer("layers.0.")
    layer.pop("layers.0.input_layernorm.weight")
    grown = size / SCALE
    for name in layer:
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            layer[name] /= size
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            layer[name] *= grown
    fc = {"fc.weight": _looks_at(spec.hidden_size, grown, LOOK_BACK)}
    write_eagle1(folder, fc | layer, Eagle1Config(LayerShape.of_target(spec), spec.vocab_size))


def _write_eagle3(folder: Path) -> None:
    """The token reaches the stream through attention alone: four more KV heads find their own row and bring it in."""
    spec = kindred_spec()
    hidden, dim = spec.hidden_size, spec.head_dim
    shape = replace(LayerShape.of_target(spec), num_heads=12, num_kv_heads=6)
    config = Eagle3Config(shape, spec.vocab_size, NUM_DRAFTED, hidden, (0, 1, 2), norm_before_residual=True)
    plain, generator = _layer("midlayer."), torch.Generator().manual_seed(34)
    attn = "midlayer.self_attn."
    finder = SCALE * torch.randn(4 * dim, hidden, generator=generator)  # the same for q and k: a row finds itself
    own = {
        "q_proj": finder.view(4, dim, hidden).repeat_interleave(2, 0).reshape(8 * dim, hidden),
        "k_proj": finder,
        "v_proj": torch.eye(hidden),
    }
    for name, rows in own.items():
        both = torch.cat((plain[f"{attn}{name}.weight"], rows))
        plain[f"{attn}{name}.weight"] = both @ _looks_at(hidden, 1.0, LOOK_BACK)
    bring = SCALE / 2 * torch.eye(hidden).view(hidden, 4, dim).repeat_interleave(2, 1).reshape(hidden, 8 * dim)
    plain[f"{attn}o_proj.weight"] = torch.cat((plain[f"{attn}o_proj.weight"], bring), dim=1)
    drafted = range(FIRST_DRAFTED, FIRST_DRAFTED + NUM_DRAFTED)
    head = successor(kindred_weights()["model.embed_tokens.weight"], 1)[drafted.start : drafted.stop]
    tensors = plain | {
        "fc.weight": torch.cat([torch.eye(hidden)] * 3, dim=1),
        "midlayer.hidden_norm.weight": torch.full((hidden,), LOOK_BACK),
        "norm.weight": torch.ones(hidden),
        "lm_head.weight": head,
    }
    write_eagle3(folder, tensors | vocabulary_tensors(list(drafted), VOCAB), config)


def _write_mtp(folder: Path, modules: int) -> None:
    spec, tensors = kindred_spec(), Tensors()
    for k in range(modules):
        prefix = f"model.layers.{spec.num_layers + k}."
        tensors |= _layer(prefix) | {
            f"{prefix}eh_proj.weight": _looks_at(spec.hidden_size, SCALE, SCALE * LOOK_BACK),
            f"{prefix}shared_head.norm.weight": torch.ones(spec.hidden_size),
            f"{prefix}enorm.weight": torch.ones(spec.hidden_size),
            f"{prefix}hnorm.weight": torch.ones(spec.hidden_size),
        }
    config = MtpConfig(spec.hidden_size, spec.num_layers, modules, True, LayerShape.of_target(spec))
    write_mtp(folder, tensors, config)


def _write_model(folder: Path) -> None:
    """The target without its second layer."""
    spec = kindred_spec(1)
    shared = {n: t for n, t in kindred_weights().items() if not n.startswith("model.layers.")}
    folder.mkdir(parents=True)
    tensors = {n: t.to(DTYPE).clone() for n, t in (shared | _layer("model.layers.0.")).items()}
    save_file(tensors, folder / "model.safetensors")
    config: Mapping[str, object] = LayerShape.of_target(spec).to_json() | {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_position_embeddings,
        "tie_word_embeddings": False,
        "bos_token_id": spec.bos_token_id,
        "eos_token_id": [],
    }
    (folder / "config.json").write_text(json.dumps(config))
