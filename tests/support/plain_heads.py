"""Draft heads read and run in plain torch, from algorithms.md C and F alone: dense attention, float32, no paging.

Nothing of the project is used, so that a mistake in reading a format or in a formula cannot hide on both sides.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor


@dataclass(frozen=True)
class PlainTarget:
    """What heads share with their target; float32."""

    embedding: Tensor  # [V, H]
    head: Tensor  # [V, H]
    num_layers: int = 0
    eps: float = 1e-5  # of MTP modules, which live in the target
    config: dict[str, Any] | None = None  # Llama fields of the target, for MTP blocks


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm."""
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def rotate(x: Tensor, positions: Tensor, theta: float, factor: float) -> Tensor:
    """Rotate-half rope with linear scaling. x: [heads, T, D]."""
    dim = x.shape[-1]
    angles = positions[:, None].double() / factor * theta ** (-torch.arange(0, dim, 2).double() / dim)
    cos, sin = angles.cos().float(), angles.sin().float()
    a, b = x[..., : dim // 2], x[..., dim // 2 :]
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class PlainLayer:
    """Attention and SwiGLU of tensors ``{prefix}.*``; the input arrives normed, or not, as the head wants it."""

    def __init__(self, tensors: dict[str, Tensor], prefix: str, config: dict[str, Any]) -> None:
        self.t = {name.removeprefix(prefix): tensors.pop(name) for name in list(tensors) if name.startswith(prefix)}
        self.heads, self.kv = config["num_attention_heads"], config["num_key_value_heads"]
        self.eps = config["rms_norm_eps"]
        scaling = config.get("rope_scaling") or {}
        self.theta, self.factor = config.get("rope_theta", 10000.0), scaling.get("factor", 1.0)

    def linear(self, x: Tensor, name: str) -> Tensor:
        """With bias where there is one."""
        return F.linear(x, self.t[f"{name}.weight"], self.t.get(f"{name}.bias"))

    def attend(self, x: Tensor, start: int) -> Tensor:
        """x: [T, width] of rows at positions start, start + 1, ... -> [T, H]; row i sees rows 0..i."""
        rows = x.shape[0]
        positions = torch.arange(start, start + rows)
        q, k, v = (
            self.linear(x, f"self_attn.{name}_proj").view(rows, count, -1).transpose(0, 1)
            for name, count in (("q", self.heads), ("k", self.kv), ("v", self.kv))
        )
        if "self_attn.q_norm.weight" in self.t:
            q = norm(q, self.t["self_attn.q_norm.weight"], self.eps)
            k = norm(k, self.t["self_attn.k_norm.weight"], self.eps)
        q, k = (rotate(t, positions, self.theta, self.factor) for t in (q, k))
        k, v = (t.repeat_interleave(self.heads // self.kv, dim=0) for t in (k, v))
        scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(torch.ones(rows, rows).triu(1).bool(), -math.inf)
        return self.linear((scores.softmax(-1) @ v).transpose(0, 1).reshape(rows, -1), "self_attn.o_proj")

    def after(self, attended: Tensor, residual: Tensor) -> Tensor:
        """What follows attention."""
        h = residual + attended
        x = norm(h, self.t["post_attention_layernorm.weight"], self.eps)
        gated = F.silu(self.linear(x, "mlp.gate_proj")) * self.linear(x, "mlp.up_proj")
        return h + self.linear(gated, "mlp.down_proj")


class PlainHead:
    """A head over the rows of one sequence, all at once."""

    def __init__(self, config: dict[str, Any], tensors: dict[str, Tensor], target: PlainTarget) -> None:
        self.config, self.t, self.target = config, tensors, target

    def fuse(self, hidden: Tensor) -> Tensor:
        """[T, width of the target's rows] -> [T, H]."""
        return hidden

    def rows(self, tokens: Tensor, hidden: Tensor, start: int = 0) -> Tensor:
        """tokens: [T], t_{i+1}; hidden: [T, H], fused -> outputs [T, H]."""
        raise NotImplementedError

    def logits(self, output: Tensor) -> Tensor:
        """[R, H] -> [R, V]; -inf where the head has no such token."""
        return output @ self.target.head.T

    def steps(self, tokens: Tensor, hidden: Tensor, drafted: list[int]) -> Tensor:
        """Outputs after true rows and then drafted ones, each of them fed the output of the row before."""
        outputs = self.rows(tokens, hidden)
        for token in drafted:
            tokens, hidden = torch.cat((tokens, torch.tensor([token]))), torch.cat((hidden, outputs[-1:]))
            outputs = torch.cat((outputs, self.rows(tokens, hidden)[-1:]))
        return outputs


class PlainEagle1(PlainHead):
    """C4, F1."""

    def __init__(self, config: dict[str, Any], tensors: dict[str, Tensor], target: PlainTarget) -> None:
        super().__init__(config, tensors, target)
        self.layer = PlainLayer(tensors, "layers.0.", config)
        self.embedding = tensors.get("embed_tokens.weight", target.embedding)

    def rows(self, tokens: Tensor, hidden: Tensor, start: int = 0) -> Tensor:
        """x = fc([e ; f]), no norm before attention."""
        x = F.linear(torch.cat((self.embedding[tokens], hidden), -1), self.t["fc.weight"], self.t.get("fc.bias"))
        return self.layer.after(self.layer.attend(x, start), x)


class PlainEagle3(PlainHead):
    """C6, F2, F3."""

    def __init__(self, config: dict[str, Any], tensors: dict[str, Tensor], target: PlainTarget) -> None:
        inner = config.get("transformer_layer_config", config)
        super().__init__(config, tensors, target)
        self.layer = PlainLayer(tensors, self._prefix(tensors), inner)
        self.eps = inner["rms_norm_eps"]
        self.embedding = tensors.get("embed_tokens.weight", target.embedding)
        offsets = tensors.get("d2t", tensors.get("draft_id_to_target_id"))
        count = tensors["lm_head.weight"].shape[0]
        self.ids = torch.arange(count) + (0 if offsets is None else offsets)

    @staticmethod
    def _prefix(tensors: dict[str, Tensor]) -> str:
        return "midlayer." if any(name.startswith("midlayer.") for name in tensors) else "layers.0."

    def fuse(self, hidden: Tensor) -> Tensor:
        """Norms as the config says, then fc."""
        if self.config.get("norm_before_fc"):
            hidden = norm(hidden, self.t["input_norm.weight"], self.eps)
        if self.config.get("fc_norm"):
            parts = hidden.chunk(hidden.shape[1] // self.t["fc_norm.0.weight"].shape[0], -1)
            hidden = torch.cat([norm(p, self.t[f"fc_norm.{i}.weight"], self.eps) for i, p in enumerate(parts)], -1)
        return hidden @ self.t["fc.weight"].T

    def rows(self, tokens: Tensor, hidden: Tensor, start: int = 0) -> Tensor:
        """Residual g (or its norm), attention over [norm e ; norm g]."""
        g = norm(hidden, self.layer.t["hidden_norm.weight"], self.eps)
        e = norm(self.embedding[tokens], self.layer.t["input_layernorm.weight"], self.eps)
        residual = g if self.config.get("norm_before_residual") else hidden
        a = self.layer.after(self.layer.attend(torch.cat((e, g), -1), start), residual)
        return norm(a, self.t["norm.weight"], self.eps) if self.config.get("norm_output") else a

    def logits(self, output: Tensor) -> Tensor:
        """Scattered to the target's ids."""
        if not self.config.get("norm_output"):
            output = norm(output, self.t["norm.weight"], self.eps)
        scores = torch.full((output.shape[0], self.target.embedding.shape[0]), -math.inf)
        scores[:, self.ids] = output @ self.t["lm_head.weight"].T
        return scores


class PlainMtp(PlainHead):
    """C8, F5, one module of a folder of heads with plain blocks."""

    def __init__(
        self, config: dict[str, Any], tensors: dict[str, Tensor], target: PlainTarget, module: int = 0
    ) -> None:
        own = {n: t for n, t in tensors.items() if n.startswith(f"model.layers.{target.num_layers + module}.")}
        own = {".".join(name.split(".")[3:]): tensor for name, tensor in own.items()}
        super().__init__(config, own, target)
        self.layer = PlainLayer(dict(own), "", (target.config or config) | {"rms_norm_eps": target.eps})

    def rows(self, tokens: Tensor, hidden: Tensor, start: int = 0) -> Tensor:
        """eh_proj [norm e ; norm h], an ordinary pre-norm layer, the shared head's norm."""
        eps, t = self.target.eps, self.t
        pair = (norm(self.target.embedding[tokens], t["enorm.weight"], eps), norm(hidden, t["hnorm.weight"], eps))
        x = torch.cat(pair, -1) @ t["eh_proj.weight"].T
        attended = self.layer.attend(norm(x, t["input_layernorm.weight"], eps), start)
        return norm(self.layer.after(attended, x), t["shared_head.norm.weight"], eps)


class PlainMedusa:
    """C3, F4, FasterDecoding's names."""

    def __init__(self, config: dict[str, Any], tensors: dict[str, Tensor], target: PlainTarget) -> None:
        self.t, self.target = tensors, target
        self.num_heads = 1 + max(int(name.split(".")[0]) for name in tensors if name[0].isdigit())

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [R, H] -> [num_heads, R, V]."""
        scores = []
        for head in range(self.num_heads):
            y, block = hidden, 0
            while f"{head}.{block}.linear.weight" in self.t:
                name = f"{head}.{block}.linear"
                y = y + F.silu(F.linear(y, self.t[f"{name}.weight"], self.t[f"{name}.bias"]))
                block += 1
            own = y @ self.t.get(f"{head}.{block}.weight", self.target.head).T
            if "token_map" in self.t:
                every = torch.full((own.shape[0], self.target.embedding.shape[0]), -math.inf)
                every[:, self.t["token_map"]] = own
                own = every
            scores.append(own)
        return torch.stack(scores)


def read_files(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and all tensors, floating ones in float32."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    for file in [*folder.glob("*.bin"), *folder.glob("*.pt")] if not tensors else []:
        tensors |= torch.load(file, weights_only=True)
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config, {name: t.float() if t.is_floating_point() else t for name, t in tensors.items()}


def read_plain(kind: str, folder: Path, target: PlainTarget) -> PlainHead:
    """An autoregressive head: eagle1, eagle3 or mtp."""
    return {"eagle1": PlainEagle1, "eagle3": PlainEagle3, "mtp": PlainMtp}[kind](*read_files(folder), target)


def read_and_run(kind: str, folder: Path, tokens: Tensor, hidden: Tensor, target: PlainTarget) -> Tensor:
    """Logits of every true row, float32 [T, V]; Medusa: [num_heads, T, V].

    tokens: int64 [T], t_1..t_T (Medusa reads none); hidden: [T, width], the target's rows 0..T-1 as the head takes
    them (EAGLE-3: the captured rows side by side, before fc).
    """
    if kind == "medusa":
        return PlainMedusa(*read_files(folder), target).logits(hidden)
    head = read_plain(kind, folder, target)
    return head.logits(head.rows(tokens, head.fuse(hidden)))
