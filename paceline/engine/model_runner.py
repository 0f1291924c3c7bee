"""One node's engine: batches in, tokens out. Forward, sample or verify, nothing of policy.

A prefill step runs chunks of prompts, lets the drafter digest them and samples the first token of prompts that end.
A decode step is one round (algorithms.md E15): draft, verify in one target forward, accept by "sample, then descend",
compact the pool, let the drafter digest what was accepted. All methods run on one thread, the node's engine thread.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import partial

import torch

from paceline.attention.base import AttentionBackend, ForwardBatch, Segment
from paceline.engine.device_round import DeviceJudge
from paceline.engine.grammar_drafts import fit_trees, forced_runs
from paceline.engine.graphs import TargetGraphs
from paceline.engine.handoff_contents import HandoffContents
from paceline.engine.host_round import HostJudge
from paceline.engine.prompt_logprobs import add_prompt_logprobs
from paceline.engine.rounds import Drafted, Judge, Judged, accepted_rows, commit, counted
from paceline.engine.tree_rows import ObserveLogits
from paceline.errors import NodeUnavailable, Overloaded
from paceline.grammar.compile import CompiledGrammar, GrammarCompiler
from paceline.grammar.cursor import GrammarCursor
from paceline.kvcache.memory import KvMemory
from paceline.models.base import AfterLayer, AuxCapture, ForwardContext, TargetModel
from paceline.models.late_tokens import LateTokens
from paceline.request import FinishReason, SequenceRequest, TokenLogprobs
from paceline.results import Round
from paceline.sampling.logprobs import token_logprobs
from paceline.sampling.params import reads_history
from paceline.spec_decode.accept.acceptance import RULES
from paceline.spec_decode.base import DraftBudget, Drafter, ExtendItem, Settle, TreeKind
from paceline.spec_decode.drafters.prediction import predicted_tree
from paceline.spec_decode.length.adaptive import FixedLength, LengthPolicy
from paceline.spec_decode.sequence import Sequence
from paceline.spec_decode.unread import UnreadWalk


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
    """What a deployment fixes for all requests."""

    max_model_len: int
    budget: DraftBudget  # the largest tree
    acceptance: str  # name of a rule
    handoff: HandoffContents


@dataclass(frozen=True)
class RunnerIdentity:
    """Which weights run on which kernels; part of the pairing fingerprint."""

    model: str
    weights: str  # digest
    kernels: str
    quantize: str = "none"  # how the weights were rounded when they were loaded
    kv_dtype: str = "auto"  # how keys and values are kept
    drafter_weights: str = ""  # digest; empty: it has none
    sums: str = ""  # order of the sums that ranks of a node share
    bit_exact: bool = False  # whether this host gives a row the same bits however it is batched
    results: str = ""  # digest of the bits that it gives; empty where they are not exact

    def namespace(self) -> str:
        """Root of the prefix cache's keys."""
        kept = "" if self.kv_dtype == "auto" else f"/{self.kv_dtype}"
        return f"{self.model}/{self.weights}/{self.quantize}/{self.drafter_weights}{kept}"


class ModelRunner:
    """Target, drafter and pool of one node."""

    # It has over 20 methods, some of which are a name for one field of a part.

    def __init__(
        self,
        model: TargetModel,
        drafter: Drafter,
        memory: KvMemory,
        attention: AttentionBackend,
        limits: RunnerLimits,
        identity: RunnerIdentity,
        policy: LengthPolicy | None = None,
        graphs: TargetGraphs | None = None,
        grammars: GrammarCompiler | None = None,
    ) -> None:  # one parameter a part; the last three may be left out
        """policy: how many tokens to draft; None: as many as a request may have. graphs: of the same model and pool.
        grammars: of the model's tokenizer; None refuses every grammar."""
        self.model, self.drafter, self.attention, self.graphs = model, drafter, attention, graphs
        self.memory, self.kv, self.allocator, self.prefix = memory, memory.pool, memory.allocator, memory.prefix
        self.alive, self.close = model.alive, model.close  # the ranks that share the model
        self.limits, self.identity, self.bit_exact = limits, identity, identity.bit_exact
        self.handoff = limits.handoff
        self.rule = RULES[limits.acceptance]
        self.policy = policy or FixedLength()
        self.samples_on_device = model.device.type == "cuda"  # else on the host, row by row as a rule asks
        self.observe_logits: ObserveLogits | None = None
        self.grammars = grammars or GrammarCompiler(None, self.vocab_size)

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
    def dtype(self) -> torch.dtype:
        """The number format of weights, KV and hidden rows."""
        return self.model.dtype

    @property
    def spec_slots(self) -> int:
        """Slots past the m committed rows that a round may write: the largest tree, or what drafting it takes."""
        return max(self.limits.budget.max_nodes, self.drafter.draft_slots(self.limits.budget))

    # ---- sequences

    def new_sequence(
        self, request: SequenceRequest, most_cached: int | None = None, grammar: CompiledGrammar | None = None
    ) -> Sequence:
        """A sequence before its prefill, with the cached part of its prompt adopted.

        most_cached: adopt no more tokens than these, because hidden rows are needed of all others. grammar: the
        request's, compiled; one that is not given is compiled here. Raises InvalidRequest where that cannot be.
        """
        seq = Sequence.start(request, self.memory.table())
        if request.params.grammar is not None:
            grammar = grammar or self.grammars.compile(request.params.grammar)
            seq.grammar = GrammarCursor(grammar, ignore_eos=request.params.ignore_eos)
        if self.prefix is not None:
            # Chained MTP modules need their last D rows computed afresh to start from (drafters/mtp.py).
            most = seq.num_prefill - max(1, self.drafter.lookahead)
            most = most if most_cached is None else min(most, most_cached)
            if request.params.prompt_logprobs is not None:
                most = 0  # cached rows have KV but no hidden rows, of which logits are made
            asked = (seq.token_ids, request.cache_salt, max(most, 0))
            if self.allocator.parts > 1:
                seq.table = self.memory.table(self.prefix.cached_pages(*asked))
            pages, tokens = self.prefix.match(*asked, seq.table.part)
            seq.table.adopt(pages)
            seq.num_computed = seq.cached_tokens = seq.draft_rows = tokens
        return seq

    def take_pages(self, seq: Sequence, num_slots: int) -> None:
        """Pages for all slots of a new sequence. Where the rank that it was to live on has too few and another one has
        enough, it goes there without its cached prefix. Raises Overloaded; then it stays as it is."""
        try:
            seq.table.ensure(num_slots)
        except Overloaded:
            table = self.memory.elsewhere(seq.table, num_slots)
            if table is None:
                raise
            seq.table.release()
            seq.table = table
            seq.num_computed = seq.cached_tokens = seq.draft_rows = 0

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
        """One forward over all chunks; the first token of each that is final. Pages must reach ``end``. Where a request
        asks for log-probabilities of its prompt, those of the chunk are appended to the sequence's.

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
            ending = [chunks[i].seq for i in final]
            tokens = self._judge(ending, by_default_rule=True).first_tokens(ending, logits)
            for i, seq, row, token in zip(final, ending, logits, tokens, strict=True):
                sampled[i] = self._first_token(seq, row, token)
        items = []
        for i, (chunk, rows) in enumerate(zip(chunks, torch.split_with_sizes(draft_rows, sizes), strict=True)):
            add_prompt_logprobs(self.model, chunk.seq, chunk.start, hidden[i])
            chunk.seq.num_computed = chunk.end
            if chunk.seq.finish_reason is None:
                items.append(ExtendItem(chunk.seq, chunk.start, chunk.end, rows, chunk.final))
        if items and self.drafter.needs_extend:
            self.drafter.extend(items)
        self._check_ranks()
        return sampled

    def settled_draft_rows(self, seq: Sequence) -> int:
        """Draft rows of a prompt that no later chunk writes again: of chained modules the last few rest on tokens that
        come with the next one (algorithms.md E9)."""
        if seq.num_computed >= seq.num_prefill:
            return seq.draft_rows
        return max(seq.cached_tokens, seq.draft_rows - max(0, self.drafter.lookahead - 1))

    def _first_token(self, seq: Sequence, logits: torch.Tensor, token_id: int) -> SampledToken:
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
        self.drafter.extend([ExtendItem(seq, start, end, rows, end == seq.num_prefill, fused=self.handoff.fused)])

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
        greedy = all(seq.request.params.temperature == 0.0 for seq in seqs)
        judge = self._judge(seqs, by_default_rule=greedy or self.rule is RULES["sample"])
        began = clock()
        drafted = self._propose(seqs, judge)
        proposed = clock()
        hidden, rows = self.forward(drafted.segments(), late=drafted.late_tokens())
        logits = self.model.logits(hidden)
        settle: list[Settle] = []
        ahead = partial(self._extend_ahead, drafted, rows, settle) if drafted.unread is not None else None
        judged = judge.judge(drafted, logits, want_argmax=self.drafter.needs_argmax, ahead=ahead)
        logprobs, items = self._commit(drafted, judged, rows, logits)
        verified = clock()
        if items:
            (settle[0] if settle else self.drafter.extend)(items)
        extended = clock()
        accepted = [len(verdict.path) for verdict in judged.verdicts]
        self.policy.observe(seqs, judged.trees, accepted, proposed - began, extended - proposed)
        draft_s, verify_s = proposed - began + extended - verified, verified - proposed
        done = counted(seqs, judged, self.drafter.name, draft_s, verify_s)
        self._check_ranks()
        return [RoundResult(tokens, probs, round_) for (tokens, round_), probs in zip(done, logprobs, strict=True)]

    def _extend_ahead(
        self,
        drafted: Drafted,
        rows: torch.Tensor,
        settle: list[Settle],
        accepted: torch.Tensor,
        new: torch.Tensor,
    ) -> None:
        """Let the device go on with the drafter's extend while the host learns of the verdict and commits it."""
        assert drafted.unread is not None
        walk = UnreadWalk.of(drafted.unread, drafted.seqs, rows, accepted, new)
        done = None if walk is None else self.drafter.extend_ahead(drafted.seqs, walk)
        settle += [] if done is None else [done]

    def _propose(self, seqs: Seq[Sequence], judge: Judge) -> Drafted:
        """The round's trees; unread where the judge can do without their tokens until the verdict. It cannot where
        logits depend on a node's path, or drafting is timed."""
        most = [self._budget(seq) for seq in seqs]
        budgets = self.policy.decide(seqs, most)
        left = [self._tokens_left(seq) for seq in seqs]
        predicted = [predicted_tree(seq, budget) for seq, budget in zip(seqs, most, strict=True)]
        if judge.takes_unread and not self.policy.needs_draft_time and not any(predicted):
            blind = not any(reads_history(seq.request.params) for seq in seqs)
            unread = self.drafter.propose_unread(seqs, budgets) if blind else None
            if unread is not None:
                return Drafted(seqs, unread.blank_trees(seqs), left, unread)
        budgets = [replace(b, num_draft_tokens=0) if p else b for b, p in zip(budgets, predicted, strict=True)]
        runs, budgets = forced_runs(seqs, budgets, left)
        drafted = self.drafter.propose(seqs, budgets)
        trees = [known or tree for known, tree in zip(predicted, drafted, strict=True)]
        draws = self.rule is not RULES["sample"]
        return Drafted(seqs, fit_trees(seqs, trees, runs, left, keeps_draws=draws), left)

    def _judge(self, seqs: Seq[Sequence], *, by_default_rule: bool) -> Judge:
        """On the device where the default rule decides, no grammar masks, and nobody wants to see logits."""
        masked = any(seq.grammar is not None for seq in seqs)
        if self.samples_on_device and self.observe_logits is None and by_default_rule and not masked:
            return DeviceJudge(self.kv)
        return HostJudge(self.kv, self.rule, self.observe_logits)

    def _commit(
        self, drafted: Drafted, judged: Judged, rows: torch.Tensor, logits: torch.Tensor
    ) -> tuple[list[tuple[TokenLogprobs, ...]], list[ExtendItem]]:
        """Log-probabilities of each sequence's new tokens, and what the drafter is to digest of those that go on.

        rows: what the drafter is given of every node; logits: float32 [nodes, V].
        """
        logprobs, items = [], []
        of_each, logits_of_each = (torch.split_with_sizes(tensor, drafted.sizes) for tensor in (rows, logits))
        for i, (seq, mine, scores) in enumerate(zip(drafted.seqs, of_each, logits_of_each, strict=True)):
            tree, verdict, start = judged.trees[i], judged.verdicts[i], seq.num_computed
            if self.drafter.needs_argmax:
                self.drafter.observe(seq, tree, judged.argmax[i])
            logprobs.append(commit(seq, tree, verdict, scores))
            if self.drafter.needs_extend and seq.finish_reason is None:
                items.append(ExtendItem(seq, start, seq.num_computed, accepted_rows(mine, verdict.path), final=True))
        return logprobs, items

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
        if (depth, max(width, 1), tree) == (most.num_draft_tokens, most.tree_width, most.tree):
            return most
        return replace(most, num_draft_tokens=depth, tree_width=max(width, 1), tree=tree)

    def _tokens_left(self, seq: Sequence) -> int:
        asked = seq.request.params.max_tokens - seq.num_output
        return min(asked, self.max_model_len - len(seq.token_ids))

    # ---- shared

    def _check_ranks(self) -> None:
        """Raise NodeUnavailable where ranks were lost in the step. On a GPU that may show in nothing else: what waits
        for a rank is aborted, and ends with undefined data."""
        if not self.model.alive():
            raise NodeUnavailable("a rank of this node was lost in a step: its tokens are not to be used")

    def forward(
        self, segments: Seq[Segment], after_layer: AfterLayer | None = None, late: LateTokens | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the hidden rows after the final norm, and the rows that the drafter is given."""
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
