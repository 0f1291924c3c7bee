"""How rows are cut for the wire: all of it, for both ends. Pure.

A block of rows is cut twice. The sender cuts it into *chunks*, each announced by one descriptor (`chunks`). A chunk is
cut into *messages*, the units that the transport moves and that staging buffers hold (`messages`); nothing on the wire
tells this second cut, since both ends derive it from the descriptor.
"""

from __future__ import annotations

from itertools import pairwise

from kv_transfer.handoff.block import RowBlock
from kv_transfer.transports.base import CHUNK_BYTES, MESSAGE_BYTES
from paceline.v1.handoff_pb2 import HandoffMessage

MAX_CONTROL_BYTES = 64 * 1024  # of one control message: bounds every text and list in it


def chunks(block: RowBlock, token_bytes: int, *, one_message: bool = False, multiple: int = 1) -> tuple[RowBlock, ...]:
    """The fewest blocks of at most ``CHUNK_BYTES`` (``one_message``: of one message each), of about equal size. A token
    of ``token_bytes`` is never cut, however large it is. No tokens give no chunk. multiple: the link's."""
    message, num_tokens = MESSAGE_BYTES * multiple, len(block.tokens)
    most = message if one_message else max(CHUNK_BYTES, message)
    fit = max(1, most // token_bytes)
    count = max(1, -(-num_tokens // fit))
    bounds = [num_tokens * i // count for i in range(count + 1)]
    return tuple(block.part(range(start, stop)) for start, stop in pairwise(bounds) if start < stop)


def messages(block: RowBlock, num_bytes: int, multiple: int = 1) -> tuple[tuple[RowBlock, int], ...]:
    """The rows and bytes of each message of a chunk of ``num_bytes``: as many tokens as fit, and in the last one what
    is left, since nothing hides its scattering. A chunk that no sender of ours would announce (no token, no byte, or
    bytes that are no multiple of the tokens) is one message. multiple: the link's."""
    num_tokens = len(block.tokens)
    if num_tokens == 0 or num_bytes == 0 or num_bytes % num_tokens:
        return ((block, num_bytes),)
    token_bytes = num_bytes // num_tokens
    fit = max(1, MESSAGE_BYTES * multiple // token_bytes)
    parts = (block.part(range(start, min(start + fit, num_tokens))) for start in range(0, num_tokens, fit))
    return tuple((part, len(part.tokens) * token_bytes) for part in parts)


def message_sizes(message: HandoffMessage, multiple: int = 1) -> tuple[int, ...]:
    """Bytes of each message that follows a control message on the wire; none when it announces none. multiple: the
    link's."""
    if message.state.num_bytes:
        return (message.state.num_bytes,)
    parts = messages(RowBlock.of(message.chunk), message.chunk.num_bytes, multiple)
    return tuple(size for _, size in parts if size)


def message_rows(message: HandoffMessage) -> tuple[tuple[range, int, int], ...]:
    """Layers, tokens and bytes of each message of a chunk; hidden rows have no layers. None of other messages."""
    if message.WhichOneof("body") != "chunk":
        return ()
    parts = messages(RowBlock.of(message.chunk), message.chunk.num_bytes)
    return tuple((part.layers, len(part.tokens), size) for part, size in parts)


def announcement_problem(message: HandoffMessage, max_bytes: int) -> str | None:
    """Why no sender of ours can have written this message, whatever its ticket, or None. Looked at before anything is
    derived from the message: its numbers say how much the receiver cuts, allocates and waits for.

    max_bytes: that one message may announce.
    """
    size = message.ByteSize()
    if size > MAX_CONTROL_BYTES:
        return f"a control message of {size} bytes; at most {MAX_CONTROL_BYTES} are taken"
    announced = max(message.chunk.num_bytes, message.state.num_bytes)
    if announced > max_bytes:
        return f"{announced} bytes announced at once; at most {max_bytes} are taken"
    if (num_tokens := message.chunk.num_tokens) > max_bytes:  # a token has a byte
        return f"{num_tokens} tokens announced in {message.chunk.num_bytes} bytes"
    return None
