"""How many fields a message in bytes has, counted before it is parsed: a few bytes of a stranger's message become an
object of a hundred, and the interpreter stands still meanwhile."""

from __future__ import annotations

from functools import lru_cache

from google.protobuf.descriptor import Descriptor

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_WIDTHS = {_FIXED64: 8, _FIXED32: 4}
MAX_DEPTH = 32


class _NoMessage(Exception):
    """The bytes end in the midst of a field."""


def too_many_fields(descriptor: Descriptor, data: bytes, most: int) -> bool:
    """Whether ``data``, of the message ``descriptor``, has more than ``most`` fields, with those within its messages.
    False for bytes that are no message: parsing them says so."""
    try:
        return _count(descriptor, data, 0, len(data), most, 0) < 0
    except _NoMessage:
        return False


def _count(descriptor: Descriptor, data: bytes, at: int, end: int, left: int, depth: int) -> int:
    """Fields that are left after those from ``at`` to ``end``; below 0: too many."""
    inner = _messages(descriptor)
    while at < end:
        left -= 1
        if left < 0:
            return left
        tag, at = (data[at], at + 1) if data[at] < 128 else _varint(data, at, end)
        kind = tag & 7
        if kind == _LENGTH:
            size, at = (data[at], at + 1) if at < end and data[at] < 128 else _varint(data, at, end)
            if at + size > end:
                raise _NoMessage
            message = inner.get(tag >> 3)
            if message is not None and size and depth < MAX_DEPTH:
                left = _count(message, data, at, at + size, left, depth + 1)
                if left < 0:
                    return left
            at += size
        elif kind == _VARINT:
            _, at = _varint(data, at, end)
        elif kind in _WIDTHS:
            at += _WIDTHS[kind]
        else:  # groups, which no message of ours has
            raise _NoMessage
    return left


@lru_cache(maxsize=256)  # messages of our own: there are fewer
def _messages(descriptor: Descriptor) -> dict[int, Descriptor]:
    """The fields, by their numbers, that are messages."""
    return {number: field.message_type for number, field in descriptor.fields_by_number.items() if field.message_type}


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """The number at ``at``, and where the next byte after it is."""
    value = shift = 0
    while at < end and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    raise _NoMessage
