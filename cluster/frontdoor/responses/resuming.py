"""Streams of the Responses API that a client can go on with at any router.

Its client holds more than text: the ids of the answer and of its items, and the numbers of events. All of them follow
from an `Origin` and the request, so an event's id tells the origin and its own number beside the `Position`.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cluster.frontdoor.resuming import HEADER, Position
from paceline.errors import InvalidRequest

_ID = re.compile(r"(?P<position>.{1,300})\.(?P<nonce>[0-9a-f]{32})\.(?P<created_at>\d{1,11})\.(?P<number>\d{1,9})")


@dataclass(frozen=True)
class Origin:
    """What the first router drew. created_at: Unix time in seconds."""

    nonce: str
    created_at: int

    @classmethod
    def new(cls) -> Origin:
        """The origin of an answer that begins now; nobody guesses its 122 random bits."""
        return cls(uuid.uuid4().hex, int(time.time()))

    def answer_id(self, tenant: str, body: Mapping[str, Any]) -> str:
        """The answer's id. It is a hash of the request too, so whoever makes an event's id up does not choose the id
        of an answer that is kept already."""
        said = json.dumps([self.nonce, self.created_at, tenant, body], sort_keys=True, separators=(",", ":"))
        return f"resp_{hashlib.sha256(said.encode('ascii')).hexdigest()[:32]}"


@dataclass(frozen=True)
class Place:
    """A place in a stream: after the event ``number``."""

    position: Position
    origin: Origin
    number: int

    @classmethod
    def read(cls, event_id: str) -> Place:
        """Raises InvalidRequest for an id that no stream of the API has."""
        found = _ID.fullmatch(event_id)
        if found is None:
            raise InvalidRequest(HEADER, "must be the id of an event of a stream of /v1/responses")
        origin = Origin(found["nonce"], int(found["created_at"]))
        return cls(Position.read(found["position"]), origin, int(found["number"]))

    def __str__(self) -> str:
        return f"{self.position}.{self.origin.nonce}.{self.origin.created_at}.{self.number}"
