"""What the linear layers of a model see, layer by layer, and what GPTQ and smoothing make of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import torch

from paceline.attention.base import ForwardBatch, Segment
from paceline.attention.select import attention_for
from paceline.engine.colocated import ColocatedEngine
from paceline.engine.model_runner import ModelRunner
from paceline.errors import ConfigError
from paceline.kvcache.layout import KvLayout
from paceline.kvcache.pool import KvPool
from paceline.layers.linear import Linear
from paceline.layers.quantized import ROUNDED_TOGETHER
from paceline.models.base import ForwardContext
from paceline.models.compensated import compensated
from paceline.models.config import ModelSpec
from paceline.models.llama import DecoderLayer, LlamaModel
from paceline.models.loader import LazyTensors
from paceline.models.quantization.round_to_nearest import GROUP_SIZE
from paceline.models.registry import load_target, model_class
from paceline.models.smoothed import Factors, Inputs, best_factors, kept
from paceline.models.write_quantised import FourBits, as_written
from paceline.request import SamplingParams, SequenceRequest

Progress = Callable[[str, float], None]
SEQUENCES, LENGTH, PAGE = 32, 256, 16  # tokens that calibrate: 8,192
COMPARED_ROWS = 128  # on which factors are tried
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
        raise ConfigError("method", f"gptq and smooth know the blocks of the Llama family, not those of {family}")


@torch.inference_mode()
def calibrated(
    source: Path,
    sequences: Sequence[Sequence[int]],
    progress: Progress,
    factors: Mapping[str, Factors] = MappingProxyType({}),
    group_size: int = GROUP_SIZE,
) -> dict[str, FourBits]:
    """Codes of the layers of ``source``, by the name of the weight, which has its factors first. A block's inputs come
    from blocks that are rounded already, so that it makes up for their errors too. The model must be of the family of
    ``check_family``. group_size: input features that share a scale."""
    model, context, added = _opened(source, sequences)
    stored, found = LazyTensors.of(source, torch.float32), dict[str, FourBits]()
    residual = torch.zeros_like(added)
    for i, layer in enumerate(model.layers):
        progress("calibrating", i / len(model.layers))
        inputs = _watched(layer, _Hessian)
        layer(added, residual.clone(), model.table, context)
        for name, seen in inputs.items():
            names = [f"model.layers.{i}.{part}.weight" for part in PARTS[name]]
            given = {own: factors.get(own, Factors()) for own in names}
            hessian = seen.hessian_of(given[names[0]].columns)
            codes = {own: compensated(has(stored[own]), hessian, group_size) for own, has in given.items()}
            found |= codes
            weight = torch.cat([has.inverse(codes[own].dequantised()) for own, has in given.items()]).to(model.dtype)
            setattr(layer, name, Linear(weight, seen.linear.bias, slabs=seen.linear.slabs))
        added = layer(added, residual, model.table, context)
    progress("calibrating", 1.0)
    return found


def _opened(source: Path, sequences: Sequence[Sequence[int]]) -> tuple[LlamaModel, ForwardContext, torch.Tensor]:
    """The model, the sequences side by side, and their embedding."""
    model = load_target(source, torch.bfloat16, torch.device("cpu"))
    assert isinstance(model, LlamaModel)
    for layer in model.layers:
        layer.calls = None  # step by step, so that each product is a call of its own
    context = _context(model, sequences)
    return model, context, model.embed(context.batch.token_ids)


def _context(model: LlamaModel, sequences: Sequence[Sequence[int]]) -> ForwardContext:
    spec, segments, at = model.spec, list[Segment](), 0
    for ids in sequences:
        segments.append(Segment.linear(ids, 0, torch.arange(at, at + len(ids), dtype=torch.int32)))
        at += -(-len(ids) // PAGE) * PAGE
    kv = KvPool(KvLayout.of(model.kv_layers, model.dtype), at // PAGE, PAGE)
    attention = attention_for(model.device, spec.num_heads, spec.num_kv_heads, spec.head_dim)
    return ForwardContext.build(ForwardBatch.build(segments), kv, attention)


@torch.inference_mode()
def smoothed(
    source: Path,
    sequences: Sequence[Sequence[int]],
    scheme: str,
    progress: Progress,
    group_size: int = GROUP_SIZE,
) -> dict[str, Factors]:
    """Factors of the tensors of ``source``, by name, for a scheme and a group size of ``write_quantised``. The model
    must be of the family of ``check_family``."""
    model, context, added = _opened(source, sequences)
    stored, found = LazyTensors.of(source, torch.float32), dict[str, Factors]()
    residual = torch.zeros_like(added)
    for i, layer in enumerate(model.layers):
        progress("calibrating", i / len(model.layers))
        inputs = _watched(layer, _Ranges)
        added = layer(added, residual, model.table, context)
        seen = {name: watched.inputs() for name, watched in inputs.items()}
        found |= _block_factors(stored, f"model.layers.{i}", seen, (scheme, group_size), model.spec)
    progress("calibrating", 1.0)
    return found


def _block_factors(
    stored: LazyTensors, block: str, seen: Mapping[str, Inputs], rounding: tuple[str, int], spec: ModelSpec
) -> dict[str, Factors]:
    """rounding: scheme, and size of groups."""
    scheme, size = rounding
    rounded = partial(as_written, scheme=scheme, group_size=size)

    def best(product: str, heads: tuple[int, int] | None = None) -> torch.Tensor:
        weight = torch.cat([stored[f"{block}.{part}.weight"] for part in PARTS[product]])
        together = min(weight.shape[1], size if scheme.startswith("w4") else ROUNDED_TOGETHER)
        return best_factors(seen[product], weight, rounded, together if scheme.endswith("a8") else 0, heads)

    def keeping(factors: torch.Tensor, layer: str) -> torch.Tensor:
        names = {f"{block}.{layer}.{kind}" for kind in ("weight", "bias")} & stored.keys()
        return kept(factors, [stored.stored(name) for name in names])

    kv_heads, dim = spec.num_kv_heads, spec.head_dim
    together = spec.num_heads // kv_heads
    attention = keeping(best("qkv_proj"), "input_layernorm")
    mlp = keeping(best("gate_up_proj"), "post_attention_layernorm")
    values = keeping(best("o_proj", (together, dim)).view(kv_heads, together, dim)[:, 0].flatten(), "self_attn.v_proj")
    middle = keeping(best("down_proj"), "mlp.up_proj")
    of_heads = values.view(kv_heads, 1, dim).expand(kv_heads, together, dim).flatten()
    found = {
        "input_layernorm.weight": Factors(1 / attention),
        "self_attn.q_proj.weight": Factors(columns=attention),
        "self_attn.k_proj.weight": Factors(columns=attention),
        "self_attn.v_proj.weight": Factors(1 / values, attention),
        "self_attn.v_proj.bias": Factors(1 / values),
        "self_attn.o_proj.weight": Factors(columns=of_heads),
        "post_attention_layernorm.weight": Factors(1 / mlp),
        "mlp.gate_proj.weight": Factors(columns=mlp),
        "mlp.up_proj.weight": Factors(1 / middle, mlp),
        "mlp.up_proj.bias": Factors(1 / middle),
        "mlp.down_proj.weight": Factors(columns=middle),
    }
    return {f"{block}.{name}": factors for name, factors in found.items()}


class _Watched:
    """A product in its layer's place."""

    whole = True

    def __init__(self, linear: Linear) -> None:
        self.linear = linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See Linear."""
        self.see(x)
        return self.linear(x)

    def see(self, x: torch.Tensor) -> None:
        """Rows that go in, [n, in_features]."""
        raise NotImplementedError


class _Hessian(_Watched):
    def __init__(self, linear: Linear) -> None:
        super().__init__(linear)
        self.hessian = torch.zeros(linear.in_features, linear.in_features, dtype=torch.float64)

    def see(self, x: torch.Tensor) -> None:
        for rows in torch.split(x, ROWS_AT_ONCE):
            wide = rows.float()
            self.hessian += wide.t() @ wide

    def hessian_of(self, columns: torch.Tensor | None) -> torch.Tensor:
        """That of the rows divided by these factors."""
        return self.hessian if columns is None else self.hessian / torch.outer(columns, columns)


class _Ranges(_Watched):
    """All calibrating rows go in at once."""

    def see(self, x: torch.Tensor) -> None:
        self.peaks = x.abs().amax(dim=0).float()
        self.rows = x[:: max(1, len(x) // COMPARED_ROWS)][:COMPARED_ROWS].float()

    def inputs(self) -> Inputs:
        return Inputs(self.peaks, self.rows)


W = TypeVar("W", bound=_Watched)


def _watched(layer: DecoderLayer, make: Callable[[Linear], W]) -> dict[str, W]:
    """What watches each product of a layer, by the product's name; it is in its place from now on."""
    inputs = {name: make(getattr(layer, name)) for name in PARTS}
    for name, watched in inputs.items():
        setattr(layer, name, watched)
    return inputs
