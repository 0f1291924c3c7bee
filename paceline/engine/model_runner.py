"""One node's engine: batches in, tokens out. Forward, sample or verify, nothing of policy.

A prefill step runs chunks of prompts, lets the drafter digest them and samples the first token of prompts that end.
A decode step is one round (algorithms.md E15): draft, verify in one target forward, accept by "sample, then descend",
compact the pool, let the drafter digest what was accepted. All methods run on one thread, the node's engine thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch

from paceline.attention.base import AttentionBackend, ForwardBatch, Segment
from paceline.engine.device_round import accepted_rows, first_tokens, judge
from paceline.engine.graphs import TargetGraphs
from paceline.engine.tree_rows import ObserveLogits, TreeRows, row_context
from paceline.kvcache.allocator import PageAllocator
from paceline.kvcache.layout import KvLayout, LayerOwner
from paceline.kvcache.pool import KvPool
from paceline.kvcache.prefix import PrefixCache
from paceline.kvcache.table import PageTable
from paceline.models.base import AfterLayer, AuxCapture, ForwardContext, TargetModel
from paceline.models.late_tokens import LateTokens
from paceline.request import FinishReason, SequenceRequest, TokenLogprobs
from paceline.results import Round
from paceline.sampling.logprobs import token_logprobs
from paceline.sampling.params import has_penalty
from paceline.sampling.sampler import sample_rows
from paceline.sampling.topk import argmax_lowest
from paceline.spec_decode.accept.acceptance import RULES
from paceline.spec_decode.accept.coins import Coins
from paceline.spec_decode.accept.verify import Verdict
from paceline.spec_decode.base import DraftBudget, Drafter, ExtendItem, TreeKind
from paceline.spec_decode.length.adaptive import FixedLength, LengthPolicy
from paceline.spec_decode.sequence import Sequence
from paceline.spec_decode.trees.tree import DraftTree
from paceline.spec_decode.unread import UnreadChains
from paceline.v1.handoff_pb2 import Fingerprint

log = logging.getLogger(__name__)

HANDOFF_PROTOCOL = 2  # version of handoff.proto's meaning


@dataclass(frozen=True)
class PrefillChunk:
    """Rows start..end-1 of a prompt; the last chunk has end == seq.num_prefill."""

    seq: Sequence
    start: int
    end: int

    @property
    def final(self) -> bool:
        """Whether the first token is sampled after it."""
        return self.end == self.seq.num_prefill


@dataclass(frozen=True)
class SampledToken:
    """A token, and its log-probabilities when the request wants them."""

    token_id: int
    logprobs: TokenLogprobs | None


@dataclass(frozen=True)
class RoundResult:
    """What one round committed for one sequence."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]  # one per token, or empty
    round: Round


@dataclass(frozen=True)
class RunnerLimits:
    """Bounds of a deployment."""

    max_model_len: int
    budget: DraftBudget  # the largest tree
    acceptance: str = "sample"
    handoff: str = "draft_kv"  # what crosses besides target KV: draft_kv, hidden_states or none
    handoff_rows: str = "fused"  # or raw
    handoff_checksum: bool = False  # bytes that cross carry a sum


@dataclass(frozen=True)
class RunnerIdentity:
    """Which weights run on which kernels; part of the pairing fingerprint."""

    model: str
    weights: str  # digest
    kernels: str

    def namespace(self, drafter_digest: str) -> str:
        """Root of the prefix cache's keys."""
        return f"{self.model}/{self.weights}/{drafter_digest}"


class ModelRunner:
    """Target, drafter and pool of one node."""

    def __init__(
        self,
        model: TargetModel,
        drafter: Drafter,
        kv: KvPool,
        allocator: PageAllocator,
        prefix: PrefixCache | None,
        attention: AttentionBackend,
        limits: RunnerLimits,
        identity: RunnerIdentity,
        drafter_digest: str = "",
        bit_exact: bool = False,
        policy: LengthPolicy | None = None,
    ) -> None:
        self.identity, self.drafter_digest, self.bit_exact = identity, drafter_digest, bit_exact
        self.model, self.drafter, self.kv, self.allocator = model, drafter, kv, allocator
        self.prefix, self.attention, self.limits = prefix, attention, limits
        self.rule = RULES[limits.acceptance]
        self.policy = policy or FixedLength()
        self.samples_on_device = model.device.type == "cuda"  # else on the host, row by row as a rule asks
        self.graphs: TargetGraphs | None = None  # whoever assembles a node on a GPU captures them
        self.observe_logits: ObserveLogits | None = None

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.kv.page_size

    @property
    def max_model_len(self) -> int:
        """Prompt and output together."""
        return self.limits.max_model_len

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return self.model.spec.vocab_size

    @property
    def hidden_size(self) -> int:
        """Width of the hidden rows that a hand-off carries: the drafter's own."""
        return self.drafter.state_width or self.model.spec.hidden_size

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, KV and hidden rows."""
        return self.model.dtype

    @property
    def spec_slots(self) -> int:
        """Slots past the m committed rows that a round may write: the largest tree, or what drafting it takes."""
        return max(self.limits.budget.max_nodes, self.drafter.draft_slots(self.limits.budget))

    @property
    def handoff(self) -> str:
        """What crosses besides target KV: draft_kv, hidden_states or none."""
        return self.limits.handoff

    @property
    def fuses(self) -> bool:
        """Hidden rows cross fused."""
        return self.limits.handoff_rows == "fused" and self.drafter.fused_width > 0

    @property
    def row_width(self) -> int:
        """Elements of a hidden row that a hand-off brings for each token; 0: none cross."""
        if self.handoff != "hidden_states":
            return 0
        return self.drafter.fused_width if self.fuses else self.drafter.row_width

    def fingerprint(self) -> Fingerprint:
        """What a peer must match (handoff.proto): of the drafter, as much as what crosses depends on. Page size and
        draft length may differ."""
        mode, layout = self.handoff, self.kv.layout
        if mode != "draft_kv":
            target = layout.layer_range(LayerOwner.TARGET)
            layout = KvLayout(layout.layers[target.start : target.stop], layout.dtype)
        bound = mode == "draft_kv" or (mode == "hidden_states" and self.fuses)
        return Fingerprint(
            protocol=HANDOFF_PROTOCOL,
            model=self.identity.model,
            weights=self.identity.weights,
            dtype=str(self.dtype).removeprefix("torch."),
            layout=layout.text(),
            drafter="" if mode == "none" else self.drafter.name,
            drafter_modules=len(self.drafter.kv_layers) if mode == "draft_kv" else 0,
            drafter_weights=self.drafter_digest if bound else "",
            hidden_size=self.hidden_size if mode == "draft_kv" else self.row_width,
            handoff_mode=mode,
            checksum="crc32" if self.limits.handoff_checksum else "",
            kernels=self.identity.kernels,
        )

    # ---- sequences

    def new_sequence(self, request: SequenceRequest, most_cached: int | None = None) -> Sequence:
        """A sequence before its prefill, with the cached part of its prompt adopted.

        most_cached: adopt no more tokens than these, because hidden rows are needed of all others.
        """
        evict = self.prefix.evict if self.prefix is not None else None
        seq = Sequence.start(request, PageTable(self.allocator, self.page_size, evict))
        if self.prefix is not None:
            # Chained MTP modules need their last D rows computed afresh to start from (drafters/mtp.py).
            most = seq.num_prefill - max(1, self.drafter.lookahead)
            most = most if most_cached is None else min(most, most_cached)
            pages, tokens = self.prefix.match(seq.token_ids, request.cache_salt, max(most, 0))
            seq.table.adopt(pages)
            seq.num_computed = seq.cached_tokens = seq.draft_rows = tokens
        return seq

    def release(self, seq: Sequence) -> None:
        """Enter the committed pages in the prefix cache and give all pages back. Idempotent."""
        if seq.stats.rounds:  # a prefill node's sequences end elsewhere: there is nothing to learn from them here
            self.drafter.finish(seq)
        if self.prefix is not None and seq.table.pages:
            # The last round of a finished sequence is not digested by the drafter (algorithms.md G3).
            exact = min(seq.num_computed, seq.draft_rows) if self.drafter.kv_layers else seq.num_computed
            self.prefix.insert(seq.token_ids, seq.table.pages, exact, seq.request.cache_salt)
        seq.table.release()

    # ---- prefill

    def prefill(self, chunks: Seq[PrefillChunk], after_layer: AfterLayer | None = None) -> list[SampledToken | None]:
        """One forward over all chunks; the first token of each that is final. Pages must reach ``end``.

        after_layer: called with each target layer's index as soon as its rows of all chunks are in the pool.
        """
        segments = [Segment.linear(c.seq.token_ids[c.start : c.end], c.start, c.seq.table.slots) for c in chunks]
        final_rows, draft_rows = self.forward(segments, after_layer)
        sizes = [c.end - c.start for c in chunks]
        hidden = torch.split_with_sizes(final_rows, sizes)
        final = [i for i, c in enumerate(chunks) if c.final]
        sampled: list[SampledToken | None] = [None] * len(chunks)
        if final:
            logits = self.model.logits(torch.stack([hidden[i][-1] for i in final]))
            tokens: Seq[int | None] = [None] * len(final)
            if self.samples_on_device and self.observe_logits is None:
                tokens = first_tokens([chunks[i].seq for i in final], logits)
            for i, row, token in zip(final, logits, tokens, strict=True):
                sampled[i] = self._first_token(chunks[i].seq, row, token)
        items = []
        for chunk, rows in zip(chunks, torch.split_with_sizes(draft_rows, sizes), strict=True):
            chunk.seq.num_computed = chunk.end
            if chunk.seq.finish_reason is None:
                items.append(ExtendItem(chunk.seq, chunk.start, chunk.end, rows, chunk.final))
        if items and self.drafter.needs_extend:
            self.drafter.extend(items)
        return sampled

    def settled_draft_rows(self, seq: Sequence) -> int:
        """Draft rows of a prompt that no later chunk writes again: of chained modules the last few rest on tokens that
        come with the next one (algorithms.md E9)."""
        if seq.num_computed >= seq.num_prefill:
            return seq.draft_rows
        return max(seq.cached_tokens, seq.draft_rows - max(0, self.drafter.lookahead - 1))

    def _first_token(self, seq: Sequence, logits: torch.Tensor, token_id: int | None) -> SampledToken:
        """token_id: where the device sampled it already."""
        if self.observe_logits is not None:
            self.observe_logits(seq, seq.num_prefill, logits)
        if token_id is None:
            token_id = sample_rows(logits[None], [row_context(seq, (), seq.num_prefill)])[0]
        seq.token_ids.append(token_id)
        if token_id in seq.request.params.stop_token_ids:
            seq.finish_reason = FinishReason.STOP
        elif self._tokens_left(seq) <= 0:
            seq.finish_reason = FinishReason.LENGTH
        top = seq.request.params.top_logprobs
        return SampledToken(token_id, None if top is None else token_logprobs(logits, token_id, top))

    def digest(self, seq: Sequence, start: int, end: int, rows: torch.Tensor) -> None:
        """Let the drafter digest rows start..end-1 of a prompt that was computed elsewhere: its draft prefill (H2).

        rows: [end - start, row_width]. After the last ones it can draft.
        """
        self.drafter.extend([ExtendItem(seq, start, end, rows, end == seq.num_prefill, fused=self.fuses)])

    def recover_draft(self, seq: Sequence, start: int, most: int) -> int:
        """Let the drafter digest rows of a running sequence that never came to it, from ``start`` on, ``most`` at most;
        returns where to go on. At ``num_computed`` it can draft. Not in the midst of a round.

        The target computes their hidden rows again. Its committed KV is read and stays as it is: what is written again
        goes to slots past it, which are free between two rounds.
        """
        spare = seq.table.slots[seq.num_computed :].tolist()
        end = min(start + min(most, len(spare)), seq.num_computed)
        rows = torch.empty(end - start, 0)
        if self.drafter.row_width:
            places, seen = range(start, end), range(start + 1, end + 1)
            again = Segment(seq.token_ids[start:end], places, spare[: end - start], seq.table.slots, seen)
            _, rows = self.forward([again])
        self.drafter.extend([ExtendItem(seq, start, end, rows, final=end == seq.num_computed)])
        return end

    # ---- decode

    def decode(self, seqs: Seq[Sequence]) -> list[RoundResult]:
        """One draft-verify round. Each table must reach ``num_computed + spec_slots`` or the budget's own need."""
        clock = time.perf_counter
        began = clock()
        trees, unread = self._propose(seqs)
        drafted = clock()
        segments = [self._segment(seq, tree) for seq, tree in zip(seqs, trees, strict=True)]
        sizes = [tree.num_nodes for tree in trees]
        hidden, rows = self.forward(segments, late=None if unread is None else unread.for_target())
        logits = self.model.logits(hidden)
        judged = None
        if self._judges_on_device(seqs):
            left, want_argmax = [self._tokens_left(seq) for seq in seqs], self.drafter.needs_argmax
            judged = judge(self.kv, seqs, trees, logits, left, want_argmax=want_argmax, unread=unread)
            trees = judged.trees
        verdicts, items = [], []
        parts = zip(torch.split_with_sizes(rows, sizes), torch.split_with_sizes(logits, sizes), strict=True)
        for i, (seq, tree, (mine, scores)) in enumerate(zip(seqs, trees, parts, strict=True)):
            verdict = self._verify(seq, tree, scores) if judged is None else judged.verdicts[i]
            if self.drafter.needs_argmax:
                self.drafter.observe(seq, tree, argmax_lowest(scores).tolist() if judged is None else judged.argmax[i])
            start = seq.num_computed
            verdicts.append((verdict, self._commit(seq, tree, verdict, scores, compacted=judged is not None)))
            if seq.finish_reason is None:
                kept = mine[[0, *verdict.path]] if judged is None else accepted_rows(mine, verdict.path)
                items.append(ExtendItem(seq, start, seq.num_computed, kept, final=True))
        verified = clock()
        if items and self.drafter.needs_extend:
            self.drafter.extend(items)
        extended = clock()
        accepted = [len(verdict.path) for verdict, _ in verdicts]
        self.policy.observe(seqs, trees, accepted, drafted - began, extended - drafted)
        draft_s, verify_s = drafted - began + extended - verified, verified - drafted
        return [
            self._result(seq, tree, verdict, logprobs, draft_s, verify_s)
            for seq, tree, (verdict, logprobs) in zip(seqs, trees, verdicts, strict=True)
        ]

    def _propose(self, seqs: Seq[Sequence]) -> tuple[list[DraftTree], UnreadChains | None]:
        """The round's trees; blank ones, and their tokens on the device, where the host can do without them until the
        verdict. It cannot where a penalty depends on a node's path, or drafting is timed."""
        budgets = self.policy.decide(seqs, [self._budget(seq) for seq in seqs])
        if self._judges_on_device(seqs) and not self.policy.needs_draft_time:
            blind = not any(has_penalty(seq.request.params) for seq in seqs)
            unread = self.drafter.propose_unread(seqs, budgets) if blind else None
            if unread is not None:
                return unread.blank_trees(seqs), unread
        return self.drafter.propose(seqs, budgets), None

    def _judges_on_device(self, seqs: Seq[Sequence]) -> bool:
        """Where the default rule decides, and nobody wants to see logits."""
        if not self.samples_on_device or self.observe_logits is not None:
            return False
        return self.rule is RULES["sample"] or all(seq.request.params.temperature == 0.0 for seq in seqs)

    def _budget(self, seq: Sequence) -> DraftBudget:
        """Caps of algorithms.md A4; decided before the round's randomness. A request may only ask for less."""
        asked, most = seq.request.speculation, self.limits.budget
        depth, width, tree = most.num_draft_tokens, most.tree_width, most.tree
        if asked.num_draft_tokens is not None:
            depth = min(depth, asked.num_draft_tokens)
        if asked.tree_width is not None:
            width = min(width, asked.tree_width)
        if asked.tree is not None and tree is not TreeKind.CHAIN:
            tree = TreeKind(asked.tree) if asked.tree != TreeKind.DYNAMIC else tree
        if tree is TreeKind.CHAIN:
            width = 1
        depth = max(min(depth, self._tokens_left(seq) - 1), 0)
        return replace(most, num_draft_tokens=depth, tree_width=max(width, 1), tree=tree)

    def _tokens_left(self, seq: Sequence) -> int:
        asked = seq.request.params.max_tokens - seq.num_output
        return min(asked, self.max_model_len - len(seq.token_ids))

    @staticmethod
    def _segment(seq: Sequence, tree: DraftTree) -> Segment:
        if tree.is_chain:
            return Segment.linear(tree.token_ids, seq.num_computed, seq.table.slots)
        return Segment.tree(tree.token_ids, tree.parents, seq.num_computed, seq.table.slots)

    def _verify(self, seq: Sequence, tree: DraftTree, logits: torch.Tensor) -> Verdict:
        """The deployment's acceptance rule; a greedy request needs no probabilities."""
        params = seq.request.params
        rule = self.rule if params.temperature > 0.0 else RULES["sample"]
        stops, left = params.stop_token_ids, self._tokens_left(seq)
        target = TreeRows(seq, tree, logits, self.observe_logits)
        return rule.function(tree, target, Coins(params.seed or 0), seq.num_computed, stops.__contains__, left)

    def _commit(
        self, seq: Sequence, tree: DraftTree, verdict: Verdict, logits: torch.Tensor, *, compacted: bool
    ) -> tuple[TokenLogprobs, ...]:
        """Compact the target's rows onto the accepted path (D6), append the tokens; their log-probabilities."""
        start, nodes = seq.num_computed, [0, *verdict.path]
        if not compacted and nodes != list(range(len(nodes))):
            slots = seq.table.slots[start : start + tree.num_nodes].to(torch.int64)
            self.kv.copy_slots(self.kv.layout.layer_range(LayerOwner.TARGET), slots[nodes], slots[: len(nodes)])
        tokens = (*(tree.token_ids[node] for node in verdict.path), verdict.new_token)
        seq.token_ids.extend(tokens)
        seq.num_computed = start + len(nodes)
        seq.finish_reason = verdict.finish_reason
        top = seq.request.params.top_logprobs
        if top is None:
            return ()
        return tuple(token_logprobs(logits[n], t, top) for n, t in zip(nodes, tokens, strict=True))

    def _result(
        self,
        seq: Sequence,
        tree: DraftTree,
        verdict: Verdict,
        logprobs: tuple[TokenLogprobs, ...],
        draft_s: float,
        verify_s: float,
    ) -> RoundResult:
        drafter = tree.drafter or self.drafter.name
        done = Round(tree.num_draft_tokens, len(verdict.path), max(tree.depths), drafter, draft_s, verify_s)
        seq.stats.add(done.num_draft_tokens, done.depth, done.num_accepted, drafter, draft_s, verify_s)
        if log.isEnabledFor(logging.DEBUG):
            rate = done.num_accepted / max(done.depth, 1)
            log.debug(
                "%s round %d: %s drafted %d, accepted %d of depth %d (%.2f), draft %.1f ms, verify %.1f ms",
                seq.request.request_id, seq.stats.rounds, drafter, done.num_draft_tokens, done.num_accepted,
                done.depth, rate, 1e3 * draft_s, 1e3 * verify_s,
            )  # fmt: skip
        return RoundResult(tuple(verdict.committed(tree)), logprobs, done)

    # ---- shared

    def forward(
        self, segments: Seq[Segment], after_layer: AfterLayer | None = None, late: LateTokens | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(hidden rows after the final norm, the rows that the drafter is given)."""
        if self.graphs is not None and after_layer is None:
            rows = self.graphs.forward(segments, late)
            if rows is not None:
                return rows
        batch = ForwardBatch.build(segments, self.model.device)
        if late is not None:
            late.put(batch.token_ids)
        context = ForwardContext.build(batch, self.kv, self.attention, after_layer)
        if not self.drafter.aux_layers:
            hidden = self.model.forward(context)
            return hidden, hidden
        aux = AuxCapture(self.drafter.aux_layers)
        return self.model.forward(context, aux), aux.rows()
