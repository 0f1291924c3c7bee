"""What it costs to send a sequence to a node, in units of one sequence in its queue. Pure functions.

    prefill = sequences there + PROMPT_WEIGHT x prompt tokens of this router that it has still to compute
    decode  = sequences there + PAGES_WEIGHT x pages needed / pages free (+ NO_ROOM when they do not fit)

The two do not depend on each other, so the cheapest pair is the cheapest node of each side. The registry's counts are
up to a quarter of a lease old, so a router's own calls count when they are more.
"""

from __future__ import annotations

from cluster.registry_types import NodeRecord

PROMPT_WEIGHT = 1 / 1024  # a prompt of 1024 tokens weighs like one more sequence: one of 8192 is not one of 16
PAGES_WEIGHT = 1.0  # taking the last free pages weighs like one more sequence
NO_ROOM = 1e6  # of a decode node that would have to make the sequence wait for pages


def load(node: NodeRecord, own: int) -> float:
    """Sequences on a node. own: calls of this router in progress there."""
    return float(max(node.running + node.waiting, own))


def prefill_cost(node: NodeRecord, own: int, own_tokens: int) -> float:
    """own: prompts that this router waits for there, own_tokens: theirs."""
    return load(node, own) + PROMPT_WEIGHT * own_tokens


def decode_cost(node: NodeRecord, own: int, pages: int) -> float:
    """own: sequences of this router there, pages: what the new one needs. A node that does not say how many it has is
    taken to have enough."""
    if not node.total_pages:
        return load(node, own)
    short = node.free_pages < pages
    return load(node, own) + PAGES_WEIGHT * pages / max(node.free_pages, 1) + (NO_ROOM if short else 0.0)
