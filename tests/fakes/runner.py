"""A runner without a model: tokens are a function of (seed, position), KV rows one of (token, position, layer).

It uses the real pool, allocator, tables and prefix cache, and before every round it checks each row of the sequence:
a hand-off that loses, shifts or mixes rows, or pages reused too early, fail the round loudly.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence as Seq
from typing import cast

import torch

from paceline.config import NodeConfig
from paceline.engine.handoff_contents import HandoffContents
from paceline.engine.model_runner import ModelRunner, PrefillChunk, RoundResult, RunnerIdentity, SampledToken
from paceline.kvcache.allocator import PageAllocator
from paceline.kvcache.layout import KvLayer, KvLayout, LayerKind, LayerOwner
from paceline.kvcache.pool import KvPool
from paceline.kvcache.prefix import PrefixCache
from paceline.kvcache.table import PageTable
from paceline.models.base import AfterLayer
from paceline.request import FinishReason, SequenceRequest, TokenLogprobs
from paceline.results import Round
from paceline.spec_decode.drafters.none import NoDrafter
from paceline.spec_decode.sequence import DraftState, Sequence

VOCAB = 1000
HIDDEN = 8
ACCEPTED = (2, 0, 1)  # drafts accepted in rounds 0, 1, 2, 0, ...
DEPTH, WIDTH = 2, 2  # of the draft proposals
TARGET_LAYERS, DRAFT_LAYERS, ALL_LAYERS = range(0, 2), range(2, 3), range(0, 3)
NOBODYS = -1.0  # in rows that are not computed yet


def next_token(seed: int, position: int) -> int:
    """The token at ``position`` of every sequence with this seed."""
    return (seed * 7919 + position * 104729) % VOCAB


def expected_output(request: SequenceRequest) -> list[int]:
    """All tokens that a request gives, whoever serves it."""
    n = len(request.prompt_token_ids)
    assert request.params.seed is not None
    tokens = []
    for position in range(n, n + request.params.max_tokens):
        tokens.append(next_token(request.params.seed, position))
        if tokens[-1] in request.params.stop_token_ids:
            break
    return tokens


class FakeRunner:
    """Same surface as ModelRunner. ``step_s`` is what a forward costs; ``fail_next`` makes the next one raise.

    ``gate``, cleared, holds the engine before its next forward.
    """

    def __init__(self, config: NodeConfig, *, weights: str = "w0", step_s: float = 0.0) -> None:
        draft = KvLayer(LayerKind.GQA, LayerOwner.DRAFT, 1, 4)
        target = KvLayer(LayerKind.GQA, LayerOwner.TARGET, 2, 4)
        layout = KvLayout((target, target, draft), torch.float32)
        self.page_size = config.page_size
        pages = config.kv_cache_tokens // config.page_size
        self.kv = KvPool(layout, pages, config.page_size)
        self.allocator = PageAllocator(pages)
        self.prefix = PrefixCache(self.allocator, config.page_size, 1, "fake") if config.prefix_cache else None
        self.max_model_len = config.max_model_len or 512
        self.vocab_size = VOCAB
        self.dtype = torch.float32
        self.bit_exact = True
        self.handoff = HandoffContents("draft_kv", HIDDEN)
        self.identity = RunnerIdentity("fake", weights, "none")
        self.drafter = NoDrafter()
        self.spec_slots = 1 + config.num_draft_tokens
        self.step_s = step_s
        self.fail_next = False
        self.gate = threading.Event()
        self.gate.set()
        self.batch_sizes: list[int] = []  # of decode rounds
        self.prefill_sizes: list[int] = []  # prompts in a prefill step
        self._drafts = config.num_draft_tokens

    def alive(self) -> bool:
        """See TargetModel."""
        return True

    def close(self) -> None:
        """See TargetModel."""

    @property
    def runner(self) -> ModelRunner:
        """Itself, for the type checker."""
        return cast(ModelRunner, self)

    def new_sequence(
        self, request: SequenceRequest, most_cached: int | None = None, grammar: object = None
    ) -> Sequence:
        assert most_cached is None
        assert grammar is None
        evict = self.prefix.evict if self.prefix else None
        seq = Sequence.start(request, PageTable(self.allocator, self.page_size, evict))
        if self.prefix:
            pages, seq.cached_tokens = self.prefix.match(seq.token_ids, request.cache_salt, len(seq.token_ids) - 1)
            seq.table.adopt(pages)
            seq.num_computed = seq.draft_rows = seq.cached_tokens
        return seq

    def take_pages(self, seq: Sequence, num_slots: int) -> None:
        seq.table.ensure(num_slots)

    def prefill(self, chunks: Seq[PrefillChunk], after_layer: AfterLayer | None = None) -> list[SampledToken | None]:
        self._forward()
        self.prefill_sizes.append(len(chunks))
        self._target_rows(chunks, after_layer)
        results: list[SampledToken | None] = []
        for chunk in chunks:
            seq = chunk.seq
            assert chunk.start == seq.num_computed < chunk.end
            seq.num_computed = chunk.end
            if chunk.end < seq.num_prefill:
                self._write(seq, chunk.start, chunk.end, DRAFT_LAYERS)
                seq.draft_rows = chunk.end
                results.append(None)
                continue
            token_id = self._commit(seq)
            self._write(seq, chunk.start, chunk.end, DRAFT_LAYERS)
            self._draft(seq)
            results.append(SampledToken(token_id, TokenLogprobs(-0.5, (token_id,), (-0.5,))))
        return results

    def settled_draft_rows(self, seq: Sequence) -> int:
        """A draft row rests on the token after it, which a prompt has."""
        return seq.draft_rows

    def decode(self, seqs: Seq[Sequence]) -> list[RoundResult]:
        self._forward()
        self.batch_sizes.append(len(seqs))
        results = []
        for seq in seqs:
            self.check_rows(seq)
            assert seq.table.capacity >= len(seq.token_ids) - 1 + self.spec_slots
            budget = seq.request.params.max_tokens - seq.num_output
            assert budget > 0
            accepted = min(self._drafts, ACCEPTED[seq.stats.rounds % len(ACCEPTED)], budget - 1)
            start = seq.num_computed
            tokens: list[int] = []
            while len(tokens) < accepted + 1 and seq.finish_reason is None:
                tokens.append(self._commit(seq))
            seq.num_computed = len(seq.token_ids) - 1
            self._write(seq, start, seq.num_computed)
            self._draft(seq)
            seq.stats.add(self._drafts, self._drafts, len(tokens) - 1)
            logprobs = tuple(TokenLogprobs(-0.5) for _ in tokens)
            results.append(
                RoundResult(tuple(tokens), logprobs, Round(self._drafts, len(tokens) - 1, self._drafts, "fake"))
            )
        return results

    def release(self, seq: Sequence) -> None:
        if self.prefix and seq.table.pages:
            self.prefix.insert(seq.token_ids, seq.table.pages, seq.num_computed, seq.request.cache_salt)
        seq.table.release()

    def check_rows(self, seq: Sequence) -> None:
        """Every target and draft row, and the draft state, are those of this sequence's tokens."""
        slots = seq.table.slots[: seq.num_computed]
        assert torch.equal(self.kv.gather(ALL_LAYERS, slots), self._rows(seq, 0, seq.num_computed)), "wrong KV rows"
        assert seq.draft is not None
        assert seq.draft_rows == seq.num_computed
        assert torch.equal(seq.draft.hidden, self._draft_state(seq).hidden), "wrong hidden row"
        assert torch.equal(seq.draft.proposal_ids, self._draft_state(seq).proposal_ids), "wrong proposals"
        assert torch.equal(seq.draft.proposal_probs, self._draft_state(seq).proposal_probs), "wrong probabilities"

    def problems(self) -> list[str]:
        """What is wrong with the pool's books, once no sequence is left."""
        owned = self.prefix.pages if self.prefix else []
        return self.allocator.check_integrity(owned) + (self.prefix.check_integrity() if self.prefix else [])

    def _target_rows(self, chunks: Seq[PrefillChunk], after_layer: AfterLayer | None) -> None:
        """Layer by layer; until its turn comes a layer holds rows that are nobody's."""
        for chunk in chunks:
            slots = chunk.seq.table.slots[chunk.start : chunk.end]
            self.kv.scatter(TARGET_LAYERS, slots, torch.full((2 * 16 * len(slots),), NOBODYS))
        for layer in TARGET_LAYERS:
            for chunk in chunks:
                self._write(chunk.seq, chunk.start, chunk.end, range(layer, layer + 1))
            if after_layer is not None:
                after_layer(layer)

    def _forward(self) -> None:
        self.gate.wait(10.0)
        time.sleep(self.step_s)
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("the forward broke")

    def _commit(self, seq: Sequence) -> int:
        params = seq.request.params
        assert params.seed is not None
        token_id = next_token(params.seed, len(seq.token_ids))
        seq.token_ids.append(token_id)
        if token_id in params.stop_token_ids:
            seq.finish_reason = FinishReason.STOP
        elif seq.num_output >= params.max_tokens:
            seq.finish_reason = FinishReason.LENGTH
        return token_id

    def _rows(self, seq: Sequence, start: int, end: int, layers: range = ALL_LAYERS) -> torch.Tensor:
        """Canonical rows start..end-1; a draft row depends on the token after it."""
        position = torch.arange(start, end)
        tokens = torch.tensor(seq.token_ids[start : end + 1])
        parts = []
        for layer in layers:
            spec = self.kv.layout.layers[layer]
            of = tokens[1:] if spec.owner is LayerOwner.DRAFT else tokens[: end - start]
            values = (of * 31 + position * 7 + layer * 1009) % 8191
            parts.append(values[:, None].expand(-1, spec.row_elems).reshape(-1))
        return torch.cat(parts).float()

    def _write(self, seq: Sequence, start: int, end: int, layers: range = ALL_LAYERS) -> None:
        self.kv.scatter(layers, seq.table.slots[start:end], self._rows(seq, start, end, layers))

    def _draft(self, seq: Sequence) -> None:
        seq.draft, seq.draft_rows = self._draft_state(seq), seq.num_computed

    def _draft_state(self, seq: Sequence) -> DraftState:
        last = seq.token_ids[-1]
        ids = torch.arange(last, last + DEPTH * WIDTH).view(DEPTH, WIDTH) % VOCAB
        return DraftState(ids, (ids % 7).float() / 8, torch.full((1, HIDDEN), float(last)))
