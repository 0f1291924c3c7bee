"""Lookahead, trie form (Zhao et al., arXiv 2312.12728; algorithms.md C11): what followed each token, with counts.

A trie's node is the set of places where its path stands in a text, and its count their number. So no trie is built:
the places of the context's end are searched for (copying.py) and followed, prompt and outputs apart. A token costs 4
bytes where a trie node costs hundreds, nothing has to be inserted or halved while a round waits, and texts leave
oldest first. Retrieval is C11's: the longest suffix of the context first, then its subtree, best first, with a quota
for either source; shorter suffixes fill what room is left.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.engine_config import EngineConfig
from paceline.models.base import TargetModel
from paceline.spec_decode.base import DraftBudget, TreeKind
from paceline.spec_decode.drafters.copying import (
    BOUNDARY,
    MAX_MATCH,
    CopyingDrafter,
    Occurrence,
    OwnText,
    find,
    longest_first,
    own_occurrences,
)
from paceline.spec_decode.drafters.plan import DrafterPlan, plan_weightless
from paceline.spec_decode.drafters.tenants import TenantOutputs
from paceline.spec_decode.sequence import Sequence

Place = tuple[Seq[Occurrence], Seq[Occurrence]]  # where the same path stands in the prompt and in outputs
Ranking = Callable[[int, int], float]  # (count in the prompt, count in outputs) -> score; 0 is never drafted


class Option(NamedTuple):
    """A next token at some place, its counts in the prompt and in outputs, and the place it leads to."""

    token_id: int
    prompt: int
    output: int
    place: Place


def options(place: Place) -> list[Option]:
    """The next tokens: those of the prompt first, longest match first, then newest, as the earlier one wins ties."""
    found: dict[str, tuple[list[Occurrence], list[Occurrence]]] = {}
    for source, occurrences in enumerate(place):
        for length, text, index in occurrences:
            if index < len(text) and (token := text[index]) != BOUNDARY:
                found.setdefault(token, ([], []))[source].append((length, text, index + 1))
    return [Option(ord(token), len(p), len(o), (p, o)) for token, (p, o) in found.items()]


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
        place = start
        for _, token_id in self.pairs:
            place = next((option.place for option in options(place) if option.token_id == token_id), ((), ()))
        while self.room > 0:
            best = max(options(place), key=lambda option: rank(option.prompt, option.output), default=None)
            if best is None or rank(best.prompt, best.output) <= 0.0:
                return
            self.add(len(self.pairs) - 1, best.token_id)
            place = best.place


class TrieDrafter(CopyingDrafter):
    """Trie retrieval over each prompt, its output, and its tenant's finished outputs.

    output_weight (w): rank is (1-w) * prompt count + w * output count. min_prompt_share, min_output_share: of the
    nodes each suffix length may fill, the part that goes by one count alone. shared_tokens: finished output tokens
    kept per tenant (4 bytes each), 0 for none; max_tenants: tenants kept, least recently used go. Draws a tree of up
    to the budget's nodes, or a single branch when the budget's kind is CHAIN or its width 1.
    """

    name = "trie"

    def __init__(
        self,
        vocab_size: int,
        output_weight: float = 1e-4,
        min_prompt_share: float = 0.25,
        min_output_share: float = 0.25,
        shared_tokens: int = 32_768,
        max_tenants: int = 8,
    ) -> None:
        if not 0.0 <= output_weight <= 1.0:
            raise ValueError(f"output_weight must be between 0 and 1, got {output_weight}")
        if min(min_prompt_share, min_output_share) < 0.0 or min_prompt_share + min_output_share > 1.0:
            raise ValueError("the shares must not be negative nor add up to more than 1")
        super().__init__(vocab_size)
        self.output_weight = output_weight
        self.min_prompt_share, self.min_output_share = min_prompt_share, min_output_share
        self.outputs = TenantOutputs(self.name, shared_tokens, max_tenants)

    def _pairs(self, seq: Sequence, budget: DraftBudget) -> list[tuple[int, int]]:
        branches = Branches(budget.max_nodes - 1, budget.num_draft_tokens)
        self._retrieve(seq, budget, branches)
        return branches.pairs

    def _retrieve(self, seq: Sequence, budget: DraftBudget, branches: Branches) -> None:
        """Longest suffix first; shorter ones fill what room is left."""
        prompt, output = self._places(seq)
        single = budget.tree is TreeKind.CHAIN or budget.tree_width == 1
        for length in sorted({length for length, _, _ in (*prompt, *output)}, reverse=True):
            place = ([one for one in prompt if one[0] >= length], [one for one in output if one[0] >= length])
            if single:
                branches.follow(place, self._mixed)
            else:
                room = branches.room
                prompt_quota = (lambda prompt, _: prompt, int(self.min_prompt_share * room))
                output_quota = (lambda _, output: output, int(self.min_output_share * room))
                branches.collect(place, [prompt_quota, output_quota, (self._mixed, room)])
            if branches.room == 0:
                return

    def _places(self, seq: Sequence) -> Place:
        """Where the context's end stood before. Whether a place counts as the prompt's goes by the token after it."""
        text, others = OwnText.of(seq), self.outputs.text(seq)
        prompt_end = len(seq.request.prompt_token_ids) - (len(seq.token_ids) - len(text))
        own = own_occurrences(text)
        prompt = [one for one in own if one[2] < prompt_end]
        shared = find(others, text[-MAX_MATCH:], len(others))
        return prompt, longest_first([*(one for one in own if one[2] >= prompt_end), *shared])

    def _mixed(self, prompt: int, output: int) -> float:
        return (1.0 - self.output_weight) * prompt + self.output_weight * output

    def finish(self, seq: Sequence) -> None:
        """Learn from the output, once."""
        self.outputs.learn(seq)


def plan(name: str, config: EngineConfig, model: TargetModel) -> DrafterPlan:
    """See PlanDrafter."""
    return plan_weightless(TrieDrafter(model.spec.vocab_size))
