"""Medusa (arXiv 2401.10774; algorithms.md C3): independent heads on the target's last hidden row, no draft KV.

Off by one: with last committed token t_m the last true hidden row is h_{m-1}. The LM head predicted t_m from it, which
is sampled already; head k (from 0) predicts t_{m+1+k}, the candidates of depth k + 1. Heads do not see each other's
tokens, so the candidates are a Cartesian product, of which a tree keeps a part: ``choices`` decided beforehand, best
built from measured acceptance (``static_trees.best_choices``), or the best of this very request's product.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import takewhile

import torch
import torch.nn.functional as F

from paceline.attention.base import AttentionBackend
from paceline.engine_config import EngineConfig
from paceline.errors import ConfigError
from paceline.kvcache.pool import KvPool
from paceline.layers.linear import Linear
from paceline.layers.quantized import LinearWeight, QuantizedWeight
from paceline.models.base import TargetModel
from paceline.models.loader import WeightBag
from paceline.spec_decode.base import DraftBudget, Drafter, DraftSampling, ExtendItem, TreeKind
from paceline.spec_decode.drafters.candidates import Candidates, choose
from paceline.spec_decode.drafters.confidence import log_values
from paceline.spec_decode.drafters.plan import DrafterPlan, budget_of, heads_folder
from paceline.spec_decode.heads.detect import read_head
from paceline.spec_decode.heads.formats.config import HeadKind
from paceline.spec_decode.sequence import DraftState, Sequence
from paceline.spec_decode.trees.static_trees import (
    MEDUSA_RATES,
    RankPath,
    best_choices,
    checked_choices,
    comb_choices,
    fit,
)
from paceline.spec_decode.trees.tree import DraftTree, build_tree

TOKEN_MAP = "token_map"
DEFAULT_TREE = best_choices(MEDUSA_RATES, 24)  # best first: a budget of fewer nodes takes the head of the list


class ResBlock:
    """y = x + SiLU(W x + b)."""

    def __init__(self, weights: WeightBag, prefix: str, hidden: int) -> None:
        weight = weights.take_linear(f"{prefix}.weight", (hidden, hidden))
        self.linear = Linear(weight, weights.take(f"{prefix}.bias", (hidden,)))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [R, hidden_size] -> [R, hidden_size]."""
        return x + F.silu(self.linear(x))


class MedusaHeads:
    """All heads of one target."""

    def __init__(self, model: TargetModel, tensors: Mapping[str, LinearWeight]) -> None:
        """``tensors`` in FasterDecoding's names (algorithms.md F4), each taken exactly once: ``{head}.{block}.linear``
        ``.weight`` and ``.bias``, then ``{head}.{num_blocks}.weight`` [draft_vocab, hidden_size]; without the last the
        target's LM head serves ("v2"). Heads are counted from the names: configs in the wild say less than there are.
        A ``token_map`` int64 [draft_vocab] gives the target id of each row of a reduced vocabulary.

        Raises ConfigError naming what is missing, left over or misshapen.
        """
        self.model = model
        self.num_heads = _count_heads(tensors)
        placed = {name: _place(tensor, model) for name, tensor in tensors.items()}
        bag = WeightBag(placed).onto(model.device, model.dtype).rounded(model.quantize)
        self.token_map = bag.take(TOKEN_MAP) if TOKEN_MAP in placed else None
        self.blocks: list[list[ResBlock]] = []
        self.vocabularies: list[Linear] = []
        hidden, sizes = model.spec.hidden_size, set()
        for head in range(self.num_heads):
            blocks: list[ResBlock] = []
            while f"{head}.{len(blocks)}.linear.weight" in placed:
                blocks.append(ResBlock(bag, f"{head}.{len(blocks)}.linear", hidden))
            self.blocks.append(blocks)
            if (name := f"{head}.{len(blocks)}.weight") in placed:
                size = placed[name].shape[0]
                self.vocabularies.append(Linear(bag.take_head(name, (size, hidden)), out_float32=True))
                sizes.add(size)
        bag.finish()
        self._check_vocabularies(sizes)

    def _check_vocabularies(self, sizes: set[int]) -> None:
        vocab = self.model.spec.vocab_size
        if len(sizes) > 1 or len(self.vocabularies) not in (0, self.num_heads):
            raise ConfigError("drafter_path", "the Medusa heads differ in their vocabulary matrices")
        if self.token_map is None:
            if sizes and min(sizes) < vocab:
                raise ConfigError("drafter_path", f"Medusa heads over {min(sizes)} of {vocab} tokens need a token_map")
            return
        ids = self.token_map
        if ids.dtype != torch.int64 or {tuple(ids.shape)} != {(size,) for size in sizes}:
            raise ConfigError("drafter_path", f"token_map must be int64 with one id for each of {sizes or 'no'} rows")
        if int(ids.min()) < 0 or int(ids.max()) >= vocab or len(set(ids.tolist())) != len(ids):
            raise ConfigError("drafter_path", f"token_map must hold different token ids below {vocab}")

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [R, hidden_size], true rows h_i -> float32 [num_heads, R, draft_vocab]; head k is about t_{i+k+2}."""
        rows = []
        for blocks in self.blocks:
            y = hidden
            for block in blocks:
                y = block(y)
            rows.append(y)
        if self.vocabularies:
            return torch.stack([head(y) for head, y in zip(self.vocabularies, rows, strict=True)])
        return self.model.logits(torch.cat(rows)).view(self.num_heads, hidden.shape[0], -1)


def _count_heads(tensors: Iterable[str]) -> int:
    numbers = {int(name.split(".")[0]) for name in tensors if name.split(".")[0].isdigit()}
    if not numbers or numbers != set(range(len(numbers))):
        found = f"heads {sorted(numbers)}" if numbers else "none"
        raise ConfigError("drafter_path", f"expected Medusa heads 0, 1, ... such as 0.0.linear.weight, found {found}")
    return len(numbers)


def _place(tensor: LinearWeight, model: TargetModel) -> LinearWeight:
    """Floats as the target has them; codes as they are."""
    if isinstance(tensor, QuantizedWeight):
        return tensor
    dtype = model.dtype if tensor.is_floating_point() else tensor.dtype
    return tensor.to(device=model.device, dtype=dtype)


class MedusaDrafter(Drafter):
    """Trees out of the heads' candidates. All it keeps of a sequence is its ``DraftState``."""

    name = "medusa"
    needs_extend = True

    def __init__(
        self,
        model: TargetModel,
        heads: MedusaHeads,
        width: int,
        choices: Seq[RankPath] | None = None,
        sampling: DraftSampling = DraftSampling.COUPLED,
    ) -> None:
        """width: candidates kept of each head. choices: the static tree, best first; None takes DEFAULT_TREE as far
        as ``width`` reaches. Raises ConfigError for choices that are no tree or wider than ``width``, and for a
        ``width`` above 1 with SAMPLED: heads are drawn from once per depth, which is a chain."""
        self.model, self.heads, self.width, self.sampling = model, heads, width, sampling
        self.state_width = self.row_width = model.spec.hidden_size
        self.choices = checked_choices(DEFAULT_TREE if choices is None else choices)
        widest = max((max(choice) + 1 for choice in self.choices), default=1)
        if choices is not None and widest > width:
            raise ConfigError("tree_width", f"the static tree needs {widest} candidates a node, got {width}")
        if sampling is DraftSampling.SAMPLED and width > 1:
            raise ConfigError("tree_width", f"sampled Medusa drafts are chains: the width must be 1, not {width}")

    def draft_slots(self, budget: DraftBudget) -> int:
        """See Drafter: there is no draft KV."""
        return 0

    # ---- extend: the last hidden row in, candidates of every depth out

    def extend(self, items: Seq[ExtendItem]) -> None:
        """See Drafter. Only the last row of a final item matters."""
        for item in items:
            item.seq.draft_rows = item.end
        final = [item for item in items if item.final]
        if not final:
            return
        hidden = torch.stack([item.hidden[-1] for item in final])  # h_{m-1}; a copy, the chunk's rows may go
        found = self._choose(hidden, [item.seq for item in final])
        ids, probs = (t.cpu().view(self.heads.num_heads, len(final), -1) for t in (found.ids, found.probs))
        for i, item in enumerate(final):
            item.seq.draft = DraftState(ids[:, i].contiguous(), probs[:, i].contiguous(), hidden[i : i + 1])

    def _choose(self, hidden: torch.Tensor, seqs: Seq[Sequence]) -> Candidates:
        """hidden: [R, hidden_size], h_{m-1} of each sequence -> num_heads * R rows, head by head."""
        params = [seq.request.params for seq in seqs] * self.heads.num_heads
        positions = [len(seq.token_ids) + k for k in range(self.heads.num_heads) for seq in seqs]  # m + 1 + k
        logits = self.heads.logits(hidden).flatten(0, 1)
        vocab = self.model.spec.vocab_size
        return choose(logits, params, positions, self.width, self.sampling, vocab, self.heads.token_map)

    # ---- propose: part of the product

    def propose(self, seqs: Seq[Sequence], budgets: Seq[DraftBudget]) -> list[DraftTree]:
        """See Drafter."""
        laws = self._laws(seqs)
        triples = zip(seqs, budgets, laws, strict=True)
        return [self._tree(seq, budget, law) for seq, budget, law in triples]

    def _laws(self, seqs: Seq[Sequence]) -> list[torch.Tensor | None]:
        """The q that each head's candidate was drawn from, float32 [num_heads, vocab_size]; None where none was drawn.

        Computed again from the hidden row, which the hand-off carries: q itself is too wide to keep or to send.
        """
        laws: list[torch.Tensor | None] = [None] * len(seqs)
        if self.sampling is DraftSampling.SAMPLED:
            drawn = [i for i, seq in enumerate(seqs) if seq.draft is not None and seq.request.params.temperature > 0.0]
            hidden = [state.hidden for i in drawn if (state := seqs[i].draft) is not None]
            if hidden:
                full = self._choose(torch.cat(hidden), [seqs[i] for i in drawn]).full
                assert full is not None
                for i, law in zip(drawn, full.view(self.heads.num_heads, len(drawn), -1).unbind(1), strict=True):
                    laws[i] = law
        return laws

    def _tree(self, seq: Sequence, budget: DraftBudget, law: torch.Tensor | None) -> DraftTree:
        paths: list[RankPath] = []
        ids: list[list[int]] = []
        if seq.draft is not None and budget.num_draft_tokens:
            ids = seq.draft.proposal_ids.tolist()
            paths = sorted(self._paths(seq, seq.draft, budget, law), key=lambda path: (len(path), path))
        index = {(): -1} | {path: i for i, path in enumerate(paths)}
        pairs = [(index[path[:-1]], ids[len(path) - 1][path[-1]]) for path in paths]
        vocab = self.model.spec.vocab_size
        tree = build_tree(seq.token_ids[-1], pairs, vocab, budget.max_nodes, budget.num_draft_tokens)
        drawn = None if law is None else {node: law[node] for node in range(tree.num_draft_tokens)}  # a chain
        return replace(tree, draft_probs=drawn or None, drafter=self.name)

    def _paths(
        self, seq: Sequence, state: DraftState, budget: DraftBudget, law: torch.Tensor | None
    ) -> Iterable[RankPath]:
        """Rank paths of the tree, parents before children."""
        width = min(budget.tree_width, state.proposal_ids.shape[1])
        depth = min(budget.num_draft_tokens, state.proposal_ids.shape[0])
        if budget.tree is TreeKind.CHAIN:
            width = 1
        wants_rates = budget.min_confidence > 0.0 or (budget.tree is TreeKind.DYNAMIC and width > 1)
        rates = self._rates(seq, state, width) if wants_rates else []
        if budget.min_confidence > 0.0:
            # What was drawn must not decide whether to go on, the law it was drawn from may (B7).
            sure = [row[0] for row in rates] if law is None else law.amax(dim=1).tolist()
            depth = min(depth, 1 + len(list(takewhile(lambda rate: rate >= budget.min_confidence, sure))))
        nodes = budget.max_nodes - 1
        if width == 1:
            return comb_choices(min(depth, nodes), 1)
        if budget.tree is TreeKind.DYNAMIC:
            possible = (tuple(takewhile(lambda rate: rate > 0.0, row)) for row in rates[:depth])
            return best_choices(tuple(possible), nodes)
        return fit(self.choices, depth, width, nodes)

    def _rates(self, seq: Sequence, state: DraftState, width: int) -> list[list[float]]:
        """Estimated acceptance of each candidate, [num_heads][width]; not rising along a row."""
        heads = state.proposal_ids.shape[0]
        params, positions = [seq.request.params] * heads, range(len(seq.token_ids), len(seq.token_ids) + heads)
        coupled = self.sampling is DraftSampling.COUPLED
        values = log_values(state.proposal_ids, state.proposal_probs, params, positions, coupled=coupled)
        rates: list[list[float]] = values.exp()[:, :width].tolist()
        return rates


def plan(name: str, config: EngineConfig, model: TargetModel) -> DrafterPlan:
    """See PlanDrafter."""
    folder = heads_folder(name, config)
    found = read_head(folder, model.dtype, model.device)
    if found.kind is not HeadKind.MEDUSA:
        raise ConfigError("drafter", f"{folder} holds {found.kind} weights, not those of --drafter {name}")
    heads = MedusaHeads(model, found.tensors)

    def make(kv: KvPool, attention: AttentionBackend) -> Drafter:
        return MedusaDrafter(model, heads, budget_of(config).tree_width, None, DraftSampling(config.draft_sampling))

    return DrafterPlan((), found.digest, make)
