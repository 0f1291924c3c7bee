"""Fields of a request that this build does not know, because a newer one made it.

protobuf leaves them out without a word, and the answer would be of another request than the one that was sent. So a
request that has one is refused, with the field's number. A field that may be left out has a number from IGNORABLE on.
Answers are not looked at: whoever reads one takes what it knows.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from typing import Any, TypeVar

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from paceline.errors import InvalidRequest

IGNORABLE = 1000
MAX_SEARCHED = 4096  # messages and fields: the search is done in Python

M = TypeVar("M", bound=Message)


def read_known(message_type: type[M], data: bytes) -> M:
    """``data`` as a message, without the fields that may be left out.

    Raises DecodeError for what is no such message, InvalidRequest for one with a field that must be known.
    """
    message = message_type.FromString(data)
    message.DiscardUnknownFields()
    known = message.ByteSize()
    if known == len(data):
        return message
    whole = message_type.FromString(data)
    if whole.ByteSize() != known and (field := _first_unknown(whole)):
        build = f"Paceline {version('paceline')}"
        text = f"is not known to this build, {build}, or has another type here: newer builds may know it"
        raise InvalidRequest(field, text)
    return message


def _first_unknown(message: Message) -> str:
    """The path of the first field that must be known; empty where there is none. ``request`` where there are too many
    to look at."""
    left = iter(range(MAX_SEARCHED))
    for path, part in _parts("", message):
        fields: Any = UnknownFieldSet(part)
        for field in fields:
            if field.field_number < IGNORABLE:
                return f"{path}field {field.field_number}"
            if next(left, None) is None:
                return "request"
        if next(left, None) is None:
            return "request"
    return ""


def _parts(path: str, message: Message) -> Iterator[tuple[str, Message]]:
    """The message and all that lie in it, with the paths of their fields."""
    yield path, message
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        if field.message_type.GetOptions().map_entry:
            inner = [one for one in value.values() if isinstance(one, Message)]
        else:
            inner = [value] if isinstance(value, Message) else list(value)
        for one in inner:
            yield from _parts(f"{path}{field.name}.", one)
