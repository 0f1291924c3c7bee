"""Copying: where the end of a text stood before, and what it went on with there.

A text is kept as a str of one code point per token, which Python searches at memory speed: 4 bytes a token and no
index, and finding every occurrence is one backward pass per gram size.

How sure is a copy? After L equal tokens the next one is taken to be equal with probability L / (L + DOUBT); what is
left goes to the occurrences of shorter matches, as escape probabilities do in text compression (PPM). On recorded
answers of SmolLM2-135M to Spec-Bench questions the tokens after 1, 2, 3 and 6 or more equal ones were right in 28, 47,
63 and 83 of 100 cases. So a draft grows with the match and ends where it no longer pays for its row of the target.
"""

from __future__ import annotations

import heapq
import sys
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

from paceline.spec_decode.base import DraftBudget, Drafter, ExtendItem, TreeKind
from paceline.spec_decode.sequence import Sequence
from paceline.spec_decode.trees.tree import DraftTree, build_tree

GRAM_SIZES = (8, 4, 2, 1)  # searched for in this order
MAX_MATCH = GRAM_SIZES[0]  # longer matches count as this
MAX_OCCURRENCES = 32  # looked at per search: bounds its time
MAX_TOKENS = 65_536  # of a longer context only this much of its end is searched: bounds time and memory
DOUBT = 2.0
MIN_PROBABILITY = 0.05  # of a path: about what a further row costs the target, in tokens
BOUNDARY = chr(sys.maxunicode)  # closes a text among others; no token

Occurrence = tuple[float, str, int]  # (tokens that agree before it, text, index of the token that followed there)


def text_of(token_ids: Iterable[int]) -> str:
    """Tokens as code points."""
    return "".join(map(chr, token_ids))


def check_vocab(vocab_size: int) -> None:
    """Raises ValueError when a token id would be no code point, or the boundary."""
    if vocab_size > ord(BOUNDARY):
        raise ValueError(f"copying drafters know token ids below {ord(BOUNDARY)}; the vocabulary has {vocab_size}")


@dataclass
class OwnText:
    """The end of one sequence's tokens, prompt included."""

    text: str = ""
    digested: int = 0  # tokens of the sequence that are in it, or too old for it

    @classmethod
    def of(cls, seq: Sequence) -> str:
        """The sequence's text as of now; drafters share it."""
        own = seq.memory.setdefault("text", OwnText())
        assert isinstance(own, OwnText)
        if own.digested < len(seq.token_ids):
            start = max(own.digested, len(seq.token_ids) - MAX_TOKENS)
            own.text = (own.text + text_of(seq.token_ids[start:]))[-MAX_TOKENS:]
            own.digested = len(seq.token_ids)
        return own.text


def find(text: str, tail: str, end: int, discount: float = 0.0) -> Iterator[Occurrence]:
    """Occurrences in ``text[:end]`` of the longest ends of ``tail`` that something follows, newest first per gram size.

    At most MAX_OCCURRENCES, of which those of longer grams have precedence. ``discount`` comes off their lengths.
    """
    seen: set[int] = set()
    for size in GRAM_SIZES:
        if size > len(tail):
            continue
        gram = tail[-size:]
        at = text.rfind(gram, 0, end)
        while at >= 0 and len(seen) < MAX_OCCURRENCES:
            after = at + size
            if after not in seen and text[after] != BOUNDARY:
                seen.add(after)
                yield _agreeing(text, after, tail, size) - discount, text, after
            at = text.rfind(gram, 0, after - 1)


def _agreeing(text: str, after: int, tail: str, known: int) -> int:
    """How many tokens before ``text[after]`` are those that end ``tail``; ``known`` of them surely are."""
    most = min(len(tail), after)
    while known < most and text[after - known - 1] == tail[-known - 1]:
        known += 1
    return known


def own_occurrences(text: str) -> list[Occurrence]:
    """Where the end of a sequence's text stood earlier in it, longest match first, newest first among equals."""
    return longest_first(find(text, text[-MAX_MATCH:], len(text) - 1))  # the end itself has nothing after it


def longest_first(occurrences: Iterable[Occurrence]) -> list[Occurrence]:
    """Sorted as ``grow`` wants them."""
    return sorted(occurrences, key=lambda one: (-one[0], -one[2]))


@dataclass(frozen=True)
class CopyLimits:
    """Bounds of one proposal."""

    max_nodes: int  # root not counted
    max_depth: int
    width: int  # children per node
    min_probability: float = MIN_PROBABILITY  # of the path to a node
    min_confidence: float = 0.0  # of a node among its siblings

    @classmethod
    def within(cls, budget: DraftBudget, min_probability: float = MIN_PROBABILITY) -> CopyLimits:
        """What a budget allows."""
        width = 1 if budget.tree is TreeKind.CHAIN else budget.tree_width
        return cls(budget.max_nodes - 1, budget.num_draft_tokens, width, min_probability, budget.min_confidence)


def grow(occurrences: list[Occurrence], bounds: CopyLimits) -> list[tuple[int, int]]:
    """The (parent, token) pairs for build_tree: best-first expansion by path probability. Width 1 gives a chain."""
    pairs: list[tuple[int, int]] = []
    heap: list[tuple[float, int, int, int, str, list[Occurrence]]] = []  # -probability, serial, parent, depth, ...
    serial = 0

    def push(at: list[Occurrence], probability: float, parent: int, depth: int) -> None:
        nonlocal serial
        for token, likely, after in followers(at)[: bounds.width]:
            if likely >= bounds.min_confidence and probability * likely >= bounds.min_probability:
                heapq.heappush(heap, (-probability * likely, serial, parent, depth, token, after))
                serial += 1

    push(occurrences, 1.0, -1, 1)
    while heap and len(pairs) < bounds.max_nodes:
        negative, _, parent, depth, token, after = heapq.heappop(heap)
        pairs.append((parent, ord(token)))
        if depth < bounds.max_depth:
            push(after, -negative, len(pairs) - 1, depth + 1)
    return pairs


def followers(at: Seq[Occurrence]) -> list[tuple[str, float, list[Occurrence]]]:
    """Each token that followed, its probability, and where to go on; likeliest first, then longest match, then newest.

    ``at`` has the longest match first. The occurrences of a length share L / (L + DOUBT) of what the longer left.
    """
    probability: dict[str, float] = {}
    further: dict[str, list[Occurrence]] = {}
    left = 1.0
    for length, same in groupby(at, key=itemgetter(0)):
        group = list(same)
        each = left * length / (length + DOUBT) / len(group)
        left -= each * len(group)
        for _, text, index in group:
            token = text[index]
            probability[token] = probability.get(token, 0.0) + each
            after = further.setdefault(token, [])
            if index + 1 < len(text) and text[index + 1] != BOUNDARY:
                after.append((length + 1, text, index + 1))
    ranked = sorted(probability.items(), key=lambda item: -item[1])
    return [(token, likely, further[token]) for token, likely in ranked]


class CopyingDrafter(Drafter):
    """A drafter that only looks at tokens: a subclass says which (parent, token) pairs it drafts."""

    def __init__(self, vocab_size: int) -> None:
        """Raises ValueError for a vocabulary that copying cannot hold."""
        check_vocab(vocab_size)
        self.vocab_size = vocab_size
        self.hits = 0  # rounds with at least one draft token
        self.misses = 0

    def extend(self, items: Seq[ExtendItem]) -> None:
        """Needs no hidden rows; tokens are read when proposing."""

    def propose(self, seqs: Seq[Sequence], budgets: Seq[DraftBudget]) -> list[DraftTree]:
        """See Drafter."""
        return [self._propose(seq, budget) for seq, budget in zip(seqs, budgets, strict=True)]

    def _propose(self, seq: Sequence, budget: DraftBudget) -> DraftTree:
        pairs: list[tuple[int, int]] = []
        if budget.num_draft_tokens:
            pairs = self._pairs(seq, budget)
            self.hits += bool(pairs)
            self.misses += not pairs
        return build_tree(seq.token_ids[-1], pairs, self.vocab_size, budget.max_nodes, budget.num_draft_tokens)

    @abstractmethod
    def _pairs(self, seq: Sequence, budget: DraftBudget) -> list[tuple[int, int]]:
        """What to draft, for ``build_tree``; the budget allows at least one token."""
