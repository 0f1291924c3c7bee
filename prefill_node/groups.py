"""Which layers of a prompt chunk leave together. Pure.

A group leaves as soon as its last layer is computed. Small messages cost line rate, large ones keep the end of the
prompt waiting: the last group of a chunk, the only one that nothing is left to compute behind, is as small as a message
may be, those before it as large.
"""

from __future__ import annotations

from collections.abc import Sequence

from kv_transfer.transports.base import MESSAGE_BYTES

MIN_BYTES = 256 * 1024  # of a message, but for prompts and remainders that have no more


def layer_groups(layer_bytes: Sequence[int], first_layer: int = 0, multiple: int = 1) -> tuple[range, ...]:
    """Cut layers ``first_layer``, ... into groups, in order. ``layer_bytes``: what the rows of a chunk take
    in each of them; multiple: the link's, see `Transport`."""
    groups: list[range] = []
    stop = len(layer_bytes)
    while stop > 0:
        start = stop - 1
        size = layer_bytes[start]
        limit = MESSAGE_BYTES * multiple if groups else MIN_BYTES
        while start > 0 and (size < MIN_BYTES or size + layer_bytes[start - 1] <= limit):
            start -= 1
            size += layer_bytes[start]
        if sum(layer_bytes[:start]) < MIN_BYTES:
            start = 0  # too little to leave by itself
        groups.append(range(first_layer + start, first_layer + stop))
        stop = start
    return tuple(reversed(groups))
