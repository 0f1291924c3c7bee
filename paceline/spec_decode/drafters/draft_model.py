"""A smaller model with the same tokenizer drafts (arXiv 2211.17192; algorithms.md C1).

Its layers are further layers of the target's pages. Row i is token t_i at position i and predicts t_{i+1}; it needs no
hidden row of the target, so all that a sequence's drafts rest on is its tokens and this KV.

``propose`` feeds the committed tokens that have no row yet, the root t_m among them, and then grows a tree, one
forward a level over all sequences. A drafted node at depth d is a row at position m + d; node rows lie in slots m+1,
m+2, ... in order of expansion and see t_0..t_m and their own ancestors. Rows that lie at their own position's slot
(all of a chain's) are exact if their tokens are accepted, and stay. After j of K chain drafts were accepted t_m, d_1,
... d_min(j,K-1) have rows; after a full accept d_K has none, and the next round feeds two tokens. What a tree dropped,
or another drafter's round committed, is owed in the same way and is fed with the next root, in the same forward.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from itertools import takewhile

import torch

from paceline.attention.base import AttentionBackend, ForwardBatch, Segment
from paceline.attention.select import attention_for
from paceline.engine_config import EngineConfig
from paceline.errors import ConfigError
from paceline.kvcache.layout import KvLayout
from paceline.kvcache.pool import KvPool
from paceline.models.base import ForwardContext, TargetModel
from paceline.spec_decode.base import DraftBudget, Drafter, DraftSampling, ExtendItem, TreeKind
from paceline.spec_decode.drafters.candidates import Candidates, choose
from paceline.spec_decode.drafters.confidence import log_values
from paceline.spec_decode.drafters.growing import GrowingDraft, grown_tree, hang, next_levels, static_choices
from paceline.spec_decode.drafters.plan import DrafterPlan, budget_of
from paceline.spec_decode.heads.draft_model import load_draft_model
from paceline.spec_decode.sequence import Sequence
from paceline.spec_decode.trees.expand import ROOT, DynamicGrowth, Growth, StaticGrowth
from paceline.spec_decode.trees.static_trees import RankPath, fitted_counts
from paceline.spec_decode.trees.tree import DraftTree

MAX_VOCAB_PADDING = 1024  # rows by which two models of one tokenizer may differ, padded for their hardware
MAX_OWED_ROWS = 64  # rounds without drafts leave at most so many committed rows to be fed later
CATCH_UP_ROWS = 256  # of one sequence in one round: a hand-over without draft KV must not stall the others


@dataclass(frozen=True)
class Written:
    """Rows of the last round that lie at their own position's slot: tokens at start, start + 1, ..."""

    start: int
    token_ids: tuple[int, ...]


@dataclass
class Draft(GrowingDraft):
    """Its slots are free from position m + 1 on, after the root's."""

    in_place: list[int] = field(default_factory=list)  # tokens of the rows at their own position's slot, from m on

    def segment(self, nodes: Seq[int]) -> Segment:
        """The rows that expand ``nodes``, all of one depth."""
        pool, table = self.growth.pool, self.seq.table.slots
        for node in nodes:
            tail = [*self.tails[pool.parents[node]], self.slots[len(self.tails) - 1]]
            self.tails[node] = tail
            if tail == self.slots[: len(tail)]:
                self.in_place.append(pool.token_ids[node])
        tokens = [pool.token_ids[node] for node in nodes]
        tails = [self.tails[node] for node in nodes]
        position = self.committed + len(tails[0])
        if len(nodes) == 1 and len(self.in_place) == 1 + len(tails[0]):
            return Segment.linear(tokens, position, table)  # every row of this path is in place: a plain row
        prefix = [self.committed + 1] * len(nodes)
        return Segment(tokens, [position] * len(nodes), [tail[-1] for tail in tails], table, prefix, tails)


class DraftModelDrafter(Drafter):
    """Steps a whole model of its own. ``seq.draft`` stays None: tokens and draft KV are all of its state."""

    name = "draft_model"
    needs_extend = True

    def __init__(
        self,
        target: TargetModel,
        draft: TargetModel,
        kv: KvPool,
        attention: AttentionBackend,
        first_layer: int,
        width: int,
        sampling: DraftSampling = DraftSampling.COUPLED,
        static_tree: Seq[RankPath] = (),
    ) -> None:
        """attention: for the draft model's heads. first_layer: the pool's layer that holds the draft's layer 0. width:
        candidates of each node. static_tree: see ``static_trees``; none means a comb of the budget's width.

        Raises ConfigError when the two models cannot share tokens or pages.
        """
        check_pair(target, draft)
        kept = KvLayout.of(draft.kv_layers, draft.dtype, "int8" if kv.layout.is_int8 else "auto").layers
        if kv.layout.layers[first_layer : first_layer + len(kept)] != kept:
            raise ConfigError("drafter", f"the pool's layers from {first_layer} on are not the draft model's")
        self.target, self.draft, self.kv, self.attention = target, draft, kv, attention
        self.width, self.sampling, self.kv_layers = width, sampling, draft.kv_layers
        self.max_rows = draft.spec.max_model_len  # of the draft's own context window
        self.choices = static_choices(static_tree, width)

    # ---- extend: rows for a prompt; in decode, what of the last round came true

    def extend(self, items: Seq[ExtendItem]) -> None:
        """See Drafter. A prompt's rows are computed here, they may be handed over. A decode round's are left to the
        next ``propose`` unless many are owed."""
        segments: list[Segment] = []
        for item in items:
            seq = item.seq
            seq.draft_rows += _came_true(seq, item.end)
            end = min(item.end, self.max_rows)
            owed = end - seq.draft_rows
            if item.end > seq.num_prefill:
                end = seq.draft_rows + (min(owed, CATCH_UP_ROWS) if owed > MAX_OWED_ROWS else 0)
            if end > seq.draft_rows:
                segments.append(self._committed_rows(seq, end))
                seq.draft_rows = end
        if segments:
            self._forward(segments)

    def _committed_rows(self, seq: Sequence, end: int) -> Segment:
        """Rows draft_rows..end-1. A token that the draft model has no embedding for passes as its last one."""
        start, last = seq.draft_rows, self.draft.spec.vocab_size - 1
        return Segment.linear([min(t, last) for t in seq.token_ids[start:end]], start, seq.table.slots)

    def _forward(self, segments: Seq[Segment]) -> torch.Tensor:
        batch = ForwardBatch.build(segments, self.draft.device)
        return self.draft.forward(ForwardContext.build(batch, self.kv, self.attention))

    # ---- propose: a tree, level by level

    def draft_slots(self, budget: DraftBudget) -> int:
        """See Drafter: one for the root and every other node that may be expanded."""
        if budget.num_draft_tokens == 0:
            return 0
        if self._is_dynamic(budget):
            return 1 + min(budget.tree_width, budget.max_nodes - 1) * (budget.num_draft_tokens - 1)
        return len(self._counts(budget))

    def propose(self, seqs: Seq[Sequence], budgets: Seq[DraftBudget]) -> list[DraftTree]:
        """See Drafter. A sequence far behind (handed over without draft KV), or past the draft model's context window,
        gets the root alone."""
        drafts = [self._start(seq, budget) for seq, budget in zip(seqs, budgets, strict=True)]
        active = [draft for draft in drafts if draft.budget.num_draft_tokens]
        self._add_first(active)
        while self._add_level(active):
            pass
        for draft in active:
            draft.seq.memory[self.name] = Written(draft.committed, tuple(draft.in_place))
        return [grown_tree(draft, self.target.spec.vocab_size, self.name) for draft in drafts]

    def _is_dynamic(self, budget: DraftBudget) -> bool:
        """Sampled candidates are not pruned by score: what is left would be no draw from q (B6). They get the static
        tree, whatever a request asks."""
        return budget.tree is TreeKind.DYNAMIC and budget.tree_width > 1 and self.sampling is not DraftSampling.SAMPLED

    def _counts(self, budget: DraftBudget) -> Mapping[RankPath, int]:
        depth, nodes = budget.num_draft_tokens, budget.max_nodes - 1
        if budget.tree is TreeKind.CHAIN:
            return fitted_counts((), depth, 1, nodes)
        return fitted_counts(self.choices, depth, budget.tree_width, nodes)

    def _start(self, seq: Sequence, budget: DraftBudget) -> Draft:
        m = len(seq.token_ids) - 1
        # The last drafted row stands at m + K - 1.
        budget = replace(budget, num_draft_tokens=max(min(budget.num_draft_tokens, self.max_rows - m), 0))
        growth: Growth
        if self._is_dynamic(budget):
            growth = DynamicGrowth(budget.num_draft_tokens, budget.tree_width, budget.max_nodes - 1)
        else:
            growth = StaticGrowth(self._counts(budget))
        return Draft(seq, budget, growth, seq.table.slots[m + 1 : m + self.draft_slots(budget)].tolist())

    def _add_first(self, drafts: Seq[Draft]) -> None:
        """Feed what is owed and the root; candidates after the root."""
        if not drafts:
            return
        segments, last, ready = [], [], []
        rows = 0
        for draft in drafts:
            seq, m = draft.seq, draft.committed
            end = min(m + 1, seq.draft_rows + CATCH_UP_ROWS)
            segments.append(self._committed_rows(seq, end))
            rows += end - seq.draft_rows
            seq.draft_rows = min(end, m)
            if end == m + 1:
                ready.append(draft)
                last.append(rows - 1)
                draft.in_place.append(seq.token_ids[m])
        hidden = self._forward(segments)
        if ready:
            self._add([(draft, ROOT) for draft in ready], hidden[last])

    def _add_level(self, drafts: Seq[Draft]) -> bool:
        """One draft forward over the nodes that every tree expands next; False when none does."""
        levels = next_levels(drafts)
        if not levels:
            return False
        where = [(draft, node) for draft, level in levels for node in level]
        self._add(where, self._forward([draft.segment(level) for draft, level in levels]))
        return True

    def _add(self, where: Seq[tuple[Draft, int]], hidden: torch.Tensor) -> None:
        """Hang candidates under the nodes. hidden: [len(where), draft hidden_size]."""
        params = [draft.seq.request.params for draft, _ in where]
        positions = [draft.child_position(node) for draft, node in where]
        vocab = self.target.spec.vocab_size
        found = choose(self.draft.logits(hidden), params, positions, self.width, self.sampling, vocab)
        found = Candidates(found.ids.cpu(), found.probs.cpu(), found.full)
        coupled = self.sampling is DraftSampling.COUPLED
        values = log_values(found.ids, found.probs, params, positions, coupled=coupled)
        hang(where, found, values)


def _came_true(seq: Sequence, end: int) -> int:
    """How many rows from ``seq.draft_rows`` on the last round left exact, now that tokens before ``end`` have KV."""
    written = seq.memory.pop(DraftModelDrafter.name, None)
    if not isinstance(written, Written) or written.start != seq.draft_rows:
        return 0
    pairs = zip(written.token_ids, seq.token_ids[written.start : end], strict=False)
    return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))


def check_pair(target: TargetModel, draft: TargetModel) -> None:
    """Raise ConfigError naming what keeps the two models from sharing token ids or pages.

    Vocabularies may differ by padding. A special token that one side's config does not state is not compared.
    """
    ours, theirs = target.spec, draft.spec
    differ = []
    if abs(ours.vocab_size - theirs.vocab_size) > MAX_VOCAB_PADDING:
        differ.append(f"vocab_size {theirs.vocab_size} (target {ours.vocab_size})")
    if None not in (ours.bos_token_id, theirs.bos_token_id) and ours.bos_token_id != theirs.bos_token_id:
        differ.append(f"bos_token_id {theirs.bos_token_id} (target {ours.bos_token_id})")
    if ours.eos_token_ids and theirs.eos_token_ids and {*ours.eos_token_ids} != {*theirs.eos_token_ids}:
        differ.append(f"eos_token_ids {theirs.eos_token_ids} (target {ours.eos_token_ids})")
    if target.dtype != draft.dtype:
        differ.append(f"dtype {draft.dtype} (target {target.dtype})")
    if differ:
        raise ConfigError("drafter_path", f"the draft model does not fit the target: {', '.join(differ)}")


def plan(name: str, config: EngineConfig, model: TargetModel) -> DrafterPlan:
    """See PlanDrafter."""
    if not config.drafter_path:
        raise ConfigError("drafter_path", "the draft model's folder or name is needed")
    first = len(model.kv_layers)
    draft, digest = load_draft_model(config.drafter_path, model, first)

    def make(kv: KvPool, attention: AttentionBackend) -> Drafter:
        spec, width = draft.spec, budget_of(config).tree_width
        geometry = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
        longest = config.max_model_len or model.spec.max_model_len
        special = spec.special_attention(longest)
        own = attention_for(model.device, *geometry, config.attention_wanted, special=special, longest=longest)
        return DraftModelDrafter(model, draft, kv, own, first, width, DraftSampling(config.draft_sampling))

    return DrafterPlan(draft.kv_layers, digest, make)
