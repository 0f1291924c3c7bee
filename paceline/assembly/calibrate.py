"""What the linear layers of a model see, layer by layer, and the codes that GPTQ makes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from paceline.attention.base import ForwardBatch, Segment
from paceline.attention.select import attention_for
from paceline.engine.colocated import ColocatedEngine
from paceline.engine.model_runner import ModelRunner
from paceline.errors import ConfigError
from paceline.kvcache.layout import KvLayout
from paceline.kvcache.pool import KvPool
from paceline.layers.linear import Linear
from paceline.models.base import ForwardContext
from paceline.models.compensated import compensated
from paceline.models.config import ModelSpec
from paceline.models.llama import DecoderLayer, LlamaModel
from paceline.models.loader import LazyTensors
from paceline.models.registry import load_target, model_class
from paceline.models.weight_files import weight_files
from paceline.models.write_quantised import FourBits
from paceline.request import SamplingParams, SequenceRequest

Progress = Callable[[str, float], None]
SEQUENCES, LENGTH, PAGE = 32, 256, 16  # tokens that calibrate: 8,192
ROWS_AT_ONCE = 2048  # bounds the float32 copy of a layer's inputs
PARTS = {
    "qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o_proj": ("self_attn.o_proj",),
    "gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "down_proj": ("mlp.down_proj",),
}  # what the checkpoint calls the parts of a block's products


def own_text(runner: ModelRunner) -> list[list[int]]:
    """Sequences that the model itself writes at temperature 1, each after a token of its own: they have the languages
    and the topics that the model knows, and need no corpus."""
    vocab, length = runner.model.spec.vocab_size, min(LENGTH, runner.limits.max_model_len)
    starts = [(7919 * i + 13) % vocab for i in range(SEQUENCES)]
    free = [SamplingParams(seed=i, max_tokens=length - 1, ignore_eos=True) for i in range(SEQUENCES)]
    asked = [SequenceRequest(f"c{i}", (start,), free[i]) for i, start in enumerate(starts)]
    answers = ColocatedEngine(runner).generate(asked)
    return [[start, *answer.token_ids] for start, answer in zip(starts, answers, strict=True)]


def in_sequences(ids: list[int]) -> list[list[int]]:
    """The first tokens of a user's text, cut as ``own_text`` is."""
    return [ids[i : i + LENGTH] for i in range(0, min(len(ids), SEQUENCES * LENGTH), LENGTH)]


def check_family(source: Path) -> None:
    """Raises ConfigError for a model whose blocks are not the Llama family's."""
    family = ModelSpec.from_folder(source).family
    if model_class(family) is not LlamaModel:
        raise ConfigError("method", f"gptq knows the blocks of the Llama family, not those of {family}")


@torch.inference_mode()
def calibrated(source: Path, sequences: Sequence[Sequence[int]], progress: Progress) -> dict[str, FourBits]:
    """Codes of the layers of ``source``, by the name of the weight. A block's inputs come from blocks that are rounded
    already, so that it makes up for their errors too. The model must be of the family of ``check_family``."""
    model = load_target(source, torch.bfloat16, torch.device("cpu"))
    assert isinstance(model, LlamaModel)
    stored, found = LazyTensors(weight_files(source), torch.float32), dict[str, FourBits]()
    context = _context(model, sequences)
    added = model.embed(context.batch.token_ids)
    residual = torch.zeros_like(added)
    for i, layer in enumerate(model.layers):
        progress("calibrating", i / len(model.layers))
        layer.calls = None  # step by step, so that each product is a call of its own
        inputs = _watched(layer)
        layer(added, residual.clone(), model.table, context)
        for name, seen in inputs.items():
            names = [f"model.layers.{i}.{part}.weight" for part in PARTS[name]]
            codes = {own: compensated(stored[own], seen.hessian) for own in names}
            found |= codes
            weight = torch.cat([each.dequantised() for each in codes.values()]).to(model.dtype)
            setattr(layer, name, Linear(weight, seen.linear.bias, slabs=seen.linear.slabs))
        added = layer(added, residual, model.table, context)
    progress("calibrating", 1.0)
    return found


def _context(model: LlamaModel, sequences: Sequence[Sequence[int]]) -> ForwardContext:
    spec, segments, at = model.spec, list[Segment](), 0
    for ids in sequences:
        segments.append(Segment.linear(ids, 0, torch.arange(at, at + len(ids), dtype=torch.int32)))
        at += -(-len(ids) // PAGE) * PAGE
    kv = KvPool(KvLayout.of(model.kv_layers, model.dtype), at // PAGE, PAGE)
    attention = attention_for(model.device, spec.num_heads, spec.num_kv_heads, spec.head_dim)
    return ForwardContext.build(ForwardBatch.build(segments), kv, attention)


class _Watched:
    """A product in its layer's place."""

    whole = True

    def __init__(self, linear: Linear) -> None:
        self.linear = linear
        self.hessian = torch.zeros(linear.in_features, linear.in_features, dtype=torch.float64)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See Linear."""
        for rows in torch.split(x, ROWS_AT_ONCE):
            wide = rows.float()
            self.hessian += wide.t() @ wide
        return self.linear(x)


def _watched(layer: DecoderLayer) -> dict[str, _Watched]:
    """What watches each product of a layer, by the product's name; it is in its place from now on."""
    inputs = {name: _Watched(getattr(layer, name)) for name in PARTS}
    for name, watched in inputs.items():
        setattr(layer, name, watched)
    return inputs
