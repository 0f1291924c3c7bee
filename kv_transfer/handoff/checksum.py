"""An opt-in CRC-32 over the bytes that follow a control message (``--handoff-checksum``).

The sender takes it when the bytes are staged, and the receiver checks it before it uses any of them: it hunts what
changes them in between (a network card, a switch, memory, a transport of ours). It is no signature.
"""

from __future__ import annotations

from torch import Tensor

from kv_transfer.handoff.block import described
from kv_transfer.transports.crc import crc32
from paceline.v1.handoff_pb2 import HandoffMessage


def checksum_problem(message: HandoffMessage, data: Tensor) -> str | None:
    """Why ``data`` is not what a Chunk or State announced, or None. One that brings no checksum is refused."""
    body = message.state if message.WhichOneof("body") == "state" else message.chunk
    if not body.HasField("checksum"):
        return f"{_named(message)} came without a checksum, which handoff_checksum of this node asks for"
    if (found := crc32(data)) != body.checksum:
        return f"checksum of {_named(message)}: {body.checksum:08x} was sent, {found:08x} arrived"
    return None


def _named(message: HandoffMessage) -> str:
    what = described(message)
    if "byte_class" not in what:
        return "the hidden rows of State"
    chunk = message.chunk
    layers = f"layers {chunk.first_layer}..{chunk.first_layer + chunk.num_layers - 1}, " if chunk.num_layers else ""
    return f"{what['byte_class']} rows, {layers}tokens {chunk.first_token}..{chunk.first_token + chunk.num_tokens - 1}"
