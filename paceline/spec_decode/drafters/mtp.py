"""Multi-token prediction modules as a drafter (DeepSeek-V3, arXiv 2412.19437; algorithms.md C8, E1-E14).

Row i of module k is (e(t_{i+k}), g^{k-1}_i) at position i and predicts t_{i+k+1}; g^0 is the target's hidden row after
its final norm. Two ways to more than one draft token:

* one module, reused: row m+s is (e(d_{s+1}), its own output of row m+s-1); one KV layer (E2, E13);
* D modules, chained: module k makes d_k; no draft step of its own, the drafts fall out of the extend (E10, E14).

The bookkeeping of the chained form: when the tokens up to t_end are committed, row i of module k is exact iff
i + k <= end. ``exact_rows`` counts them; rows past them rest on draft tokens and are rewritten by the next extend,
which needs g^{k-1} of the first rewritten row: that one row per module is what ``DraftState.hidden`` keeps.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from paceline.attention.base import AttentionBackend, ForwardBatch, Segment
from paceline.kvcache.layout import KvLayer, LayerOwner
from paceline.kvcache.pool import KvPool
from paceline.layers.linear import Linear
from paceline.layers.ops import add_rms_norm, rms_norm
from paceline.models.base import ForwardContext, TargetModel
from paceline.models.loader import WeightBag
from paceline.sampling.sampler import perturbed_topk
from paceline.spec_decode.base import DraftBudget, Drafter, ExtendItem
from paceline.spec_decode.sequence import DraftState, Sequence
from paceline.spec_decode.tree import DraftTree, build_tree, comb


class MtpModule:
    """One module: two norms, the join, a decoder block, the norm before the shared head."""

    def __init__(self, model: TargetModel, weights: WeightBag, prefix: str, kv_layer: int, table: torch.Tensor) -> None:
        spec = model.spec
        hidden = spec.hidden_size
        self.eps, self.table = spec.rms_norm_eps, table
        self.enorm = weights.take(f"{prefix}.enorm.weight", (hidden,))
        self.hnorm = weights.take(f"{prefix}.hnorm.weight", (hidden,))
        self.eh_proj = Linear(weights.take(f"{prefix}.eh_proj.weight", (hidden, 2 * hidden)))  # embedding first
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


@dataclass(frozen=True)
class Rows:
    """Rows of one module for one sequence: positions first.. with their tokens and input hidden rows."""

    seq: Sequence
    first: int
    token_ids: list[int]
    hidden: torch.Tensor  # [len(token_ids), hidden_size]


class MtpDrafter(Drafter):
    """One MTP module reused, or several chained. Embedding and LM head are the target's."""

    name = "mtp"
    needs_extend = True

    def __init__(
        self,
        model: TargetModel,
        modules: Seq[MtpModule],
        kv: KvPool,
        attention: AttentionBackend,
        width: int,
        coupled: bool = True,
    ) -> None:
        """width: candidates kept per depth; coupled: draw drafts with the target's own noise (design 5.3)."""
        self.model, self.modules, self.kv, self.attention = model, list(modules), kv, attention
        self.width, self.coupled = width, coupled
        self.lookahead = len(self.modules)
        self.kv_layers = mtp_kv_layers(model.kv_layers, len(self.modules))

    # ---- extend: committed rows in, proposals out

    def extend(self, items: Seq[ExtendItem]) -> None:
        """See Drafter. Module by module, all sequences in one forward each."""
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
            hidden = outputs[i][-1:] if len(self.modules) == 1 else torch.stack(windows[i])
            item.seq.draft = self._state(proposals[i], hidden)
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
        return perturbed_topk(self.model.logits(hidden), params, positions, width, coupled=self.coupled)

    # ---- propose

    def propose(self, seqs: Seq[Sequence], budgets: Seq[DraftBudget]) -> list[DraftTree]:
        """See Drafter. A sequence without draft state (nothing was handed over) gets the root alone."""
        candidates = [self._known(seq, budget) for seq, budget in zip(seqs, budgets, strict=True)]
        if len(self.modules) == 1:
            self._steps(seqs, budgets, candidates)
        vocab = self.model.spec.vocab_size
        return [
            build_tree(seq.token_ids[-1], comb(rows), vocab, budget.max_nodes, budget.num_draft_tokens)
            for seq, budget, rows in zip(seqs, budgets, candidates, strict=True)
        ]

    @staticmethod
    def _known(seq: Sequence, budget: DraftBudget) -> list[list[int]]:
        if seq.draft is None:
            return []
        ids = seq.draft.proposal_ids[: budget.num_draft_tokens, : budget.tree_width]
        rows: list[list[int]] = ids.tolist()
        return rows

    def _steps(self, seqs: Seq[Sequence], budgets: Seq[DraftBudget], candidates: list[list[list[int]]]) -> None:
        """Draft steps of the reused module: row m+s-1 is (e(d_s), output of the row before) (algorithms.md E2)."""
        hidden = {i: seq.draft.hidden[0] for i, seq in enumerate(seqs) if seq.draft is not None}
        for step in range(1, max((budget.num_draft_tokens for budget in budgets), default=0)):
            active = [i for i in hidden if candidates[i] and budgets[i].num_draft_tokens > step]
            if not active:
                return
            rows = [
                Rows(seqs[i], len(seqs[i].token_ids) - 2 + step, [candidates[i][-1][0]], hidden[i][None])
                for i in active
            ]
            outputs = torch.cat(self._forward(self.modules[0], rows))
            positions = [len(seqs[i].token_ids) + step for i in active]
            ids, _ = self._candidates([seqs[i] for i in active], outputs, positions, self.width)
            for row, i in enumerate(active):
                candidates[i].append(ids[row, : budgets[i].tree_width].tolist())
                hidden[i] = outputs[row]
