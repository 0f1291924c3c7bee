"""Into what messages the rows of a chunk are cut. Pure: both ends derive it from the chunk's descriptor alone."""

from __future__ import annotations

from itertools import pairwise

from kv_transfer.transports.base import MESSAGE_BYTES
from paceline.v1.handoff_pb2 import HandoffMessage


def token_pieces(num_tokens: int, token_bytes: int, max_bytes: int | None = None) -> tuple[range, ...]:
    """Cut tokens 0..num_tokens-1 into the fewest pieces of at most ``max_bytes`` (None: a message's), of about equal
    size; a token is never cut."""
    fit = max(1, (max_bytes or MESSAGE_BYTES) // token_bytes)
    count = max(1, -(-num_tokens // fit))
    bounds = [num_tokens * i // count for i in range(count + 1)]
    return tuple(range(start, stop) for start, stop in pairwise(bounds) if start < stop)


def message_tokens(num_tokens: int, num_bytes: int) -> tuple[range, ...]:
    """The tokens of a chunk that each of its messages brings: as many as fit, and the last what is left, since nothing
    hides its scattering. A chunk that no sender of ours would announce (no token, no byte, or bytes that are no
    multiple of the tokens) is one message."""
    if num_tokens == 0 or num_bytes == 0 or num_bytes % num_tokens:
        return (range(num_tokens),)
    fit = max(1, MESSAGE_BYTES * num_tokens // num_bytes)
    return tuple(range(start, min(start + fit, num_tokens)) for start in range(0, num_tokens, fit))


def message_sizes(message: HandoffMessage) -> tuple[int, ...]:
    """Bytes of each message that follows a descriptor; none when it announces none."""
    chunk, state = message.chunk, message.state
    if not chunk.num_bytes:
        return (state.num_bytes,) if state.num_bytes else ()
    pieces = message_tokens(chunk.num_tokens, chunk.num_bytes)
    if len(pieces) == 1:
        return (chunk.num_bytes,)
    token_bytes = chunk.num_bytes // chunk.num_tokens
    return tuple(len(piece) * token_bytes for piece in pieces)
