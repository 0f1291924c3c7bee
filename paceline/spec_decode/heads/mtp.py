"""MTP heads on the target's own block, from any public format (``formats``) or untrained. One module is reused for
every draft step, several are chained."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path

import torch

from paceline.kvcache.layout import KvLayer, LayerOwner
from paceline.layers.linear import Linear
from paceline.layers.ops import add_rms_norm, rms_norm
from paceline.models.base import ForwardContext, TargetModel
from paceline.models.config import ModelSpec
from paceline.models.loader import WeightBag
from paceline.spec_decode.heads.base import DraftHead
from paceline.spec_decode.heads.detect import HeadFormat, check_copies, detect, read_head
from paceline.spec_decode.heads.formats.config import MtpConfig
from paceline.spec_decode.heads.formats.layer import refused

UNTRAINED_SEED = 20412


class MtpModule:
    """One module: two norms, the join, a decoder block, the norm before the shared head."""

    def __init__(
        self,
        model: TargetModel,
        weights: WeightBag,
        prefix: str,
        kv_layer: int,
        table: torch.Tensor,
        *,
        reads_stream: bool = False,
    ) -> None:
        """reads_stream: see MtpConfig."""
        self.reads_stream = reads_stream
        spec = model.spec
        hidden = spec.hidden_size
        self.eps, self.table = spec.rms_norm_eps, table
        self.enorm = weights.take(f"{prefix}.enorm.weight", (hidden,))
        self.hnorm = weights.take(f"{prefix}.hnorm.weight", (hidden,))
        self.eh_proj = Linear(weights.take_linear(f"{prefix}.eh_proj.weight", (hidden, 2 * hidden)))  # embedding first
        self.block = model.decoder_block(weights, prefix, kv_layer)
        self.norm = weights.take(f"{prefix}.shared_head.norm.weight", (hidden,))

    def __call__(self, embedded: torch.Tensor, hidden: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """embedded, hidden: [T, hidden_size] -> [T, hidden_size] after the head's norm."""
        pair = (rms_norm(embedded, self.enorm, self.eps), rms_norm(hidden, self.hnorm, self.eps))
        x = self.eh_proj(torch.cat(pair, dim=-1))
        residual = torch.zeros_like(x)
        x = self.block(x, residual, self.table, context)
        return add_rms_norm(x, residual, self.norm, self.eps)


def mtp_kv_layers(target: Seq[KvLayer], num_modules: int) -> tuple[KvLayer, ...]:
    """KV layers of the modules: shaped as the target's last."""
    last = target[-1]
    return (KvLayer(last.kind, LayerOwner.DRAFT, last.num_kv_heads, last.head_dim),) * num_modules


class MtpHead(DraftHead):
    """One module, reused for every step: its output after the shared norm is the next step's hidden row (C8a)."""

    def __init__(self, model: TargetModel, module: MtpModule) -> None:
        self.model, self.module = model, module
        self.kv_layers = mtp_kv_layers(model.kv_layers, 1)
        self.aux_layers = (model.spec.num_layers,) if module.reads_stream else ()
        self.hidden_size = model.spec.hidden_size

    def forward(self, token_ids: torch.Tensor, hidden: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """See DraftHead."""
        return self.module(self.model.embed(token_ids), hidden, context)

    def logits(self, output: torch.Tensor) -> torch.Tensor:
        """See DraftHead; the target's LM head."""
        return self.model.logits(output)


def _shapes(spec: ModelSpec, prefix: str) -> dict[str, tuple[int, ...]]:
    hidden, dim = spec.hidden_size, spec.head_dim
    q, kv = spec.num_heads * dim, spec.num_kv_heads * dim
    shapes: dict[str, tuple[int, ...]] = {
        "enorm": (hidden,),
        "hnorm": (hidden,),
        "eh_proj": (hidden, 2 * hidden),
        "shared_head.norm": (hidden,),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "mlp.gate_proj": (spec.intermediate_size, hidden),
        "mlp.up_proj": (spec.intermediate_size, hidden),
        "mlp.down_proj": (hidden, spec.intermediate_size),
    }
    if spec.qk_norm:
        shapes |= {"self_attn.q_norm": (dim,), "self_attn.k_norm": (dim,)}
    named = {f"{prefix}.{name}.weight": shape for name, shape in shapes.items()}
    if spec.attention_bias:
        named |= {f"{prefix}.self_attn.{n}_proj.bias": (s,) for n, s in (("q", q), ("k", kv), ("v", kv))}
    if spec.attention_out_bias:
        named[f"{prefix}.self_attn.o_proj.bias"] = (hidden,)
    if spec.mlp_bias:
        wide = spec.intermediate_size
        named |= {f"{prefix}.mlp.{n}_proj.bias": (s,) for n, s in (("gate", wide), ("up", wide), ("down", hidden))}
    return named


def untrained_mtp(spec: ModelSpec, num_modules: int, dtype: torch.dtype, seed: int = UNTRAINED_SEED) -> WeightBag:
    """Random heads, the same on every node for one seed: right text, no speed. For tests and before training."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for k in range(num_modules):
        for name, shape in _shapes(spec, f"model.layers.{spec.num_layers + k}").items():
            norm = len(shape) == 1 and name.endswith("weight")
            value = torch.ones(shape) if norm else torch.randn(shape, generator=generator) * shape[-1] ** -0.5
            tensors[name] = value.to(dtype)
    return WeightBag(tensors)


def reads_stream(folder: Path) -> bool:
    """Whether a folder's modules read rows before the final norm. Raises ConfigError."""
    return detect(folder) is HeadFormat.MTP_MIMO


def load_mtp(path: str, model: TargetModel, num_modules: int, table: torch.Tensor) -> tuple[list[MtpModule], str]:
    """Modules and a digest of their weights. Empty ``path``: untrained heads, ``num_modules`` of them."""
    spec, before_norm = model.spec, False
    if path:
        found = read_head(Path(path), model.dtype, model.device, spec.num_layers)
        if not isinstance(found.config, MtpConfig):
            raise refused(f"{path} holds {found.kind} weights; choose the {found.kind} drafter for them")
        if found.config.num_modules > 1 and not found.config.chained:
            raise refused(f"{path}: several modules that each read the target's rows are not supported (mtp_chained)")
        before_norm = found.config.reads_stream
        if before_norm and found.config.num_modules > 1:
            raise refused(f"{path}: several modules of MiMo's kind are not supported")
        check_copies(found, model)
        bag, digest, num_modules = found.bag(), found.digest, found.config.num_modules
    else:
        bag = untrained_mtp(spec, num_modules, model.dtype)
        digest = f"untrained-{UNTRAINED_SEED}x{num_modules}"
    bag.onto(model.device, model.dtype).rounded(model.quantize)
    first = spec.num_layers
    modules = [
        MtpModule(model, bag, f"model.layers.{first + k}", first + k, table, reads_stream=before_norm)
        for k in range(num_modules)
    ]
    bag.finish()
    return modules, digest
