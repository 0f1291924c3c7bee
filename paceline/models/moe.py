"""Mixture of experts, with shared experts (DeepSeek-V3, arXiv 2412.19437, section 2.1.2) or without them.

Rows are the same however they are batched: every product goes through ``Linear``, and a row's experts are summed best
first, in float32.

On a GPU the experts' weights lie together and the host is never told how many rows an expert got: there the products
are torch's grouped ones for many rows, and exact ones for few. Bits depend on the batch then, unless exact bits are
asked for or the experts are codes (models/exact_experts.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from paceline.errors import ConfigError
from paceline.layers.bits import makes_exact, reads_codes
from paceline.layers.by_expert import by_expert
from paceline.layers.linear import Linear
from paceline.layers.ops import silu_mul
from paceline.layers.quantized import LinearWeight, QuantizedWeight
from paceline.layers.routing import RoutingRule, route
from paceline.models.moe_config import MoeSpec
from paceline.models.one_rank import ONE_RANK, OneRank
from paceline.models.quantization.fusing import fuse_layers
from paceline.triton_support import runs_triton

log = logging.getLogger(__name__)

Take = Callable[[str], torch.Tensor]  # a layer's weight by its name within the layer
TakeLinear = Callable[[str], LinearWeight]  # the same of a linear layer, as the checkpoint has it
Experts = Callable[[torch.Tensor, torch.Tensor], torch.Tensor | None]  # see SeparateExperts
GATE_UP = ("gate_proj", "up_proj")
FEW_EACH = 32  # rows of an expert, on average, up to which exact products are the faster ones (benchmarks.gpu.probes)


class SwiGlu:
    """down(silu(gate(x)) * up(x)). One expert, the shared experts, or a dense layer's MLP."""

    def __init__(
        self, take: TakeLinear, prefix: str, slabs: int, ranks: OneRank = ONE_RANK, out_float32: bool = False
    ) -> None:
        """slabs: see row_parallel. An expert has one: ranks share experts, not the sums of one."""
        self.gate_up_proj = Linear(fuse_layers({f"{prefix}.{n}": take(f"{prefix}.{n}.weight") for n in GATE_UP}))
        self.down_proj = ranks.row_linear(take(f"{prefix}.down_proj.weight"), None, slabs, out_float32)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]."""
        return self.down_proj(silu_mul(self.gate_up_proj(x)))


class FirstMlp:
    """A gated MLP that rank 0 has alone, as its width does not make the slabs of the model."""

    def __init__(self, take: TakeLinear, prefix: str, ranks: OneRank, out_float32: bool) -> None:
        self._mlp = SwiGlu(take, prefix, 1, out_float32=out_float32) if ranks.first else None
        self._ranks, self._out_float32 = ranks, out_float32

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See SwiGlu."""
        y = None if self._mlp is None else self._mlp(x)
        if self._out_float32:
            return x if y is None else y
        return self._ranks.told(y, x)


def shared_mlp(
    take: TakeLinear, prefix: str, slabs: int, ranks: OneRank, out_float32: bool = False
) -> SwiGlu | FirstMlp:
    """The MLP of a dense layer, or the shared experts, as the ranks have it. With ``out_float32`` rank 0 alone has the
    result: what others get is not to be used."""
    if ranks.share(prefix):
        return SwiGlu(take, prefix, slabs, ranks, out_float32)
    return FirstMlp(take, prefix, ranks, out_float32)


class SeparateExperts:
    """Each expert a module of its own, run once over all its rows. For CPUs, and for ranks that each have some of the
    experts: the host reads the counts."""

    def __init__(self, take: TakeLinear, prefix: str, num_experts: int, ranks: OneRank = ONE_RANK) -> None:
        held = ranks.experts(num_experts)
        experts = [SwiGlu(take, f"{prefix}.experts.{i}", 1, out_float32=True) for i in held]
        self._dealt = DealtExperts(experts, num_experts, ranks)

    def __call__(self, x: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor | None:
        """x: [T, hidden]; expert_ids: int64 [T, top_k] -> float32 [T, top_k, hidden]; None on other ranks than 0."""
        return self._dealt(x, expert_ids)


class DealtExperts:
    """Each expert runs once over all of its rows, on the one rank that has it, and rank 0 gets the rows as they come.
    The host reads how many they are."""

    def __init__(
        self, experts: Sequence[Callable[[torch.Tensor], torch.Tensor]], num_experts: int, ranks: OneRank
    ) -> None:
        """experts: this rank's of ``num_experts``, each [R, hidden] -> float32 [R, hidden]."""
        self._experts, self._num_experts, self._ranks = experts, num_experts, ranks
        self._held = ranks.experts(num_experts)

    def __call__(self, x: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor | None:
        """See SeparateExperts."""
        (rows, top_k), held = expert_ids.shape, slice(self._held.start, self._held.stop)
        flat = expert_ids.view(-1)
        order = flat.argsort(stable=True)
        counts: list[int] = torch.bincount(flat, minlength=self._num_experts).tolist()
        first = sum(counts[: held.start])
        mine = order[first : first + sum(counts[held])]
        gathered = torch.split_with_sizes(x[mine // top_k], counts[held])
        parts = [expert(part) for expert, part in zip(self._experts, gathered, strict=True) if part.shape[0]]
        none = torch.empty(0, x.shape[1], dtype=torch.float32, device=x.device)
        every = self._ranks.all_rows(torch.cat(parts) if parts else none, counts)
        if every is None:
            return None
        outputs = torch.empty(rows * top_k, x.shape[1], dtype=torch.float32, device=x.device)
        outputs[order] = every
        return outputs.view(rows, top_k, -1)


class GroupedExperts:
    """All experts as two stacked weights of floats, multiplied group by group; shapes do not depend on who got which
    rows."""

    def __init__(self, take: Take, prefix: str, num_experts: int) -> None:
        def stack(*names: str) -> torch.Tensor:
            def of(i: int) -> list[torch.Tensor]:
                return [take(f"{prefix}.experts.{i}.{name}.weight") for name in names]

            return stacked(of, num_experts)

        self._gate_up = stack("gate_proj", "up_proj")  # [experts, 2 * intermediate, hidden]
        self._down = stack("down_proj")  # [experts, hidden, intermediate]
        self._few = _exact_of(self._gate_up, self._down)

    def __call__(self, x: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
        """See SeparateExperts; sums of many rows are rounded to x's dtype."""
        if self._few is not None and expert_ids.numel() <= FEW_EACH * self._down.shape[0]:
            return self._few(x, expert_ids)
        return self.of_many(x, expert_ids)

    def of_many(self, x: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
        """The same by grouped products, however few rows there are."""
        sort = by_expert(expert_ids, self._down.shape[0])
        hidden = silu_mul(grouped(x[sort.sources], self._gate_up, sort.ends))
        return sort.in_rows(grouped(hidden, self._down, sort.ends), expert_ids.shape[1])


def _exact_of(gate_up: torch.Tensor, down: torch.Tensor) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None:
    """Exact products over the same memory, where their kernels run. They have no matrix instructions for float32."""
    if gate_up.dtype is torch.float32 or not runs_triton(gate_up.device):
        return None
    from paceline.layers.exact_products import Matrices
    from paceline.models.exact_experts import ExactExperts

    return ExactExperts(Matrices(gate_up), Matrices(down))


def stacked(parts_of: Callable[[int], Sequence[torch.Tensor]], num_experts: int) -> torch.Tensor:
    """One tensor [experts, rows, ...] of each expert's parts, one below the other; no second copy of them is made."""
    first = parts_of(0)
    sizes = [part.shape[0] for part in first]
    every = first[0].new_empty(num_experts, sum(sizes), *first[0].shape[1:])
    for i in range(num_experts):
        for place, part in zip(every[i].split_with_sizes(sizes), first if i == 0 else parts_of(i), strict=True):
            place.copy_(part)
    return every


def grouped(x: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """x: [R, in], rows of one expert together; weights: [experts, out, in]; ends: int32 [experts], past each expert's
    last row -> [R, out]. Float32 has no grouped product in torch: there every expert is run over every row."""
    if x.dtype is torch.bfloat16:
        return F.grouped_mm(x, weights.transpose(1, 2), offs=ends)
    expert = torch.searchsorted(ends, torch.arange(x.shape[0], dtype=ends.dtype, device=x.device), right=True)
    every = torch.matmul(x, weights.transpose(1, 2))  # [experts, R, out]
    return every.gather(0, expert.view(1, -1, 1).expand(1, -1, every.shape[2]))[0]


def routing_rule(spec: MoeSpec) -> RoutingRule:
    """How rows choose their experts."""
    return RoutingRule(spec.num_groups, spec.top_groups, spec.top_k, spec.normalise, spec.factor, spec.softmax)


def weighted_sum(outputs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """outputs: float32 [T, top_k, hidden]; weights: float32 [T, top_k] -> float32 [T, hidden], best first."""
    if runs_triton(outputs.device):
        from paceline.layers import experts_triton

        return experts_triton.weighted_sum(outputs, weights)
    outputs = outputs * weights.unsqueeze(-1)
    total = outputs[:, 0]
    for i in range(1, outputs.shape[1]):  # not sum(): the order of additions is part of the result
        total = total + outputs[:, i]
    return total


def experts_of(
    gate: torch.Tensor, take: Take, linear: TakeLinear, prefix: str, num_experts: int, ranks: OneRank = ONE_RANK
) -> Experts:
    """The routed experts of a layer, on the device of its ``gate`` and as that runs them: codes as they lie, on a GPU
    floats of gate's dtype by torch's grouped product. ranks: who has which of them."""
    if len(ranks.experts(num_experts)) < num_experts:  # on a GPU too: every rank must know each expert's rows
        return SeparateExperts(linear, prefix, num_experts, ranks)
    if makes_exact(gate.device):
        from paceline.models.exact_experts import ExactExperts

        return ExactExperts.load(linear, prefix, num_experts)
    if gate.device.type == "cpu":
        return SeparateExperts(linear, prefix, num_experts, ranks)
    return _on_a_gpu(gate.dtype, take, linear, prefix, num_experts)


def _on_a_gpu(dtype: torch.dtype, take: Take, linear: TakeLinear, prefix: str, num_experts: int) -> Experts:
    held: dict[str, LinearWeight] = {}  # a weight can be taken once

    def once(name: str) -> LinearWeight:
        if name not in held:
            held[name] = linear(name)
        return held[name]

    def floats(name: str) -> torch.Tensor:
        weight = held.pop(name, None)
        if isinstance(weight, QuantizedWeight):
            return weight.dequantised().to(dtype)
        return take(name) if weight is None else weight

    if reads_codes(once(f"{prefix}.experts.0.down_proj.weight")):
        from paceline.models.exact_experts import ExactExperts

        try:
            return ExactExperts.load(once, prefix, num_experts)
        except ConfigError as unlike:
            log.warning("%s: %s; they become floats", prefix, unlike.message)
    return GroupedExperts(floats, prefix, num_experts)


class MoeMlp:
    """Routed experts and shared experts of one layer."""

    def __init__(
        self,
        spec: MoeSpec,
        take: Take,
        linear: TakeLinear,
        slabs: int,
        ranks: OneRank = ONE_RANK,
        prefix: str = "mlp",
    ) -> None:
        """take: a layer's tensor as floats; linear: as the checkpoint has it; slabs: of the shared experts' sums."""
        self.spec, self.ranks = spec, ranks
        self.rule = routing_rule(spec)
        gate = take(f"{prefix}.gate.weight")
        self.router = Linear(gate.float())  # scores that nearly tie need every bit
        self.bias: torch.Tensor | None = None
        if spec.correction_bias:
            self.bias = take(f"{prefix}.gate.e_score_correction_bias").float().contiguous()
        self.experts = experts_of(gate, take, linear, prefix, spec.num_experts, ranks)
        self.shared: SwiGlu | FirstMlp | None = None
        if spec.num_shared_experts:
            self.shared = shared_mlp(linear, f"{prefix}.shared_experts", slabs, ranks, out_float32=True)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]."""
        expert_ids, weights = route(self.router(x.float()), self.bias, self.rule)
        outputs = self.experts(x, expert_ids)
        shared = None if self.shared is None else self.shared(x)
        if outputs is None:
            return self.ranks.told(None, x)
        total = weighted_sum(outputs, weights)
        return self.ranks.told((total if shared is None else total + shared).to(x.dtype), x)
