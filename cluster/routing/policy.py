"""Which nodes serve a sequence. Pure functions of what the registry says, of what this router has under way, and of
what the nodes are thought to have cached."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from cluster.routing.cost import TRANSFER_WEIGHT, decode_cost, prefill_cost
from cluster.state.registry_types import NodeRecord

NOTHING: Mapping[str, int] = {}


@dataclass(frozen=True)
class PromptHint:
    """A prompt, and how much of it the nodes are thought to have cached."""

    num_tokens: int = 0
    page_size: int = 1
    cached: Mapping[tuple[str, int], int] = field(default_factory=dict)  # tokens by node id and generation

    def cached_tokens(self, node: NodeRecord) -> int:
        """On one node."""
        return min(self.cached.get((node.id, node.generation), 0), self.num_tokens)

    def missing_tokens(self, node: NodeRecord) -> int:
        """On one node."""
        return self.num_tokens - self.cached_tokens(node)


NO_HINT = PromptHint()


def cheapest(nodes: Sequence[NodeRecord], cost: Callable[[NodeRecord], float], turn: int) -> NodeRecord | None:
    """The node of least cost; ``turn`` rotates among equals. None when there is none."""
    if not nodes:
        return None
    costs = [cost(node) for node in nodes]
    best = [node for node, c in zip(nodes, costs, strict=True) if c == min(costs)]
    return best[turn % len(best)]


def choose_decode(
    nodes: Sequence[NodeRecord],
    own: Mapping[str, int],
    pages: int,
    turn: int = 0,
    prompt: PromptHint = NO_HINT,
    token_weight: float = TRANSFER_WEIGHT,
) -> NodeRecord | None:
    """The decode node for a sequence that needs ``pages`` KV pages. own: by node id. token_weight: of prompt tokens
    that it lacks."""

    def cost(node: NodeRecord) -> float:
        cached_pages = prompt.cached_tokens(node) // prompt.page_size
        return decode_cost(node, own.get(node.id, 0), pages, cached_pages, prompt.missing_tokens(node), token_weight)

    return cheapest(nodes, cost, turn)


def choose_prefill(
    nodes: Sequence[NodeRecord],
    own: Mapping[str, int],
    turn: int = 0,
    own_tokens: Mapping[str, int] = NOTHING,
    prompt: PromptHint = NO_HINT,
) -> NodeRecord | None:
    """The prefill node for a sequence. own, own_tokens: prompts not computed yet and their tokens, by node id."""

    def cost(node: NodeRecord) -> float:
        return prefill_cost(node, own.get(node.id, 0), own_tokens.get(node.id, 0), prompt.missing_tokens(node))

    return cheapest(nodes, cost, turn)
