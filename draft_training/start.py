"""Build a head for a target and start it from the target's own layers, which saves most of the training.

The draft layer begins as the target's last layer, the join as "pass the hidden row on", the output as the target's
own norm and head. Where the draft MLP is narrower, the neurons with the largest weights are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from draft_training.heads import Eagle1, Eagle3, Medusa, Mtp1, Mtp3, MtpModule, TargetParts, TrainableHead, copy_into
from draft_training.layers import HeadShape
from paceline.errors import ConfigError
from paceline.layers.rotary import rope_table
from paceline.models.config import ModelSpec
from paceline.models.quantization.tensors import AsFloats
from paceline.models.registry import open_checkpoint


@dataclass(frozen=True)
class Source:
    """The target, as far as heads start from it; float32 unless said."""

    spec: ModelSpec
    embedding: torch.Tensor  # bf16 [vocab_size, hidden_size]
    lm_head: torch.Tensor  # bf16 [vocab_size, hidden_size]
    norm: torch.Tensor
    layer: Mapping[str, torch.Tensor]  # the last decoder layer, names after ``model.layers.N.``

    @classmethod
    def from_folder(cls, folder: Path) -> Source:
        """Read what is needed of a Llama-family folder."""
        spec = ModelSpec.from_folder(folder)
        weights = AsFloats(open_checkpoint(folder, torch.bfloat16), torch.bfloat16)
        embedding = weights["model.embed_tokens.weight"]
        head = embedding if spec.tie_word_embeddings else weights["lm_head.weight"]
        prefix = f"model.layers.{spec.num_layers - 1}."
        layer = {n.removeprefix(prefix): weights[n].float() for n in weights if n.startswith(prefix)}
        return cls(spec, embedding, head, weights["model.norm.weight"].float(), layer)

    def shape(self, intermediate_size: int) -> HeadShape:
        """Geometry of a draft layer: the target's, with another MLP width; 0 keeps it."""
        s = self.spec
        width = intermediate_size or s.intermediate_size
        return HeadShape(s.hidden_size, width, s.num_heads, s.num_kv_heads, s.head_dim, s.rms_norm_eps)

    def parts(self, token_ids: Sequence[int]) -> TargetParts:
        """The frozen target over the tokens trained on."""
        ids = torch.tensor(sorted(token_ids))
        columns = torch.full((self.spec.vocab_size,), -1)
        columns[ids] = torch.arange(len(ids))
        table = rope_table(self.spec.head_dim, self.spec.rope_theta, 4096, self.spec.rope_scaling)
        return TargetParts(self.embedding, self.lm_head[ids].contiguous(), ids, columns, table)

    def mlp(self, width: int) -> dict[str, torch.Tensor]:
        """The last layer's MLP, cut to its ``width`` heaviest neurons."""
        gate, up, down = (self.layer[f"mlp.{n}_proj.weight"] for n in ("gate", "up", "down"))
        weight = gate.norm(dim=1) * up.norm(dim=1) * down.norm(dim=0)
        kept = weight.topk(min(width, len(weight))).indices.sort().values
        return {
            "mlp.gate_proj.weight": gate[kept],
            "mlp.up_proj.weight": up[kept],
            "mlp.down_proj.weight": down[:, kept],
        }


def aux_layers_of(num_layers: int) -> tuple[int, int, int]:
    """Target layers whose inputs EAGLE-3 reads: low, middle, high (algorithms.md C6); distinct in shallow targets too.

    Raises ConfigError for a target of fewer than three layers.
    """
    if num_layers < 3:
        raise ConfigError("model", f"has {num_layers} layers: heads are trained on the inputs of three of them")
    low = 2 if num_layers >= 5 else 0  # not 1: a list that begins with it reads as another convention (formats_config)
    middle = max(num_layers // 2, low + 1)
    return low, middle, max(num_layers - 3, middle + 1)


@dataclass(frozen=True)
class HeadOptions:
    """Size of a head. Zeros keep the target's own."""

    kind: str  # eagle3, eagle1, mtp, medusa
    num_steps: int = 5  # draft positions trained: unrolled steps, modules or heads
    intermediate_size: int = 0
    chained: bool = False  # mtp: one module per step instead of one reused
    medusa_blocks: int = 1


# Where the draft layer adds to a normed row, which is far smaller than the target's own stream, it begins with this
# share of what the target's layer adds; and its scores begin flatter than the target's, since they are of the token
# before the one to predict: sure of the wrong token is a bad start.
NORMED_SHARE = 0.1
FLAT_NORM, FLAT_JOIN = 0.5, 0.3


def _block(source: Source, width: int, share: float = 1.0) -> dict[str, torch.Tensor]:
    """The last layer but for its inputs; ``share``: of what attention and MLP add to the stream."""
    mlp = source.mlp(width)
    return {
        "attention.o_proj.weight": share * source.layer["self_attn.o_proj.weight"],
        "post_attention_layernorm.weight": source.layer["post_attention_layernorm.weight"],
        **mlp,
        "mlp.down_proj.weight": share * mlp["mlp.down_proj.weight"],
    }


def _qkv(source: Source, pad: int, prefix: str = "") -> dict[str, torch.Tensor]:
    """The last layer's q, k, v reading the last ``hidden_size`` inputs; the ``pad`` before start small."""
    tensors = {}
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = source.layer[f"self_attn.{name}.weight"]
        before = torch.randn(weight.shape[0], pad) * 0.02
        tensors[f"{prefix}attention.{name}.weight"] = torch.cat((before, weight), dim=1)
    return tensors


def _pass_last(hidden: int, inputs: int) -> torch.Tensor:
    """[hidden, inputs * hidden]: pass the last input on, with a little of the others."""
    weight = torch.randn(hidden, inputs * hidden) * 0.01
    weight[:, -hidden:] += torch.eye(hidden)
    return weight


def _mtp_start(source: Source, module: MtpModule, width: int) -> None:
    hidden = source.spec.hidden_size
    tensors = _block(source, width, NORMED_SHARE) | _qkv(source, 0)
    tensors["shared_head_norm.weight"] = torch.full((hidden,), FLAT_NORM)
    tensors["input_layernorm.weight"] = source.layer["input_layernorm.weight"]
    tensors["eh_proj.weight"] = _pass_last(hidden, 2)
    copy_into(module, tensors)


def _eagle3(source: Source, shape: HeadShape, options: HeadOptions, token_ids: Sequence[int]) -> TrainableHead:
    head = Eagle3(shape, len(token_ids), options.num_steps)
    copy_into(head, _block(source, shape.intermediate_size) | _qkv(source, shape.hidden_size))
    start = {
        "fc.weight": _pass_last(shape.hidden_size, 3),
        "hidden_norm.weight": source.layer["input_layernorm.weight"],
        "norm.weight": source.norm,
        "lm_head.weight": source.lm_head[torch.tensor(sorted(token_ids))].float(),
    }
    copy_into(head, start)
    return head


def _eagle1(source: Source, shape: HeadShape, options: HeadOptions, token_ids: Sequence[int]) -> TrainableHead:
    head = Eagle1(shape, options.num_steps)
    copy_into(head, _block(source, shape.intermediate_size, NORMED_SHARE) | _qkv(source, 0))
    copy_into(head, {"fc.weight": FLAT_JOIN * _pass_last(shape.hidden_size, 2)})
    return head


def _mtp(source: Source, shape: HeadShape, options: HeadOptions, token_ids: Sequence[int]) -> TrainableHead:
    first = source.spec.num_layers
    if options.chained:
        chained = Mtp3(shape, options.num_steps, first)
        for module in chained.modules_:
            assert isinstance(module, MtpModule)
            _mtp_start(source, module, shape.intermediate_size)
        return chained
    single = Mtp1(shape, options.num_steps, first)
    _mtp_start(source, single.module, shape.intermediate_size)
    return single


def _medusa(source: Source, shape: HeadShape, options: HeadOptions, token_ids: Sequence[int]) -> TrainableHead:
    return Medusa(shape, options.num_steps, options.medusa_blocks)


_BUILDERS: dict[str, Callable[[Source, HeadShape, HeadOptions, Sequence[int]], TrainableHead]] = {
    "eagle3": _eagle3,
    "eagle1": _eagle1,
    "mtp": _mtp,
    "medusa": _medusa,
}


def build_head(source: Source, options: HeadOptions, token_ids: Sequence[int]) -> TrainableHead:
    """A head ready to train. token_ids: the tokens trained on; EAGLE-3's draft vocabulary."""
    spec = source.spec
    if spec.attention_bias or spec.mlp_bias or spec.qk_norm:
        raise ConfigError("model", "heads are trained for targets without biases and without q/k norms")
    if options.kind not in _BUILDERS:
        raise ConfigError("head", f"{options.kind!r} is not one of {', '.join(_BUILDERS)}")
    torch.manual_seed(20412)
    head: nn.Module = _BUILDERS[options.kind](source, source.shape(options.intermediate_size), options, token_ids)
    assert isinstance(head, TrainableHead)
    return head
