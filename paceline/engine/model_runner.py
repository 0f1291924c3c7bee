"""One node's engine: batches in, tokens out. Forward, sample or verify, nothing of policy.

A prefill step runs chunks of prompts, lets the drafter digest them and samples the first token of prompts that end.
A decode step is one round (algorithms.md E15): draft, verify in one target forward, accept by "sample, then descend",
compact the pool, let the drafter digest what was accepted. All methods run on one thread, the node's engine thread.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from paceline.attention.base import AttentionBackend, ForwardBatch, Segment
from paceline.kvcache.allocator import PageAllocator
from paceline.kvcache.layout import LayerOwner
from paceline.kvcache.pool import KvPool
from paceline.kvcache.prefix import PrefixCache
from paceline.kvcache.table import PageTable
from paceline.models.base import ForwardContext, TargetModel
from paceline.request import FinishReason, SequenceRequest, TokenLogprobs
from paceline.sampling.logprobs import token_logprobs
from paceline.sampling.sampler import RowContext, sample_rows
from paceline.spec_decode.base import DraftBudget, Drafter, ExtendItem
from paceline.spec_decode.sequence import Sequence
from paceline.spec_decode.tree import DraftTree
from paceline.spec_decode.verify import Verdict, walk
from paceline.v1.handoff_pb2 import Fingerprint

HANDOFF_PROTOCOL = 1  # version of handoff.proto's meaning


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
    num_draft_tokens: int
    num_accepted: int


@dataclass(frozen=True)
class RunnerLimits:
    """Bounds of a deployment."""

    max_model_len: int
    num_draft_tokens: int
    tree_width: int

    @property
    def spec_slots(self) -> int:
        """Slots past the m committed rows that a round may write: the largest tree."""
        return 1 + self.num_draft_tokens * self.tree_width


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
    ) -> None:
        self.identity, self.drafter_digest, self.bit_exact = identity, drafter_digest, bit_exact
        self.model, self.drafter, self.kv, self.allocator = model, drafter, kv, allocator
        self.prefix, self.attention, self.limits = prefix, attention, limits
        self.observe_logits: Callable[[Sequence, int, torch.Tensor], None] | None = None  # (seq, position, float32 [V])

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
        """Width of a hidden row."""
        return self.model.spec.hidden_size

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, KV and hidden rows."""
        return self.model.dtype

    @property
    def spec_slots(self) -> int:
        """See RunnerLimits."""
        return self.limits.spec_slots

    def fingerprint(self) -> Fingerprint:
        """What a peer must match (handoff.proto). Page size and draft length may differ."""
        return Fingerprint(
            protocol=HANDOFF_PROTOCOL,
            model=self.identity.model,
            weights=self.identity.weights,
            dtype=str(self.dtype).removeprefix("torch."),
            layout=self.kv.layout.text(),
            drafter=self.drafter.name,
            drafter_modules=len(self.drafter.kv_layers),
            drafter_weights=self.drafter_digest,
            hidden_size=self.hidden_size,
            handoff_mode="draft_kv" if self.drafter.kv_layers else "none",
            kernels=self.identity.kernels,
        )

    # ---- sequences

    def new_sequence(self, request: SequenceRequest) -> Sequence:
        """A sequence before its prefill, with the cached part of its prompt adopted."""
        evict = self.prefix.evict if self.prefix is not None else None
        seq = Sequence.start(request, PageTable(self.allocator, self.page_size, evict))
        if self.prefix is not None:
            # Chained MTP modules need their last D rows computed afresh to start from (drafters/mtp.py).
            most = seq.num_prefill - max(1, self.drafter.lookahead)
            pages, tokens = self.prefix.match(seq.token_ids, request.cache_salt, max(most, 0))
            seq.table.adopt(pages)
            seq.num_computed = seq.cached_tokens = seq.draft_rows = tokens
        return seq

    def release(self, seq: Sequence) -> None:
        """Enter the committed pages in the prefix cache and give all pages back. Idempotent."""
        if self.prefix is not None and seq.table.pages:
            # The last round of a finished sequence is not digested by the drafter (algorithms.md G3).
            exact = min(seq.num_computed, seq.draft_rows) if self.drafter.kv_layers else seq.num_computed
            self.prefix.insert(seq.token_ids, seq.table.pages, exact, seq.request.cache_salt)
        seq.table.release()

    # ---- prefill

    def prefill(self, chunks: Seq[PrefillChunk]) -> list[SampledToken | None]:
        """One forward over all chunks; the first token of each that is final. Pages must reach ``end``."""
        segments = [Segment.linear(c.seq.token_ids[c.start : c.end], c.start, c.seq.table.slots) for c in chunks]
        hidden = torch.split_with_sizes(self._forward(segments), [c.end - c.start for c in chunks])
        final = [i for i, c in enumerate(chunks) if c.final]
        sampled: list[SampledToken | None] = [None] * len(chunks)
        if final:
            logits = self.model.logits(torch.stack([hidden[i][-1] for i in final]))
            for i, row in zip(final, logits, strict=True):
                sampled[i] = self._first_token(chunks[i].seq, row)
        items = []
        for chunk, rows in zip(chunks, hidden, strict=True):
            chunk.seq.num_computed = chunk.end
            if chunk.seq.finish_reason is None:
                items.append(ExtendItem(chunk.seq, chunk.start, chunk.end, rows, chunk.final))
        if items and self.drafter.needs_extend:
            self.drafter.extend(items)
        return sampled

    def _first_token(self, seq: Sequence, logits: torch.Tensor) -> SampledToken:
        if self.observe_logits is not None:
            self.observe_logits(seq, seq.num_prefill, logits)
        token_id = sample_rows(logits[None], [self._context(seq, (), seq.num_prefill)])[0]
        seq.token_ids.append(token_id)
        if token_id in seq.request.params.stop_token_ids:
            seq.finish_reason = FinishReason.STOP
        elif self._tokens_left(seq) <= 0:
            seq.finish_reason = FinishReason.LENGTH
        top = seq.request.params.top_logprobs
        return SampledToken(token_id, None if top is None else token_logprobs(logits, token_id, top))

    # ---- decode

    def decode(self, seqs: Seq[Sequence]) -> list[RoundResult]:
        """One draft-verify round. Each table must reach ``num_computed + spec_slots`` or the budget's own need."""
        trees = self.drafter.propose(seqs, [self._budget(seq) for seq in seqs])
        segments = [self._segment(seq, tree) for seq, tree in zip(seqs, trees, strict=True)]
        sizes = [tree.num_nodes for tree in trees]
        hidden = self._forward(segments)
        logits = self.model.logits(hidden)
        results, items = [], []
        for seq, tree, rows, scores in zip(
            seqs, trees, torch.split_with_sizes(hidden, sizes), torch.split_with_sizes(logits, sizes), strict=True
        ):
            verdict = self._verify(seq, tree, scores)
            nodes = [0, *verdict.path]
            start = seq.num_computed
            results.append(self._commit(seq, tree, verdict, scores))
            if seq.finish_reason is None:
                items.append(ExtendItem(seq, start, seq.num_computed, rows[nodes], final=True))
        if items and self.drafter.needs_extend:
            self.drafter.extend(items)
        return results

    def _budget(self, seq: Sequence) -> DraftBudget:
        """Caps of algorithms.md A4; decided before the round's randomness."""
        asked = seq.request.speculation
        depth, width = self.limits.num_draft_tokens, self.limits.tree_width
        if asked.num_draft_tokens is not None:
            depth = min(depth, asked.num_draft_tokens)
        if asked.tree_width is not None:
            width = min(width, asked.tree_width)
        depth = min(depth, self._tokens_left(seq) - 1)
        return DraftBudget(max(depth, 0), max(width, 1))

    def _tokens_left(self, seq: Sequence) -> int:
        asked = seq.request.params.max_tokens - seq.num_output
        return min(asked, self.max_model_len - len(seq.token_ids))

    @staticmethod
    def _segment(seq: Sequence, tree: DraftTree) -> Segment:
        if tree.is_chain:
            return Segment.linear(tree.token_ids, seq.num_computed, seq.table.slots)
        return Segment.tree(tree.token_ids, tree.parents, seq.num_computed, seq.table.slots)

    def _verify(self, seq: Sequence, tree: DraftTree, logits: torch.Tensor) -> Verdict:
        """Sample at a node only when the walk reaches it."""

        def sampled(node: int) -> int:
            path = tuple(tree.token_ids[i] for i in tree.path(node)[1:])
            position = seq.num_computed + tree.depths[node] + 1
            if self.observe_logits is not None:
                self.observe_logits(seq, position, logits[node])
            return sample_rows(logits[node : node + 1], [self._context(seq, path, position)])[0]

        stops = seq.request.params.stop_token_ids
        return walk(tree, sampled, stops.__contains__, self._tokens_left(seq))

    def _commit(self, seq: Sequence, tree: DraftTree, verdict: Verdict, logits: torch.Tensor) -> RoundResult:
        """Compact the target's rows onto the accepted path (D6), append the tokens."""
        start, nodes = seq.num_computed, [0, *verdict.path]
        if nodes != list(range(len(nodes))):
            slots = seq.table.slots[start : start + tree.num_nodes].to(torch.int64)
            self.kv.copy_slots(self.kv.layout.layer_range(LayerOwner.TARGET), slots[nodes], slots[: len(nodes)])
        tokens = (*(tree.token_ids[node] for node in verdict.path), verdict.new_token)
        seq.token_ids.extend(tokens)
        seq.num_computed = start + len(nodes)
        seq.stats.add(tree.num_draft_tokens, max(tree.depths), len(verdict.path))
        seq.finish_reason = verdict.finish_reason
        top = seq.request.params.top_logprobs
        found: tuple[TokenLogprobs, ...] = ()
        if top is not None:
            found = tuple(token_logprobs(logits[n], t, top) for n, t in zip(nodes, tokens, strict=True))
        return RoundResult(tokens, found, tree.num_draft_tokens, len(verdict.path))

    # ---- shared

    def _forward(self, segments: Seq[Segment]) -> torch.Tensor:
        batch = ForwardBatch.build(segments, self.model.device)
        return self.model.forward(ForwardContext.build(batch, self.kv, self.attention))

    @staticmethod
    def _context(seq: Sequence, path: tuple[int, ...], position: int) -> RowContext:
        request = seq.request
        return RowContext(request.params, position, request.prompt_token_ids, seq.output_token_ids, path)
