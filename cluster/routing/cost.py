"""What it costs to send a sequence to a node, in units of one sequence in its queue. Pure functions.

    prefill = sequences there + PROMPT_WEIGHT x (prompt tokens of this router that it has still to compute
                                                 + those of this prompt that it has not cached)
    decode  = sequences there + PAGES_WEIGHT x pages needed beyond those cached / pages free
                              + TRANSFER_WEIGHT x prompt tokens not cached, which are to be handed over
                              (+ NO_ROOM when the pages may not fit)

What is cached is a hint (prefix_index.py), so it only ever lowers a cost by what it may save: a cached prompt of 1024
tokens makes up for one sequence in the queue, and the next one goes elsewhere. The two costs do not depend on each
other, so the cheapest pair is the cheapest node of each side. The registry's counts are up to a quarter of a lease old,
so a router's own calls count when they are more.
"""

from __future__ import annotations

from cluster.state.registry_types import NodeRecord

PROMPT_WEIGHT = 1 / 1024  # a prompt of 1024 tokens weighs like one more sequence: one of 8192 is not one of 16
TRANSFER_WEIGHT = 1 / 8192  # a token that decode is handed over is cheaper than one that prefill computes
PAGES_WEIGHT = 1.0  # taking the last free pages weighs like one more sequence
NO_ROOM = 1e6  # of a decode node that would have to make the sequence wait for pages


def load(node: NodeRecord, own: int) -> float:
    """Sequences on a node. own: calls of this router in progress there."""
    return float(max(node.running + node.waiting, own))


def prefill_cost(node: NodeRecord, own: int, own_tokens: int, missing_tokens: int = 0) -> float:
    """own: prompts that this router waits for there, own_tokens: what is to be computed of them, missing_tokens: of
    the new prompt, what is not cached there."""
    return load(node, own) + PROMPT_WEIGHT * (own_tokens + missing_tokens)


def decode_cost(
    node: NodeRecord,
    own: int,
    pages: int,
    cached_pages: int = 0,
    missing_tokens: int = 0,
    token_weight: float = TRANSFER_WEIGHT,
) -> float:
    """own: sequences of this router there, pages: what the new one needs, cached_pages: of them, missing_tokens: of
    its prompt, what is not cached there. token_weight: of those; PROMPT_WEIGHT where decode is to compute them.

    A node that does not say how many pages it has is taken to have enough. Its free pages may be the very ones that
    are cached, so these make no room.
    """
    cost = load(node, own) + token_weight * missing_tokens
    if not node.total_pages:
        return cost
    needed = max(pages - cached_pages, 0)
    return cost + PAGES_WEIGHT * needed / max(node.free_pages, 1) + (NO_ROOM if node.free_pages < pages else 0.0)
