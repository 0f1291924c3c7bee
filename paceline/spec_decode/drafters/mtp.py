"""Chained multi-token prediction modules as a drafter (DeepSeek-V3, arXiv 2412.19437; algorithms.md C8b, E9, E10, E14).

Row i of module k is (e(t_{i+k}), g^{k-1}_i) at position i and predicts t_{i+k+1}; g^0 is the target's hidden row after
its final norm. Module k makes d_k: no draft step of its own, the drafts fall out of the extend. (One module that is
reused for every step is ``drafters/feature.py`` with ``MtpHead``.)

The bookkeeping: when the tokens up to t_end are committed, row i of module k is exact iff i + k <= end.
``_exact_rows`` counts them; rows past them rest on draft tokens and are rewritten by the next extend, which needs
g^{k-1} of the first rewritten row: that one row per module is what ``DraftState.hidden`` keeps.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from paceline.attention.base import AttentionBackend, ForwardBatch, Segment
from paceline.engine_config import EngineConfig
from paceline.errors import ConfigError
from paceline.kvcache.pool import KvPool
from paceline.models.base import ForwardContext, TargetModel
from paceline.spec_decode.base import DraftBudget, Drafter, DraftSampling, ExtendItem, TreeKind
from paceline.spec_decode.drafters.candidates import choose
from paceline.spec_decode.drafters.confidence import log_values
from paceline.spec_decode.drafters.feature import FeatureDrafter
from paceline.spec_decode.drafters.plan import DrafterPlan, budget_of, plan_weightless
from paceline.spec_decode.drafters.row_exporter import RowExporter, export_rows
from paceline.spec_decode.heads.mtp import MtpHead, MtpModule, load_mtp, mtp_kv_layers, reads_stream
from paceline.spec_decode.heads.shipped import own_modules, shipped_heads
from paceline.spec_decode.sequence import DraftState, Sequence
from paceline.spec_decode.trees.tree import DraftTree, build_tree, comb

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rows:
    """Rows of one module for one sequence: positions first.. with their tokens and input hidden rows."""

    seq: Sequence
    first: int
    token_ids: list[int]
    hidden: torch.Tensor  # [len(token_ids), hidden_size]


class MtpDrafter(Drafter):
    """Several chained MTP modules. Embedding and LM head are the target's.

    Trees are chains or combs: module k knows the first candidate of module k-1 alone, so there is nothing to expand
    and a dynamic tree is a comb too.
    """

    name = "mtp"
    needs_extend = True

    def __init__(
        self,
        model: TargetModel,
        modules: Seq[MtpModule],
        kv: KvPool,
        attention: AttentionBackend,
        width: int,
        sampling: DraftSampling = DraftSampling.COUPLED,
    ) -> None:
        """width: candidates kept per depth. Raises ConfigError for sampled drafts: their q is a row of the
        vocabulary per module, which neither travels (algorithms.md H1) nor can be had again from what does."""
        if len(modules) < 2:
            raise ConfigError("mtp_modules", f"chained modules are two or more, got {len(modules)}")
        if sampling is DraftSampling.SAMPLED:
            raise ConfigError("draft_sampling", "chained MTP modules draft coupled or greedy, not sampled")
        self.model, self.modules, self.kv, self.attention = model, list(modules), kv, attention
        self.width, self.sampling = width, sampling
        self.lookahead = len(self.modules)
        self.kv_layers = mtp_kv_layers(model.kv_layers, len(self.modules))
        self.state_width = self.row_width = model.spec.hidden_size

    # ---- extend: committed rows in, proposals out

    def extend(self, items: Seq[ExtendItem]) -> None:
        """See Drafter. Module by module, all sequences in one forward each.

        A sequence whose earlier rows never came (handed over without them) cannot be taken up: it is left out.
        """
        items = [item for item in items if item.start <= item.seq.draft_rows]
        inputs = [item.hidden for item in items]  # g^{k-1} of rows exact_rows(k, start)..end-1
        drafts: list[list[int]] = [[] for _ in items]
        proposals: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in items]
        windows: list[list[torch.Tensor]] = [[] for _ in items]
        for k, module in enumerate(self.modules, start=1):
            rows = [self._rows(item, k, g, d) for item, g, d in zip(items, inputs, drafts, strict=True)]
            outputs = self._forward(module, rows)
            final = [i for i, item in enumerate(items) if item.final]
            self._propose_depth(k, [items[i] for i in final], [outputs[i][-1] for i in final], final, drafts, proposals)
            if k == len(self.modules):
                break
            inputs = [
                self._next_input(item, k, row.first, out, window)
                for item, row, out, window in zip(items, rows, outputs, windows, strict=True)
            ]
        for i, item in enumerate(items):
            item.seq.draft = self._state(proposals[i], torch.stack(windows[i]))
            item.seq.draft_rows = item.end

    def _exact_rows(self, seq: Sequence, k: int, end: int) -> int:
        """Rows of module k that rest on committed tokens alone, tokens known through t_end."""
        return max(seq.cached_tokens, end - k + 1, 0)

    def _rows(self, item: ExtendItem, k: int, hidden: torch.Tensor, drafts: list[int]) -> Rows:
        seq = item.seq
        first = self._exact_rows(seq, k, item.start)
        last = item.end if item.final else self._exact_rows(seq, k, item.end)
        known = seq.token_ids[first + k : min(last + k, item.end + 1)]
        skip = max(0, first + k - item.end - 1)  # a prompt shorter than k: the row's token lies past d_1
        tokens = [*known, *drafts[skip : skip + last - first - len(known)]]
        return Rows(seq, first, tokens, hidden[: last - first])

    def _next_input(
        self, item: ExtendItem, k: int, first: int, output: torch.Tensor, window: list[torch.Tensor]
    ) -> torch.Tensor:
        """g^k rows for module k+1, and the row to keep for its next rewrite."""
        seq = item.seq
        start = self._exact_rows(seq, k + 1, item.start)
        if start < first:
            assert seq.draft is not None  # the row before `first`, kept by the last extend
            output = torch.cat((seq.draft.hidden[k - 1 : k], output))
        keep = self._exact_rows(seq, k + 1, item.end)
        inside = keep < self._exact_rows(seq, k, item.end)
        window.append(output[keep - start] if inside else torch.zeros_like(item.hidden[0]))
        return output

    def _forward(self, module: MtpModule, rows: Seq[Rows]) -> list[torch.Tensor]:
        """Outputs of each sequence's rows; a sequence may have none."""
        some = [r for r in rows if r.token_ids]
        outputs: list[torch.Tensor] = []
        if some:
            segments = [Segment.linear(r.token_ids, r.first, r.seq.table.slots) for r in some]
            batch = ForwardBatch.build(segments, self.model.device)
            context = ForwardContext.build(batch, self.kv, self.attention)
            hidden = torch.cat([r.hidden for r in some])
            out = module(self.model.embed(batch.token_ids), hidden, context)
            outputs = list(torch.split_with_sizes(out, [len(r.token_ids) for r in some]))
        empty = torch.empty(0, self.model.spec.hidden_size, dtype=self.model.dtype, device=self.model.device)
        return [outputs.pop(0) if r.token_ids else empty for r in rows]

    def _propose_depth(
        self,
        depth: int,
        items: Seq[ExtendItem],
        last: Seq[torch.Tensor],
        indices: Seq[int],
        drafts: list[list[int]],
        proposals: list[list[tuple[torch.Tensor, torch.Tensor]]],
    ) -> None:
        if not items:
            return
        positions = [item.end + depth for item in items]
        ids, probs = self._candidates([item.seq for item in items], torch.stack(list(last)), positions, self.width)
        for row, index in enumerate(indices):
            proposals[index].append((ids[row], probs[row]))
            drafts[index].append(int(ids[row, 0]))

    def _state(self, proposals: Seq[tuple[torch.Tensor, torch.Tensor]], hidden: torch.Tensor) -> DraftState:
        if proposals:
            ids, probs = (torch.stack(list(column)) for column in zip(*proposals, strict=True))
        else:
            ids = torch.empty(0, self.width, dtype=torch.int64)
            probs = torch.empty(0, self.width, dtype=torch.float32)
        return DraftState(ids, probs, hidden)

    def _candidates(
        self, seqs: Seq[Sequence], hidden: torch.Tensor, positions: Seq[int], width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden: [R, hidden_size] -> ids int64 [R, width], probs float32 [R, width] for ``positions``."""
        params = [seq.request.params for seq in seqs]
        found = choose(self.model.logits(hidden), params, positions, width, self.sampling, self.model.spec.vocab_size)
        return found.ids.cpu(), found.probs.cpu()

    # ---- propose

    def propose(self, seqs: Seq[Sequence], budgets: Seq[DraftBudget]) -> list[DraftTree]:
        """See Drafter."""
        return [self._tree(seq, budget) for seq, budget in zip(seqs, budgets, strict=True)]

    def draft_slots(self, budget: DraftBudget) -> int:
        """See Drafter: nothing is written between two extends."""
        return 0

    def _tree(self, seq: Sequence, budget: DraftBudget) -> DraftTree:
        width = 1 if budget.tree is TreeKind.CHAIN else budget.tree_width
        rows: list[list[int]] = []
        if seq.draft is not None:
            depth = self._sure_depth(seq, seq.draft, budget)
            rows = seq.draft.proposal_ids[:depth, :width].tolist()
        vocab = self.model.spec.vocab_size
        tree = build_tree(seq.token_ids[-1], comb(rows), vocab, budget.max_nodes, budget.num_draft_tokens)
        return replace(tree, drafter=self.name)

    def _sure_depth(self, seq: Sequence, draft: DraftState, budget: DraftBudget) -> int:
        """Depths to propose: through the first whose best candidate is less sure than the budget asks (I3d)."""
        depth = min(budget.num_draft_tokens, draft.proposal_ids.shape[0])
        if budget.min_confidence <= 0.0:
            return depth
        params = [seq.request.params] * depth
        positions = [len(seq.token_ids) + d for d in range(depth)]
        coupled = self.sampling is DraftSampling.COUPLED
        ids, probs = draft.proposal_ids[:depth], draft.proposal_probs[:depth]
        sure = log_values(ids, probs, params, positions, coupled=coupled)[:, 0].exp().tolist()
        unsure = (d for d, confidence in enumerate(sure) if confidence < budget.min_confidence)
        return next(unsure, depth - 1) + 1


def plan(name: str, config: EngineConfig, model: TargetModel) -> DrafterPlan:
    """See PlanDrafter: one module is stepped like an EAGLE head, several are chained."""
    path = str(_folder(config, model) or "")
    if not path:
        log.warning("no --drafter-path: MTP heads are untrained; the text is right, but almost no draft is accepted")
    modules, digest = load_mtp(path, model, config.mtp_modules, model.rope_table())
    if config.expand_above and len(modules) > 1:
        raise ConfigError("expand_above", "chained MTP modules draft no dynamic trees")

    def make(kv: KvPool, attention: AttentionBackend) -> Drafter:
        width, sampling = budget_of(config).tree_width, DraftSampling(config.draft_sampling)
        if len(modules) == 1:
            head, above = MtpHead(model, modules[0]), config.expand_above or None
            return FeatureDrafter(name, model, head, kv, attention, width, sampling, expand_above=above)
        return MtpDrafter(model, modules, kv, attention, width, sampling)

    return DrafterPlan(mtp_kv_layers(model.kv_layers, len(modules)), digest, make)


def export(name: str, config: EngineConfig, model: TargetModel) -> DrafterPlan:
    """See PlanDrafter: the rows that the modules read, the target's after its final norm or, for MiMo's, before it."""
    spec, folder = model.spec, _folder(config, model)
    if folder is None or not reads_stream(folder):
        return export_rows(name, config, model)
    return plan_weightless(RowExporter(name, spec.vocab_size, spec.hidden_size, (spec.num_layers,)))


def _folder(config: EngineConfig, model: TargetModel) -> Path | None:
    """Modules that were given, that ship in this number, or that lie in the target's own checkpoint."""
    if config.drafter_path:
        return Path(config.drafter_path)
    name = "mtp" if config.mtp_modules == 1 else f"mtp{config.mtp_modules}"
    return shipped_heads(config.model, name) or (own_modules(config.model) if model.spec.num_mtp_modules else None)
