"""The unit of a hand-off: rows of one class, of some layers, of some tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from paceline.v1 import handoff_pb2

if TYPE_CHECKING:
    ByteClass: TypeAlias = handoff_pb2.ByteClass.ValueType
else:
    ByteClass = int  # the type of an enum's values exists in the stubs only

TARGET_KV = handoff_pb2.BYTE_CLASS_TARGET_KV
DRAFT_KV = handoff_pb2.BYTE_CLASS_DRAFT_KV
HIDDEN = handoff_pb2.BYTE_CLASS_HIDDEN
META = handoff_pb2.BYTE_CLASS_META
NO_LAYERS = range(0)


@dataclass(frozen=True)
class RowBlock:
    """The rows of ``tokens`` in each of ``layers``, in canonical order (layer, token, head). HIDDEN rows belong to no
    layer: their ``layers`` is `NO_LAYERS`."""

    byte_class: ByteClass
    layers: range
    tokens: range

    @classmethod
    def of(cls, chunk: handoff_pb2.Chunk) -> RowBlock:
        """What a descriptor announces; nothing of it is checked here."""
        layers = range(chunk.first_layer, chunk.first_layer + chunk.num_layers)
        return cls(chunk.byte_class, layers, range(chunk.first_token, chunk.first_token + chunk.num_tokens))

    def to_proto(self, num_bytes: int, checksum: int | None = None) -> handoff_pb2.Chunk:
        """The descriptor that announces these rows, ``num_bytes`` in all."""
        return handoff_pb2.Chunk(
            byte_class=self.byte_class,
            first_layer=self.layers.start,
            num_layers=len(self.layers),
            first_token=self.tokens.start,
            num_tokens=len(self.tokens),
            num_bytes=num_bytes,
            checksum=checksum,
        )

    def part(self, places: range) -> RowBlock:
        """The rows of ``tokens[places.start]`` to ``tokens[places.stop - 1]``."""
        return replace(self, tokens=self.tokens[places.start : places.stop])


def described(message: handoff_pb2.HandoffMessage) -> dict[str, str | float]:
    """What a trace says of a control message: byte class, layers, tokens, and the bytes that follow it."""
    if message.WhichOneof("body") == "state":
        return {"num_bytes": message.state.num_bytes}
    if message.WhichOneof("body") != "chunk":
        return {}
    chunk = message.chunk
    byte_class = handoff_pb2.ByteClass.Name(chunk.byte_class).removeprefix("BYTE_CLASS_").lower()
    return {
        "byte_class": byte_class,
        "first_layer": chunk.first_layer,
        "num_layers": chunk.num_layers,
        "first_token": chunk.first_token,
        "num_tokens": chunk.num_tokens,
        "num_bytes": chunk.num_bytes,
    }
