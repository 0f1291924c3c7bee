"""Suffix decoding (Oliaro et al., arXiv 2411.04975; algorithms.md C2b): the likeliest continuation of the longest
stretches of recent text that stood before, in the request itself or in the tenant's finished outputs.

What differs from the paper's two suffix trees: tokens are kept as they are, under hash chains (suffix_index.py), and
the counts of the few tree nodes that one proposal visits are recounted by following the occurrences of the matched
suffix. A tree node's count is its number of occurrences, so the choices are the tree's, except that only the
MAX_OCCURRENCES best occurrences (longest match, then newest) are counted. In exchange a token costs one entry per
hashed order in place of one per depth, and finished texts can leave again, oldest first.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from paceline.spec_decode.base import DraftBudget, Drafter, ExtendItem, TreeKind
from paceline.spec_decode.drafters.suffix_index import FinishedTexts, SuffixIndex
from paceline.spec_decode.drafters.tenants import TenantCache
from paceline.spec_decode.sequence import Sequence
from paceline.spec_decode.tree import DraftTree, build_tree

MAX_REQUEST_TOKENS = 16_384  # of a longer context only this much of its end is indexed: bounds time and memory
MIN_LEARNT_TOKENS = 2  # a shorter output has nothing that follows anything


@dataclass(frozen=True)
class Growth:
    """Bounds of one proposal."""

    max_nodes: int  # root not counted
    max_depth: int
    width: int  # children per node
    min_probability: float  # of the path to a node
    min_confidence: float  # of a node among its siblings


@dataclass(frozen=True)
class Continuation:
    """Tokens to draft, as (parent, token) pairs for build_tree, and the tokens expected to be accepted."""

    pairs: tuple[tuple[int, int], ...] = ()
    score: float = 0.0  # sum of path probabilities


def grow(index: SuffixIndex, positions: Seq[int], bounds: Growth) -> Continuation:
    """Best-first expansion by path probability (product of count ratios) from the occurrences at ``positions``.

    With width 1 a chain of the most frequent followers. Equal counts go to the token seen first in ``positions``.
    """
    pairs: list[tuple[int, int]] = []
    score, serial = 0.0, 0
    heap: list[tuple[float, int, int, int, int, list[int]]] = []  # -probability, serial, parent, depth, token, at

    def push(at: Seq[int], probability: float, parent: int, depth: int) -> None:
        nonlocal serial
        groups = sorted(index.followers(at).items(), key=lambda group: -len(group[1]))
        for token_id, after in groups[: bounds.width]:
            ratio = len(after) / len(at)
            if probability * ratio >= bounds.min_probability and ratio >= bounds.min_confidence:
                heapq.heappush(heap, (-probability * ratio, serial, parent, depth, token_id, after))
                serial += 1

    push(positions, 1.0, -1, 1)
    while heap and len(pairs) < bounds.max_nodes:
        negative, _, parent, depth, token_id, after = heapq.heappop(heap)
        pairs.append((parent, token_id))
        score -= negative
        if depth < bounds.max_depth:
            push(after, -negative, len(pairs) - 1, depth + 1)
    return Continuation(tuple(pairs), score)


@dataclass
class SuffixState:
    """A sequence's own index."""

    index: SuffixIndex
    digested: int  # tokens of the sequence that are in it, or too old for it
    finished: bool = field(default=False)


class SuffixDrafter(Drafter):
    """Suffix decoding over each request's tokens and its tenant's finished outputs.

    max_depth: longest match told apart. factor, offset: after a match of L tokens at most floor(factor * L + offset)
    tokens are drafted. min_probability: drafting stops below this estimated path probability. shared_tokens: finished
    output tokens kept per tenant (about 0.6 kB each), 0 for none; max_tenants: tenants kept, least recently used go.
    Drafts a chain, or a small tree when the budget's kind is not CHAIN and its width above 1.
    """

    name = "suffix"

    def __init__(
        self,
        vocab_size: int,
        max_depth: int = 64,
        factor: float = 1.0,
        offset: float = 0.0,
        min_probability: float = 0.1,
        shared_tokens: int = 32_768,
        max_tenants: int = 8,
    ) -> None:
        if max_depth < 1 or factor < 0.0 or not 0.0 < min_probability <= 1.0 or shared_tokens < 0:
            raise ValueError("max_depth must be >= 1, factor and shared_tokens >= 0, min_probability in (0, 1]")
        self.vocab_size, self.max_depth = vocab_size, max_depth
        self.factor, self.offset, self.min_probability = factor, offset, min_probability
        self.shared_tokens = shared_tokens
        self.tenants = TenantCache(lambda: FinishedTexts(shared_tokens, max_depth), max_tenants)
        self.hits = 0  # rounds with at least one draft token
        self.misses = 0

    def extend(self, items: Seq[ExtendItem]) -> None:
        """Needs no hidden rows; tokens are indexed when proposing."""

    def propose(self, seqs: Seq[Sequence], budgets: Seq[DraftBudget]) -> list[DraftTree]:
        """See Drafter."""
        return [self._propose(seq, budget) for seq, budget in zip(seqs, budgets, strict=True)]

    def _propose(self, seq: Sequence, budget: DraftBudget) -> DraftTree:
        best = Continuation()
        if budget.num_draft_tokens:
            best = self._best(self._own_index(seq), seq, budget)
            texts = self.tenants.find(seq.request.cache_salt)
            if texts is not None:
                shared = self._best(texts.index, seq, budget)
                best = max(best, shared, key=lambda found: found.score)  # the request's own wins a tie
            self.hits += bool(best.pairs)
            self.misses += not best.pairs
        return build_tree(seq.token_ids[-1], best.pairs, self.vocab_size, budget.max_nodes, budget.num_draft_tokens)

    def _own_index(self, seq: Sequence) -> SuffixIndex:
        state = self._state(seq)
        state.index.append(seq.token_ids[state.digested :])
        state.digested = len(seq.token_ids)
        return state.index

    def _state(self, seq: Sequence) -> SuffixState:
        state = seq.scratch.get(self.name)
        if state is None:
            skipped = max(0, len(seq.token_ids) - MAX_REQUEST_TOKENS)
            state = seq.scratch[self.name] = SuffixState(SuffixIndex(self.max_depth), skipped)
        assert isinstance(state, SuffixState)
        return state

    def _best(self, index: SuffixIndex, seq: Sequence, budget: DraftBudget) -> Continuation:
        """The continuation with the highest score over all match lengths.

        Only lengths at which the set of occurrences changes are tried: a longer match with the same occurrences may
        draft as much or more.
        """
        found = index.occurrences(seq.token_ids[-self.max_depth :])
        best = Continuation()
        width = 1 if budget.tree is TreeKind.CHAIN else budget.tree_width
        for i, (_, length) in enumerate(found):
            if i + 1 < len(found) and found[i + 1][1] == length:
                continue
            limit = min(math.floor(self.factor * length + self.offset), budget.max_nodes - 1)
            if limit <= best.score:  # a score is at most the number of tokens, and shorter matches may draft fewer
                break
            bounds = Growth(limit, budget.num_draft_tokens, width, self.min_probability, budget.min_confidence)
            grown = grow(index, [position for position, _ in found[: i + 1]], bounds)
            best = max(best, grown, key=lambda one: one.score)
        return best

    def finish(self, seq: Sequence) -> None:
        """Learn from the output, once."""
        state = self._state(seq)
        if state.finished:
            return
        seq.scratch[self.name] = SuffixState(SuffixIndex(self.max_depth), len(seq.token_ids), finished=True)
        output = seq.output_token_ids
        if self.shared_tokens > MIN_LEARNT_TOKENS and len(output) >= MIN_LEARNT_TOKENS:
            self.tenants.get(seq.request.cache_salt).add(output)
