"""Trainable draft heads. Parameter names are those of the public formats (algorithms.md F1, F2, F5, F4)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from draft_training.batch import Batch
from draft_training.layers import Attention, Geometry, HeadShape, Mlp, RmsNorm


@dataclass(frozen=True)
class TargetParts:
    """What heads read of the frozen target."""

    embedding: torch.Tensor  # [vocab_size, hidden_size]
    head: torch.Tensor  # [V', hidden_size], rows of the LM head for the V' tokens trained on
    token_ids: torch.Tensor  # int64 [V'], ascending, their ids
    columns: torch.Tensor  # int64 [vocab_size], id -> column of ``head``, -1 outside
    rope: torch.Tensor  # float32 [max_positions, head_dim]

    def to(self, device: torch.device) -> TargetParts:
        """The same on ``device``."""
        parts = (self.embedding, self.head, self.token_ids, self.columns, self.rope)
        return TargetParts(*(t.to(device) for t in parts))


def _public(name: str) -> str:
    """Our parameter name to the one that all public formats share."""
    if name.startswith("attention."):
        return f"self_attn.{name.removeprefix('attention.')}"
    return name.replace("shared_head_norm", "shared_head.norm")


class TrainableHead(nn.Module):
    """A head that yields, for every draft step, the logits of the batch's columns."""

    kind: str
    num_steps: int  # draft positions trained
    feature_weight = 0.0  # in the loss, of the distance between outputs and the target's hidden rows

    @abstractmethod
    def steps(self, batch: Batch, target: TargetParts, count: int) -> list[torch.Tensor]:
        """Outputs of draft steps 0..count-1, each [C, hidden_size]; ``logits`` turns rows of them to scores.

        count: num_steps at most.
        """

    def normed(self, output: torch.Tensor) -> torch.Tensor:
        """What the scoring matrix is applied to. output: [R, hidden_size] -> [R, hidden_size]."""
        return output

    def scorer(self, target: TargetParts) -> torch.Tensor:
        """The scoring matrix, [V', hidden_size]: the target's own rows where the head trains none."""
        return target.head

    def logits(self, step: int, output: torch.Tensor, target: TargetParts) -> torch.Tensor:
        """output: [R, hidden_size] -> [R, V']."""
        return F.linear(self.normed(output), self.scorer(target))

    def tensors(self) -> dict[str, torch.Tensor]:
        """The trained weights under their public names."""
        return {name: value.detach().clone() for name, value in self.state_dict().items()}


class ChainHead(TrainableHead):
    """One draft layer fed its own output, step after step (EAGLE-1, EAGLE-3, one MTP module reused)."""

    attention: Attention

    @abstractmethod
    def true_rows(self, embedded: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention input and residual of the true rows, [R, ...] each."""

    @abstractmethod
    def drafted_rows(self, embedded: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The same of drafted rows, from the output of the step before; [C, ...]."""

    @abstractmethod
    def finish(self, hidden: torch.Tensor) -> torch.Tensor:
        """What follows attention: the MLP, and a norm where the head has one."""

    def steps(self, batch: Batch, target: TargetParts, count: int) -> list[torch.Tensor]:
        """See TrainableHead."""
        inputs, residual = self.true_rows(F.embedding(batch.following, target.embedding), batch)
        counts = (batch.column_counts, batch.row_counts)
        geometry = Geometry.build(batch.positions[batch.columns], batch.positions, *counts, batch.final.dtype)
        memory = self.attention.remember(inputs, geometry, target.rope)
        x, stream = inputs[batch.columns], residual[batch.columns]
        outputs: list[torch.Tensor] = []
        for step in range(count):
            if step:
                token_ids = batch.following[batch.rows(step)[0]]
                x, stream = self.drafted_rows(F.embedding(token_ids, target.embedding), outputs[-1])
            outputs.append(self.finish(stream + self.attention.attend(x, step, memory, geometry, target.rope)))
        return outputs


class Eagle3(ChainHead):
    """EAGLE-3 (C6): three target layers fused, its own norm and LM head over a reduced vocabulary."""

    kind = "eagle3"

    def __init__(self, shape: HeadShape, draft_vocab: int, num_steps: int) -> None:
        super().__init__()
        hidden, eps = shape.hidden_size, shape.rms_norm_eps
        self.num_steps = num_steps
        self.fc = nn.Linear(3 * hidden, hidden, bias=False)
        self.attention = Attention(shape, 2 * hidden)
        self.input_layernorm, self.hidden_norm = RmsNorm(hidden, eps), RmsNorm(hidden, eps)
        self.post_attention_layernorm, self.norm = RmsNorm(hidden, eps), RmsNorm(hidden, eps)
        self.mlp = Mlp(shape)
        self.lm_head = nn.Linear(hidden, draft_vocab, bias=False)

    def true_rows(self, embedded: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """See ChainHead."""
        return self.drafted_rows(embedded, self.fc(batch.aux))

    def drafted_rows(self, embedded: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See ChainHead."""
        return torch.cat((self.input_layernorm(embedded), self.hidden_norm(output)), dim=-1), output

    def finish(self, hidden: torch.Tensor) -> torch.Tensor:
        """See ChainHead."""
        out: torch.Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out

    def normed(self, output: torch.Tensor) -> torch.Tensor:
        """See TrainableHead."""
        out: torch.Tensor = self.norm(output)
        return out

    def scorer(self, target: TargetParts) -> torch.Tensor:
        """See TrainableHead."""
        return self.lm_head.weight

    def tensors(self) -> dict[str, torch.Tensor]:
        """Names of the original EAGLE-3 checkpoints (F2), the vocabulary map apart."""
        outside = ("fc.", "norm.", "lm_head.")
        named = {_public(name): value for name, value in super().tensors().items()}
        return {name if name.startswith(outside) else f"midlayer.{name}": value for name, value in named.items()}


class Eagle1(ChainHead):
    """EAGLE-1 (C4): embedding and feature joined, a layer without input norm, the target's own head."""

    kind = "eagle1"
    feature_weight = 1.0

    def __init__(self, shape: HeadShape, num_steps: int) -> None:
        super().__init__()
        self.num_steps = num_steps
        self.fc = nn.Linear(2 * shape.hidden_size, shape.hidden_size, bias=False)
        self.attention = Attention(shape, shape.hidden_size)
        self.post_attention_layernorm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = Mlp(shape)

    def true_rows(self, embedded: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """See ChainHead."""
        return self.drafted_rows(embedded, batch.final)

    def drafted_rows(self, embedded: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See ChainHead."""
        x = self.fc(torch.cat((embedded, output), dim=-1))
        return x, x

    def finish(self, hidden: torch.Tensor) -> torch.Tensor:
        """See ChainHead."""
        out: torch.Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out

    def tensors(self) -> dict[str, torch.Tensor]:
        """Names of the EAGLE-1 checkpoints (F1)."""
        named = {_public(name): value for name, value in super().tensors().items()}
        return {name if name.startswith("fc.") else f"layers.0.{name}": value for name, value in named.items()}


class MtpModule(nn.Module):
    """DeepSeek-V3's module (C8) on the target's block: two norms, the join, a decoder layer, the shared head's norm."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        hidden, eps = shape.hidden_size, shape.rms_norm_eps
        self.enorm, self.hnorm = RmsNorm(hidden, eps), RmsNorm(hidden, eps)
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.input_layernorm, self.post_attention_layernorm = RmsNorm(hidden, eps), RmsNorm(hidden, eps)
        self.attention = Attention(shape, hidden)
        self.mlp = Mlp(shape)
        self.shared_head_norm = RmsNorm(hidden, eps)

    def join(self, embedded: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention input and residual of joined rows."""
        x = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), dim=-1))
        return self.input_layernorm(x), x

    def finish(self, hidden: torch.Tensor) -> torch.Tensor:
        """The normed output, from the residual stream after attention."""
        out: torch.Tensor = self.shared_head_norm(hidden + self.mlp(self.post_attention_layernorm(hidden)))
        return out

    def named(self, prefix: str) -> dict[str, torch.Tensor]:
        """Tensors under DeepSeek's names (F5)."""
        return {f"{prefix}.{_public(name)}": value.detach().clone() for name, value in self.state_dict().items()}


class Mtp1(ChainHead):
    """One MTP module, trained for reuse: its normed output is the next step's hidden row (C8a)."""

    kind = "mtp"

    def __init__(self, shape: HeadShape, num_steps: int, first_layer: int) -> None:
        super().__init__()
        self.num_steps, self.first_layer = num_steps, first_layer
        self.module = MtpModule(shape)

    @property
    def attention(self) -> Attention:  # type: ignore[override]
        """The module's."""
        return self.module.attention

    def true_rows(self, embedded: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """See ChainHead."""
        return self.module.join(embedded, batch.final)

    def drafted_rows(self, embedded: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See ChainHead."""
        return self.module.join(embedded, output)

    def finish(self, hidden: torch.Tensor) -> torch.Tensor:
        """See ChainHead."""
        return self.module.finish(hidden)

    def tensors(self) -> dict[str, torch.Tensor]:
        """See MtpModule.named."""
        return self.module.named(f"model.layers.{self.first_layer}")


class Mtp3(TrainableHead):
    """Several chained MTP modules (C8b): module k, row i, reads t_{i+k} and g^{k-1}_i, and predicts t_{i+k+1}."""

    kind = "mtp"

    def __init__(self, shape: HeadShape, num_modules: int, first_layer: int) -> None:
        super().__init__()
        self.num_steps, self.first_layer = num_modules, first_layer
        self.modules_ = nn.ModuleList(MtpModule(shape) for _ in range(num_modules))

    def steps(self, batch: Batch, target: TargetParts, count: int) -> list[torch.Tensor]:
        """See TrainableHead. Every row of a module is needed: the next one attends to it."""
        hidden, table = batch.final, target.rope
        every = Geometry.build(batch.positions, batch.positions, batch.row_counts, batch.row_counts, hidden.dtype)
        counts = (batch.column_counts, batch.row_counts)
        some = Geometry.build(batch.positions[batch.columns], batch.positions, *counts, batch.final.dtype)
        following, outputs = batch.following, []
        for k, module in enumerate(self.modules_[:count], start=1):
            assert isinstance(module, MtpModule)
            inputs, stream = module.join(F.embedding(following, target.embedding), hidden)
            following = F.pad(following[1:], (0, 1))  # rows near a sample's end are wrong and have no label
            last = k == count
            memory = module.attention.remember(inputs, every, table)
            if last:
                inputs, stream = inputs[batch.columns], stream[batch.columns]
            attended = module.attention.attend(inputs, 0, memory, some if last else every, table)
            hidden = module.finish(stream + attended)
            outputs.append(hidden if last else hidden[batch.columns])
        return outputs

    def tensors(self) -> dict[str, torch.Tensor]:
        """See MtpModule.named."""
        named: dict[str, torch.Tensor] = {}
        for k, module in enumerate(self.modules_):
            assert isinstance(module, MtpModule)
            named |= module.named(f"model.layers.{self.first_layer + k}")
        return named


class Medusa(TrainableHead):
    """Medusa-1 (C3): residual blocks on h_i per head, the target's LM head; head k predicts t_{i+k+2}."""

    kind = "medusa"

    def __init__(self, shape: HeadShape, num_heads: int, num_blocks: int) -> None:
        super().__init__()
        hidden = shape.hidden_size
        self.num_steps, self.num_blocks = num_heads, num_blocks
        self.blocks = nn.ModuleList(
            nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(num_blocks)) for _ in range(num_heads)
        )
        for parameter in self.parameters():
            nn.init.zeros_(parameter)  # every head starts as the target's own next-token head

    def steps(self, batch: Batch, target: TargetParts, count: int) -> list[torch.Tensor]:
        """See TrainableHead."""
        hidden = batch.final[batch.columns]
        outputs = []
        for blocks in self.blocks[:count]:
            assert isinstance(blocks, nn.ModuleList)
            y = hidden
            for block in blocks:
                y = y + F.silu(block(y))
            outputs.append(y)
        return outputs

    def tensors(self) -> dict[str, torch.Tensor]:
        """``{head}.{block}.linear.weight`` (F4), without vocabulary matrices."""
        named = {}
        for name, value in super().tensors().items():
            _, head, block, what = name.split(".")
            named[f"{head}.{block}.linear.{what}"] = value
        return named


def copy_into(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Set the parameters named in ``tensors``; shapes must agree."""
    parameters = dict(module.named_parameters())
    with torch.no_grad():
        for name, value in tensors.items():
            parameters[name].copy_(value)
