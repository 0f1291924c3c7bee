"""Draft trees (algorithms.md D1): node 0 is the root, the last committed token; parents come before children."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class DraftTree:
    """Tokens to verify in one forward.

    ``token_ids[0]`` is the root t_m. ``parents[0]`` is -1 and ``parents[i] < i``. ``depths[i]`` is the distance
    from the root; node i stands at absolute position m + depths[i]. Siblings carry distinct tokens.

    ``draft_probs`` is given when children were *drawn* from the drafter's distribution: per node with children, the
    float32 [vocab_size] q they were drawn from, in the order of their node index, without replacement. Absent: the
    children are a function of the context, q is one-hot (algorithms.md B2, B7).
    """

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    depths: tuple[int, ...]
    draft_probs: Mapping[int, torch.Tensor] | None = field(default=None, compare=False)
    drafter: str = field(default="", compare=False)  # who made it, for the counters

    @property
    def num_nodes(self) -> int:
        """Nodes, root included (N of algorithms.md A1)."""
        return len(self.token_ids)

    @property
    def num_draft_tokens(self) -> int:
        """Nodes, root not counted."""
        return len(self.token_ids) - 1

    @property
    def is_chain(self) -> bool:
        """Every node is the child of the one before it."""
        return all(parent == i - 1 for i, parent in enumerate(self.parents))

    def child(self, node: int, token_id: int) -> int | None:
        """The child of ``node`` that carries ``token_id``, if any."""
        for i in range(node + 1, len(self.token_ids)):
            if self.parents[i] == node and self.token_ids[i] == token_id:
                return i
        return None

    def path(self, node: int) -> list[int]:
        """Nodes from the root to ``node``, both included."""
        nodes = []
        while node >= 0:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]


def build_tree(
    root: int, nodes: Iterable[tuple[int, int]], vocab_size: int, max_nodes: int, max_depth: int
) -> DraftTree:
    """Build a tree from (parent, token_id) pairs given in an order where parents come first.

    ``parent`` indexes the pairs, -1 is the root. Duplicate siblings are merged; nodes deeper than ``max_depth``
    or past ``max_nodes`` (root included) are dropped with their descendants; a token id outside the vocabulary
    is dropped with its descendants (a drafter can never harm a request).
    """
    token_ids, parents, depths = [root], [-1], [0]
    position = {-1: 0}  # index of the pair -> node
    seen: dict[tuple[int, int], int] = {}
    for index, (parent, token_id) in enumerate(nodes):
        at = position.get(parent)
        if at is None or not 0 <= token_id < vocab_size or depths[at] >= max_depth:
            continue
        if (at, token_id) in seen:
            position[index] = seen[at, token_id]
            continue
        if len(token_ids) >= max_nodes:
            continue
        seen[at, token_id] = position[index] = len(token_ids)
        token_ids.append(token_id)
        parents.append(at)
        depths.append(depths[at] + 1)
    return DraftTree(tuple(token_ids), tuple(parents), tuple(depths))


def comb(candidates: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """The (parent, token_id) pairs of a comb: row d of ``candidates`` lists the tokens at depth d+1, best first; the
    first of each row carries the next row."""
    pairs: list[tuple[int, int]] = []
    spine = -1
    for row in candidates:
        first = len(pairs)
        pairs.extend((spine, token_id) for token_id in row)
        spine = first
    return pairs
