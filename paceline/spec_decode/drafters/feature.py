"""A drafter that continues from the target's hidden rows: EAGLE-1/2/3 and one reused MTP module (algorithms.md E).

Row i of the head is (t_{i+1}, h_i) at position i and predicts t_{i+2}. ``extend`` writes rows of committed tokens with
the target's own hidden rows, over whatever drafts left there (E3), and keeps the candidates and the output of the last
row. ``propose`` grows a tree from them, one forward a level over all sequences: a node at depth d is the row (its
token, its parent's output) at position m + d - 1; it sees rows 0..m-1 and the rows of its own ancestors. Node rows
lie in slots m, m+1, ... in order of generation and are forgotten after the round.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import torch

from paceline.attention.base import AttentionBackend, ForwardBatch, Segment
from paceline.errors import ConfigError
from paceline.kvcache.pool import KvPool
from paceline.layers.upload import staged
from paceline.models.base import ForwardContext, TargetModel
from paceline.models.late_tokens import LateTokens
from paceline.spec_decode.base import DraftBudget, Drafter, DraftSampling, ExtendItem, Settle, TreeKind
from paceline.spec_decode.drafters.candidates import Candidates, choose, choose_ahead
from paceline.spec_decode.drafters.chain_drafts import chain_trees, draft_chains, unread_chains
from paceline.spec_decode.drafters.confidence import log_values
from paceline.spec_decode.drafters.growing import GrowingDraft, grown_tree, hang, next_levels, static_choices
from paceline.spec_decode.drafters.head_graphs import HeadGraphs
from paceline.spec_decode.heads.base import DraftHead, LastRows
from paceline.spec_decode.sequence import DraftState, Sequence
from paceline.spec_decode.trees.expand import ROOT, DynamicGrowth, Growth, StaticGrowth
from paceline.spec_decode.trees.static_trees import RankPath, fitted_counts
from paceline.spec_decode.trees.tree import DraftTree
from paceline.spec_decode.unread import BLANK, UnreadChains, UnreadWalk

WORTH_LEAVING_OUT = 16  # rows: with fewer, a second batch costs more than their outputs


@dataclass
class Draft(GrowingDraft):
    """Its slots are free from position m on: the root t_m has no draft row."""

    outputs: dict[int, torch.Tensor] = field(default_factory=dict)  # node (ROOT: a_{m-1}) -> [hidden_size]

    def segment(self, nodes: Seq[int]) -> Segment:
        """The rows that expand ``nodes``, all of one depth."""
        pool, m = self.growth.pool, self.committed
        for node in nodes:
            own = self.slots[len(self.tails) - 1]
            self.tails[node] = [*self.tails[pool.parents[node]], own]
        tokens = [pool.token_ids[node] for node in nodes]
        tails = [self.tails[node] for node in nodes]
        start = m + len(tails[0]) - 1
        table = self.seq.table.slots
        if len(nodes) == 1 and len(self.tails) - 1 == len(tails[0]):
            return Segment.linear(tokens, start, table)  # nothing but this path was expanded: plain rows
        return Segment(tokens, [start] * len(nodes), [tail[-1] for tail in tails], table, [m] * len(nodes), tails)


class FeatureDrafter(Drafter):
    """Steps a ``DraftHead`` from the target's hidden rows."""

    needs_extend = True
    lookahead = 1

    def __init__(
        self,
        name: str,
        model: TargetModel,
        head: DraftHead,
        kv: KvPool,
        attention: AttentionBackend,
        width: int,
        sampling: DraftSampling = DraftSampling.COUPLED,
        static_tree: Seq[RankPath] = (),
        expand_above: float | None = None,
    ) -> None:  # the head, what it runs on, and three choices of its drafts, which most callers leave out
        """width: candidates kept of each row. static_tree: see ``static_trees``; none means a comb of the budget's
        width. expand_above: dynamic trees expand every node whose path has this probability (0 < it <= 1) instead of
        the budget's width a level. Raises ConfigError."""
        self.name, self.model, self.head, self.kv, self.attention = name, model, head, kv, attention
        self.width, self.sampling, self.expand_above = width, sampling, expand_above
        # Whoever assembles a node on a GPU captures them and puts them here. They cannot be an argument: what they
        # capture is this drafter's head, and their tables are as long as `draft_slots` says.
        self.graphs: HeadGraphs | None = None
        self.choices = static_choices(static_tree, width)
        self.kv_layers, self.aux_layers, self.state_width = head.kv_layers, head.aux_layers, head.hidden_size
        self.row_width = max(1, len(head.aux_layers)) * model.spec.hidden_size
        self.fused_width = head.hidden_size if head.fuses else 0
        if expand_above is not None and not 0.0 < expand_above <= 1.0:
            raise ConfigError("expand_above", f"must be a probability above 0, got {expand_above}")

    # ---- extend: committed rows in, candidates out

    def extend(self, items: Seq[ExtendItem]) -> None:
        """See Drafter. Rows start..end-1 of every item in one forward (E1, E3, E6).

        A sequence whose earlier rows never came (handed over without them) cannot be taken up: it is left out.
        """
        items = [item for item in items if item.start <= item.seq.draft_rows]
        if not items:
            return
        segments = [
            Segment.linear(item.seq.token_ids[item.start + 1 : item.end + 1], item.start, item.seq.table.slots)
            for item in items
        ]
        ends = self._last_outputs(segments, self._fused(items))
        for item in items:
            item.seq.draft = None  # of a prompt's chunk before the last nothing is kept but its rows
            item.seq.draft_rows = item.end
        final = [i for i, item in enumerate(items) if item.final]
        if final:
            last = ends if len(final) == len(items) else ends[staged(np.array(final), ends.device)]
            seqs = [items[i].seq for i in final]
            found = self._choose(last, seqs, [items[i].end + 1 for i in final])
            for row, seq in enumerate(seqs):
                seq.draft = _state(found, last, row)

    def extend_ahead(self, seqs: Seq[Sequence], walk: UnreadWalk) -> Settle | None:
        """See Drafter: by a captured extend over all rows of every chain, accepted or not."""
        if self.graphs is None or any(seq.draft_rows < at for seq, at in zip(seqs, walk.starts, strict=True)):
            return None
        each = walk.depth + 1
        segments = [
            Segment.linear((BLANK,) * each, at, seq.table.slots) for seq, at in zip(seqs, walk.starts, strict=True)
        ]
        late = LateTokens(walk.tokens.view(-1), np.arange(len(seqs) * each))
        last = self.graphs.extend(segments, self.fuse(walk.rows), late, walk.depth - walk.accepted)
        if last is None:
            return None
        params, firsts = [seq.request.params for seq in seqs], [at + 2 for at in walk.starts]
        vocab, head = self.model.spec.vocab_size, self.head
        logits = head.logits(last)
        found = choose_ahead(
            logits, params, firsts, walk.accepted, walk.depth, self.width, self.sampling, vocab, head.token_map
        )
        rows = {id(seq): row for row, seq in enumerate(seqs)}

        def settle(items: Seq[ExtendItem]) -> None:
            for item in items:
                item.seq.draft_rows = item.end
                item.seq.draft = _state(found, last, rows[id(item.seq)])

        return settle

    def _fused(self, items: Seq[ExtendItem]) -> torch.Tensor:
        """Rows of all items for the head, [rows of all items, hidden_size]; by one product where that is possible."""
        if any(item.fused for item in items):
            return torch.cat([item.hidden if item.fused else self.fuse(item.hidden) for item in items])
        return self.fuse(torch.cat([item.hidden for item in items]))

    def fuse(self, rows: torch.Tensor) -> torch.Tensor:
        """See Drafter."""
        return self.head.fuse(rows)

    def _last_outputs(self, segments: Seq[Segment], hidden: torch.Tensor) -> torch.Tensor:
        """What the head says after each sequence's last row, [len(segments), hidden_size]."""
        if self.graphs is not None and (ends := self.graphs.extend(segments, hidden)) is not None:
            return ends
        rows = staged(np.cumsum([len(segment.token_ids) for segment in segments]) - 1, hidden.device)
        if hidden.shape[0] < len(segments) + WORTH_LEAVING_OUT:
            return self._forward(segments, hidden)[rows]
        device = self.model.device
        last = ForwardBatch.build([_last_row(segment) for segment in segments], device)
        context = ForwardContext.build(last, self.kv, self.attention)
        return self.head.extend(ForwardBatch.build(segments, device), hidden, LastRows(rows, context))

    def _forward(self, segments: Seq[Segment], hidden: torch.Tensor) -> torch.Tensor:
        batch = ForwardBatch.build(segments, self.model.device)
        return self.head.forward(batch.token_ids, hidden, ForwardContext.build(batch, self.kv, self.attention))

    def _choose(self, outputs: torch.Tensor, seqs: Seq[Sequence], positions: Seq[int]) -> Candidates:
        """Candidates after rows of the head. outputs: [R, hidden_size]."""
        params = [seq.request.params for seq in seqs]
        vocab, head = self.model.spec.vocab_size, self.head
        return choose(head.logits(outputs), params, positions, self.width, self.sampling, vocab, head.token_map)

    # ---- propose: a tree, level by level

    def draft_slots(self, budget: DraftBudget) -> int:
        """See Drafter: one for every node that may be expanded."""
        if budget.num_draft_tokens == 0:
            return 0
        if self._is_dynamic(budget):
            keep = budget.max_nodes - 1
            level = min(budget.tree_width, keep)
            return keep if self.expand_above is not None else level * (budget.num_draft_tokens - 1)
        return max(len(self._counts(budget)) - 1, 0)

    def propose(self, seqs: Seq[Sequence], budgets: Seq[DraftBudget]) -> list[DraftTree]:
        """See Drafter. Raises ConfigError for a dynamic tree of sampled candidates: dropping the worst of what was
        drawn leaves children that are no draw from q any more (algorithms.md B6)."""
        if (chains := self._chains(seqs, budgets)) is not None:
            return chains
        drafts = [self._start(seq, budget) for seq, budget in zip(seqs, budgets, strict=True)]
        self._add_first([draft for draft in drafts if draft.outputs])
        while self._add_level(drafts):
            pass
        return [grown_tree(draft, self.model.spec.vocab_size, self.name) for draft in drafts]

    def propose_unread(self, seqs: Seq[Sequence], budgets: Seq[DraftBudget]) -> UnreadChains | None:
        """See Drafter."""
        depths = self._fixed_depths(budgets)
        if self.graphs is None or depths is None:
            return None
        return unread_chains(self.graphs, seqs, depths, self.model.spec.vocab_size, self.name)

    def _chains(self, seqs: Seq[Sequence], budgets: Seq[DraftBudget]) -> list[DraftTree] | None:
        """All trees by one captured loop, where all of them are chains that never stop early; else None."""
        depths = self._fixed_depths(budgets)
        if self.graphs is None or depths is None:
            return None
        rows = draft_chains(self.graphs, seqs, depths)
        return None if rows is None else chain_trees(seqs, budgets, rows, self.model.spec.vocab_size, self.name)

    def _fixed_depths(self, budgets: Seq[DraftBudget]) -> list[int] | None:
        """Candidates of every chain, as the captured loop can draft them; None where one is no such chain."""
        if self.sampling is DraftSampling.SAMPLED:
            return None
        depths = [depth for budget in budgets if (depth := self._chain_depth(budget)) is not None]
        return depths if len(depths) == len(budgets) else None

    def _chain_depth(self, budget: DraftBudget) -> int | None:
        """Candidates of a chain; None where the tree has branches, or may end before its depth."""
        if self._is_dynamic(budget) or budget.min_confidence > 0.0:
            return None
        counts = self._counts(budget) if budget.num_draft_tokens else {}
        return len(counts) if all(count == 1 for count in counts.values()) else None

    def _is_dynamic(self, budget: DraftBudget) -> bool:
        return budget.tree is TreeKind.DYNAMIC and budget.tree_width > 1

    def _counts(self, budget: DraftBudget) -> Mapping[RankPath, int]:
        depth, nodes = budget.num_draft_tokens, budget.max_nodes - 1
        if budget.tree is TreeKind.STATIC:
            return fitted_counts(self.choices, depth, budget.tree_width, nodes)
        return fitted_counts((), depth, 1, nodes)

    def _start(self, seq: Sequence, budget: DraftBudget) -> Draft:
        growth: Growth
        if self._is_dynamic(budget):
            if self.sampling is DraftSampling.SAMPLED:
                raise ConfigError("tree", "dynamic trees need draft sampling coupled or greedy, not sampled")
            nodes = budget.max_nodes - 1
            growth = DynamicGrowth(budget.num_draft_tokens, budget.tree_width, nodes, self.expand_above)
        else:
            growth = StaticGrowth(self._counts(budget))
        m = len(seq.token_ids) - 1
        draft = Draft(seq, budget, growth, seq.table.slots[m : m + self.draft_slots(budget)].tolist())
        if seq.draft is not None and budget.num_draft_tokens:
            draft.outputs[ROOT] = seq.draft.hidden[0]
        return draft

    def _add_first(self, drafts: Seq[Draft]) -> None:
        """Candidates of the last extend. Those of SAMPLED are computed again: the whole q is not kept (H1)."""
        if not drafts:
            return
        where = [(draft, ROOT) for draft in drafts]
        if self.sampling is DraftSampling.SAMPLED:
            hidden = torch.stack([draft.outputs[ROOT] for draft in drafts])
            self._add(where, self._choose(hidden, [d.seq for d in drafts], [d.child_position(ROOT) for d in drafts]))
            return
        for draft in drafts:
            state = draft.seq.draft
            assert state is not None
            self._add([(draft, ROOT)], Candidates(state.proposal_ids, state.proposal_probs, None))

    def _add_level(self, drafts: Seq[Draft]) -> bool:
        """One draft forward over the nodes that every tree expands next; False when none does."""
        levels = next_levels(drafts)
        if not levels:
            return False
        where = [(draft, node) for draft, level in levels for node in level]
        hidden = torch.stack([draft.outputs[draft.growth.pool.parents[node]] for draft, node in where])
        outputs = self._forward([draft.segment(level) for draft, level in levels], hidden)
        for (draft, node), row in zip(where, outputs, strict=True):
            draft.outputs[node] = row
        positions = [draft.child_position(node) for draft, node in where]
        self._add(where, self._choose(outputs, [draft.seq for draft, _ in where], positions))
        return True

    def _add(self, where: Seq[tuple[Draft, int]], found: Candidates) -> None:
        """Hang row r of ``found`` under the r-th node. The tree grows on the host, which waits here for the device."""
        found = Candidates(found.ids.cpu(), found.probs.cpu(), found.full)
        params = [draft.seq.request.params for draft, _ in where]
        positions = [draft.child_position(node) for draft, node in where]
        # Chains and static trees that never stop early need no values: q tells which candidates are possible at all.
        weighed = any(self._is_dynamic(draft.budget) or draft.budget.min_confidence > 0.0 for draft, _ in where)
        coupled = weighed and self.sampling is DraftSampling.COUPLED
        values = log_values(found.ids, found.probs, params, positions, coupled=coupled)
        hang(where, found, values)


def _state(found: Candidates, outputs: torch.Tensor, row: int) -> DraftState:
    """What one sequence drafts from: its row of the candidates, and of the head's outputs."""
    own = slice(row, row + 1)
    return DraftState(found.ids[own], found.probs[own], outputs[own])


def _last_row(segment: Segment) -> Segment:
    """The last row of a linear segment, behind the others."""
    return Segment.linear(segment.token_ids[-1:], segment.positions[-1], segment.slots)
