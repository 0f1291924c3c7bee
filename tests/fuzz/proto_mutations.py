"""Serialized messages made wrong: pure functions of a random generator and valid bytes.

Two kinds. On the wire: bytes and fields are flipped, cut, repeated, given another type or an impossible length,
whatever they mean. By the descriptor: a field gets an extreme value of its own type, so that most such messages are
parsed and reach what stands behind.
"""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Callable, Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

VARINT, FIXED64, LEN, START_GROUP, END_GROUP, FIXED32 = range(6)
DEEPEST = 4  # fields within fields
MOST_BYTES = 1 << 20
Field = tuple[int, int, bytes]  # number, wire type, payload without length
Mutation = Callable[[random.Random, bytes], bytes]

INTEGERS = (0, 1, 2, 3, 7, -1, 127, 128, 255, 2**16, 2**31 - 1, -(2**31), 2**32 - 1, 2**63 - 1, -(2**63), 2**64 - 1)
NUMBERS = (0.0, -0.0, 1.0, -1.0, 0.5, 2.0, 1e-9, 1e-45, 5e-324, 1e-300, 1e300, 1.7e308, math.inf, -math.inf, math.nan)
TEXTS = (
    "",
    "a",
    "\0",
    "\ufeff",
    "\u2028",
    "\U0010ffff",
    "é" * 300,
    "x" * 70_000,
    "{{ 7 * 7 }}",
    "<s></s>",
    "\r\n\t",
    "%s%n",
)
BAD_UTF8 = (b"\xff", b"\xc3", b"\xed\xa0\x80", b"ok\x80", b"\xf4\x90\x80\x80")


def varint(value: int) -> bytes:
    """As protobuf writes it; negative numbers as 64 bits."""
    value &= 2**64 - 1
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def read_fields(data: bytes) -> list[Field] | None:
    """The fields of ``data``; None when it is no message."""
    fields, at = [], 0
    while at < len(data):
        key, at = _read_varint(data, at)
        number, kind = key >> 3, key & 7
        if at < 0 or not number or kind not in (VARINT, FIXED64, LEN, FIXED32):
            return None
        start = at
        if kind == VARINT:
            _, at = _read_varint(data, at)
        elif kind == LEN:
            size, start = _read_varint(data, at)
            at = start + size if start >= 0 else -1
        else:
            at += 8 if kind == FIXED64 else 4
        if at < 0 or at > len(data):
            return None
        fields.append((number, kind, data[start:at]))
    return fields


def write_fields(fields: Sequence[Field]) -> bytes:
    """The message of these fields."""
    out = bytearray()
    for number, kind, payload in fields:
        out += varint(number << 3 | kind) + (varint(len(payload)) if kind == LEN else b"") + payload
    return bytes(out)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 70:
        byte = data[at]
        value |= (byte & 127) << shift
        at += 1
        if byte < 128:
            return value, at
        shift += 7
    return 0, -1


# -- bytes -----------------------------------------------------------------------------------------------------------


def flip(rng: random.Random, data: bytes) -> bytes:
    out = bytearray(data or b"\0")
    for _ in range(rng.randint(1, 8)):
        out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    return bytes(out)


def insert(rng: random.Random, data: bytes) -> bytes:
    at = rng.randint(0, len(data))
    return data[:at] + rng.randbytes(rng.randint(1, 16)) + data[at:]


def delete(rng: random.Random, data: bytes) -> bytes:
    at = rng.randint(0, len(data))
    return data[:at] + data[at + rng.randint(1, 16) :]


def truncate(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randrange(len(data))] if data else b"\x0a"


def noise(rng: random.Random, data: bytes) -> bytes:
    return rng.randbytes(rng.choice((1, 2, 5, 20, 300, 5000)))


# -- fields ----------------------------------------------------------------------------------------------------------


def _on_fields(change: Callable[[random.Random, list[Field]], list[Field]]) -> Mutation:
    """``change`` applied to the fields of a message, or of one somewhere within it."""

    def mutate(rng: random.Random, data: bytes) -> bytes:
        fields = read_fields(data)
        if not fields:
            return insert(rng, data)
        inner = [i for i, (_, kind, payload) in enumerate(fields) if kind == LEN and payload and read_fields(payload)]
        if inner and rng.random() < 0.6:
            i = rng.choice(inner)
            fields[i] = (*fields[i][:2], mutate(rng, fields[i][2]))
            return write_fields(fields)
        return write_fields(change(rng, fields))

    return mutate


def _one(change: Callable[[random.Random, Field], Field]) -> Mutation:
    def on(rng: random.Random, fields: list[Field]) -> list[Field]:
        i = rng.randrange(len(fields))
        return [*fields[:i], change(rng, fields[i]), *fields[i + 1 :]]

    return _on_fields(on)


def _payload(rng: random.Random, kind: int) -> bytes:
    if kind == VARINT:
        return varint(rng.choice(INTEGERS))
    if kind == FIXED32:
        return rng.randbytes(4)
    if kind == FIXED64:
        return struct.pack("<d", rng.choice(NUMBERS))
    return rng.choice((*BAD_UTF8, b"", rng.randbytes(rng.randint(1, 40)), b"x" * 5000))


def _many(rng: random.Random, fields: list[Field]) -> list[Field]:
    """A field, thousands of times."""
    one = rng.choice(fields)
    times = min(rng.choice((2, 17, 1025, 100_000)), MOST_BYTES // (len(one[2]) + 3))
    return [*fields, *[one] * times]


def _packed(rng: random.Random, fields: list[Field]) -> list[Field]:
    """Many numbers where one value, or a few, stood."""
    value = varint(rng.choice(INTEGERS))
    times = min(rng.choice((100, 5000, 300_000)), MOST_BYTES // len(value))
    return [*fields, (rng.choice(fields)[0], LEN, value * times)]


def _unknown(rng: random.Random, fields: list[Field]) -> list[Field]:
    kind = rng.choice((VARINT, FIXED64, LEN, FIXED32))
    return [*fields, (rng.choice((19, 99, 18_999, 2**29 - 1)), kind, _payload(rng, kind))]


def _nested(rng: random.Random, fields: list[Field]) -> list[Field]:
    """A message in itself, deeper than parsers like."""
    number, payload = rng.choice(fields)[0], b""
    for _ in range(rng.choice((3, 90, 500))):
        payload = write_fields([(number, LEN, payload)])
    return [*fields, (number, LEN, payload)]


def overlong(rng: random.Random, data: bytes) -> bytes:
    """A varint of more bytes than there are."""
    return (
        data
        + varint(rng.randint(1, 12) << 3)
        + b"\xff" * rng.choice((9, 10, 11, 40))
        + rng.choice((b"\1", b"\x7f", b""))
    )


def length_beyond(rng: random.Random, data: bytes) -> bytes:
    """A length that says more than follows."""
    return (
        data
        + varint(rng.randint(1, 12) << 3 | LEN)
        + varint(rng.choice((1, 2**31, 2**63, 2**64 - 1)))
        + b"x" * rng.randint(0, 3)
    )


def groups(rng: random.Random, data: bytes) -> bytes:
    """Groups that nobody closes, or that nobody opened."""
    number = rng.randint(1, 12)
    opened, closed = varint(number << 3 | START_GROUP), varint(number << 3 | END_GROUP)
    depth = rng.choice((1, 50, 5000))
    return data + rng.choice((opened * depth, closed, opened * depth + closed * depth))


WIRE: dict[str, Mutation] = {
    "flip": flip,
    "insert": insert,
    "delete": delete,
    "truncate": truncate,
    "noise": noise,
    "field dropped": _on_fields(lambda rng, fields: rng.sample(fields, len(fields) - 1)),
    "field repeated": _on_fields(_many),
    "numbers packed": _on_fields(_packed),
    "field unknown": _on_fields(_unknown),
    "message in itself": _on_fields(_nested),
    "field renumbered": _one(lambda rng, one: (rng.randint(1, 20), one[1], one[2])),
    "wire type changed": _one(lambda rng, one: (one[0], kind := rng.choice((0, 1, 2, 5)), _payload(rng, kind))),
    "value changed": _one(lambda rng, one: (one[0], one[1], _payload(rng, one[1]))),
    "overlong varint": overlong,
    "length beyond the end": length_beyond,
    "groups": groups,
}

# -- by the descriptor -----------------------------------------------------------------------------------------------

_INTEGER_RANGES = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_ENUM: (-(2**31), 2**31 - 1),
}


def extreme(rng: random.Random, message: Message, fields: int) -> None:
    """Give ``fields`` fields of the message, or of those within it, extreme values of their own types."""
    for _ in range(fields):
        _set_one(rng, message, 0)


def _set_one(rng: random.Random, message: Any, depth: int) -> None:
    field = rng.choice(message.DESCRIPTOR.fields)
    value = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        _set_map(rng, field, value)
    elif field.is_repeated:
        _set_repeated(rng, field, value, depth)
    elif field.message_type is not None:
        value.SetInParent()
        for _ in range(rng.randint(0, 3)):
            if field.message_type.fields and depth < DEEPEST:
                _set_one(rng, value, depth + 1)
    elif rng.random() < 0.1:
        message.ClearField(field.name)
    else:
        setattr(message, field.name, _scalar(rng, field))


def _set_map(rng: random.Random, field: FieldDescriptor, value: Any) -> None:
    assert field.message_type is not None
    key, item = (field.message_type.fields_by_name[name] for name in ("key", "value"))
    for _ in range(rng.choice((1, 3, 30, 1100))):
        chosen = rng.randint(-2, 300) if key.cpp_type == FieldDescriptor.CPPTYPE_INT32 else _scalar(rng, key)
        value[chosen] = rng.uniform(-120, 120) if rng.random() < 0.8 else _scalar(rng, item)


def _set_repeated(rng: random.Random, field: FieldDescriptor, value: Any, depth: int) -> None:
    if rng.random() < 0.1:
        del value[:]
    count = rng.choice((1, 1, 2, 20, 1030))
    if field.message_type is None:
        value.extend(
            [rng.randrange(258) for _ in range(count)]
            if rng.random() < 0.5 and _is_integer(field)
            else [_scalar(rng, field) for _ in range(min(count, 40))]
        )
        return
    for _ in range(min(count, 20)):
        item = value.add()
        if depth < DEEPEST:
            _set_one(rng, item, depth + 1)


def _is_integer(field: FieldDescriptor) -> bool:
    return field.cpp_type in _INTEGER_RANGES


def _scalar(rng: random.Random, field: FieldDescriptor) -> Any:
    if _is_integer(field):
        low, high = _INTEGER_RANGES[field.cpp_type]
        return min(max(rng.choice((*INTEGERS, low, high, rng.randint(0, 300))), low), high)
    if field.cpp_type in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return rng.choice((*NUMBERS, rng.uniform(-3, 3)))
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return rng.random() < 0.5
    text = rng.choice((*TEXTS, "".join(chr(rng.randint(1, 0x2000)) for _ in range(rng.randint(1, 30)))))
    return text.encode() if field.type == FieldDescriptor.TYPE_BYTES else text
