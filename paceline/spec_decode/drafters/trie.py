"""Lookahead, trie form (Zhao et al., arXiv 2312.12728; algorithms.md C11): a forest of what followed each token.

Every token of a text is the root of a trie that holds the ``branch_length`` tokens after it, with counts. A request's
prompt has a forest of its own (its counts vanish with the request); outputs of all requests of a tenant share one.
Retrieval walks both: the longest suffix of the context that is a path in either, then its subtree, best first.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import NamedTuple

from paceline.spec_decode.base import DraftBudget, Drafter, ExtendItem, TreeKind
from paceline.spec_decode.drafters.tenants import TenantCache
from paceline.spec_decode.sequence import Sequence
from paceline.spec_decode.tree import DraftTree, build_tree

MAX_FAN_OUT = 32  # next tokens looked at per node: bounds the time after tokens that anything follows


class TrieNode:
    """A token after its parent's; ``count`` is never above the parent's. The child counted last stands last."""

    __slots__ = ("children", "count")

    def __init__(self) -> None:
        self.count = 0.0
        self.children: dict[int, TrieNode] = {}


class Forest:
    """Counted paths of tokens in at most ``max_nodes`` nodes."""

    def __init__(self, max_nodes: int) -> None:
        self.max_nodes = max_nodes
        self.num_nodes = 0
        self._root = TrieNode()

    def insert(self, token_ids: Seq[int]) -> None:
        """Count a path from its root token on."""
        node = self._root
        for token_id in token_ids:
            child = node.children.pop(token_id, None)
            if child is None:
                child = TrieNode()
                self.num_nodes += 1
            node.children[token_id] = child
            child.count += 1.0
            node = child
        while self.num_nodes > self.max_nodes:
            self.num_nodes = self._halve(self._root)

    def find(self, token_ids: Seq[int]) -> TrieNode | None:
        """The node at the end of a path, if it exists."""
        node: TrieNode | None = self._root
        for token_id in token_ids:
            if node is None:
                return None
            node = node.children.get(token_id)
        return node

    def _halve(self, node: TrieNode) -> int:
        """Halve all counts below ``node`` and drop what falls to 1 or less. Returns the nodes left below it."""
        left = 0
        for token_id, child in list(node.children.items()):
            child.count /= 2
            if child.count <= 1.0:
                del node.children[token_id]
            else:
                left += 1 + self._halve(child)
        return left


Place = tuple[TrieNode | None, TrieNode | None]  # the same path in the prompt's forest and in the outputs'
Ranking = Callable[[float, float], float]  # (count in the prompt, count in outputs) -> score; 0 is never drafted


class Option(NamedTuple):
    """A next token at some place, its counts in the prompt and in outputs, and the place it leads to."""

    token_id: int
    prompt: float
    output: float
    place: Place


def options(place: Place) -> list[Option]:
    """The next tokens in either forest, the MAX_FAN_OUT latest of each: the latest one first, as it wins ties."""
    prompt, output = place
    below_prompt = prompt.children if prompt else {}
    below_output = output.children if output else {}
    latest = [islice(reversed(below), MAX_FAN_OUT) for below in (below_prompt, below_output)]
    found = []
    for token_id in dict.fromkeys(chain.from_iterable(latest)):
        one, other = below_prompt.get(token_id), below_output.get(token_id)
        found.append(Option(token_id, one.count if one else 0.0, other.count if other else 0.0, (one, other)))
    return found


@dataclass
class Branches:
    """A draft tree in the making: (parent, token) pairs for build_tree, no pair twice."""

    max_nodes: int  # root not counted
    max_depth: int
    pairs: list[tuple[int, int]] = field(default_factory=list)
    _known: dict[tuple[int, int], int] = field(default_factory=dict)

    @property
    def room(self) -> int:
        """Nodes that still fit."""
        return self.max_nodes - len(self.pairs)

    def add(self, parent: int, token_id: int) -> tuple[int, bool]:
        """The pair's index, and whether it is new."""
        index = self._known.setdefault((parent, token_id), len(self.pairs))
        new = index == len(self.pairs)
        if new:
            self.pairs.append((parent, token_id))
        return index, new

    def collect(self, start: Place, passes: Seq[tuple[Ranking, int]]) -> None:
        """Passes over the nodes below ``start``: up to so many new ones each, highest rank first, parents first."""
        seen: dict[int, list[Option]] = {}  # by pair, the root's -1: passes share what they looked up

        for rank, quota in passes:
            left = min(quota, self.room)
            heap: list[tuple[float, int, int, int, Option]] = []  # -rank, serial, parent, depth
            at, index, depth, serial = start, -1, 1, 0
            while left > 0:
                if depth <= self.max_depth:
                    below = seen.get(index)
                    if below is None:
                        below = seen[index] = options(at)
                    for option in below:
                        if (score := rank(option.prompt, option.output)) > 0.0:
                            heapq.heappush(heap, (-score, serial, index, depth, option))
                            serial += 1
                if not heap:
                    break
                _, _, parent, depth, option = heapq.heappop(heap)
                index, new = self.add(parent, option.token_id)
                left -= new
                at, depth = option.place, depth + 1

    def follow(self, start: Place, rank: Ranking) -> None:
        """Single branch: lengthen the chain by what ``start`` holds after the tokens that are in it already."""
        prompt, output = start
        for _, token_id in self.pairs:
            prompt = prompt.children.get(token_id) if prompt else None
            output = output.children.get(token_id) if output else None
        place = (prompt, output)
        while self.room > 0:
            best = max(options(place), key=lambda option: rank(option.prompt, option.output), default=None)
            if best is None or rank(best.prompt, best.output) <= 0.0:
                return
            self.add(len(self.pairs) - 1, best.token_id)
            place = best.place


@dataclass
class TrieState:
    """What one sequence has in the forests."""

    prompt: Forest
    inserted: int  # positions below it are roots in the outputs' forest


class TrieDrafter(Drafter):
    """Trie retrieval over each prompt and its tenant's outputs.

    branch_length: tokens kept after each token. output_weight (w): rank is (1-w) * prompt count + w * output count.
    min_prompt_share, min_output_share: of the nodes each suffix length may fill, the part that goes by one count
    alone. max_nodes: of each forest (about 0.3 kB a node); past it counts are halved and what falls to 1 is dropped.
    max_tenants: tenants kept, least recently used go. Draws a tree of up to the budget's nodes, or a single branch
    when the budget's kind is CHAIN or its width 1.
    """

    name = "trie"

    def __init__(
        self,
        vocab_size: int,
        branch_length: int = 8,
        output_weight: float = 1e-4,
        min_prompt_share: float = 0.25,
        min_output_share: float = 0.25,
        max_nodes: int = 65_536,
        max_tenants: int = 8,
    ) -> None:
        if branch_length < 1 or not 0.0 <= output_weight <= 1.0 or max_nodes < 1:
            raise ValueError("branch_length and max_nodes must be at least 1, output_weight between 0 and 1")
        if min(min_prompt_share, min_output_share) < 0.0 or min_prompt_share + min_output_share > 1.0:
            raise ValueError("the shares must not be negative nor add up to more than 1")
        self.vocab_size, self.branch_length, self.max_nodes = vocab_size, branch_length, max_nodes
        self.min_prompt_share, self.min_output_share = min_prompt_share, min_output_share
        self.output_weight = output_weight
        self.tenants = TenantCache(lambda: Forest(max_nodes), max_tenants)
        self.hits = 0  # rounds with at least one draft token
        self.misses = 0

    def extend(self, items: Seq[ExtendItem]) -> None:
        """Needs no hidden rows; tokens are inserted when proposing."""

    def propose(self, seqs: Seq[Sequence], budgets: Seq[DraftBudget]) -> list[DraftTree]:
        """See Drafter."""
        return [self._propose(seq, budget) for seq, budget in zip(seqs, budgets, strict=True)]

    def _propose(self, seq: Sequence, budget: DraftBudget) -> DraftTree:
        branches = Branches(budget.max_nodes - 1, budget.num_draft_tokens)
        if budget.num_draft_tokens:
            state = self._state(seq)
            self._insert_output(seq, state, len(seq.token_ids) - self.branch_length)
            self._retrieve(seq, state, budget, branches)
            self.hits += bool(branches.pairs)
            self.misses += not branches.pairs
        root = seq.token_ids[-1]
        return build_tree(root, branches.pairs, self.vocab_size, budget.max_nodes, budget.num_draft_tokens)

    def _retrieve(self, seq: Sequence, state: TrieState, budget: DraftBudget, branches: Branches) -> None:
        """Longest suffix first; shorter ones, whose subtrees reach deeper, fill what room is left."""
        outputs = self.tenants.find(seq.request.cache_salt)
        context = seq.token_ids[-self.branch_length :]
        single = budget.tree is TreeKind.CHAIN or budget.tree_width == 1
        for first in range(len(context)):
            suffix = context[first:]
            place = (state.prompt.find(suffix), outputs.find(suffix) if outputs else None)
            if place == (None, None):
                continue
            if single:
                branches.follow(place, self._mixed)
            else:
                room = branches.room
                prompt_quota = (lambda prompt, _: prompt, int(self.min_prompt_share * room))
                output_quota = (lambda _, output: output, int(self.min_output_share * room))
                branches.collect(place, [prompt_quota, output_quota, (self._mixed, room)])
            if branches.room == 0:
                return

    def _mixed(self, prompt: float, output: float) -> float:
        return (1.0 - self.output_weight) * prompt + self.output_weight * output

    def _state(self, seq: Sequence) -> TrieState:
        state = seq.scratch.get(self.name)
        if state is None:
            prompt = Forest(self.max_nodes)
            tokens = seq.request.prompt_token_ids
            # Of a longer prompt only the end, as much as surely fits: bounds the first proposal's time, too.
            for i in range(max(0, len(tokens) - self.max_nodes // (self.branch_length + 1)), len(tokens) - 1):
                prompt.insert(tokens[i : i + 1 + self.branch_length])
            # The last prompt token is the first root that output follows.
            state = seq.scratch[self.name] = TrieState(prompt, max(len(tokens) - 1, 0))
        assert isinstance(state, TrieState)
        return state

    def _insert_output(self, seq: Sequence, state: TrieState, end: int) -> None:
        """Insert the branches of roots below ``end``; before finish only whole ones are, so that none counts twice."""
        if state.inserted >= end:
            return
        outputs = self.tenants.get(seq.request.cache_salt)
        for i in range(state.inserted, end):
            outputs.insert(seq.token_ids[i : i + 1 + self.branch_length])
        state.inserted = end

    def finish(self, seq: Sequence) -> None:
        """Insert the output's remaining branches (a second call finds none), forget the prompt's counts."""
        state = seq.scratch.get(self.name)
        if state is None:  # never drafted for: there is no prompt to forget
            state = TrieState(Forest(self.max_nodes), max(len(seq.request.prompt_token_ids) - 1, 0))
        assert isinstance(state, TrieState)
        self._insert_output(seq, state, len(seq.token_ids) - 1)
        seq.scratch[self.name] = TrieState(Forest(self.max_nodes), state.inserted)
