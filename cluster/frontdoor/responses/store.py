"""Answers that are kept for those who ask by id, in this process's memory.

Bounded by number and bytes. When it is full, the tenant that takes the largest part of it loses what it has not asked
for in the longest time, so that nobody drives out the answers of others. Who does not name the tenant of an answer
finds nothing under its id.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from cluster.contract.generation import ChatMessage
from cluster.frontdoor.http_errors import dumps

MAX_ANSWERS = 1024
MAX_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Kept:
    """An answer that is over."""

    body: dict[str, Any]  # as it is told
    input: tuple[dict[str, Any], ...]  # the items of its input, each with an id
    turns: tuple[ChatMessage, ...]  # the conversation, the answer's own turn last; without the instructions

    def size(self) -> int:
        """Bytes that it counts for: those of its texts, about."""
        turns = sum(
            len(turn.content) + len(turn.reasoning) + sum(len(call.arguments) for call in turn.tool_calls)
            for turn in self.turns
        )
        return len(dumps(self.body)) + sum(len(dumps(item)) for item in self.input) + turns


class Store:
    """Answers by tenant and id, the one asked for last at the end."""

    def __init__(self, max_answers: int = MAX_ANSWERS, max_bytes: int = MAX_BYTES) -> None:
        self._max_answers, self._max_bytes = max_answers, max_bytes
        self._tenants: dict[str, OrderedDict[str, tuple[Kept, int]]] = {}
        self._bytes: dict[str, int] = {}

    def keep(self, tenant: str, response_id: str, kept: Kept) -> None:
        """Keep an answer, and let others go where it needs their room. One too large for the store is not kept."""
        size = kept.size()
        self.drop(tenant, response_id)
        if size > self._max_bytes:
            return
        self._tenants.setdefault(tenant, OrderedDict())[response_id] = (kept, size)
        self._bytes[tenant] = self._bytes.get(tenant, 0) + size
        while self._share_of_all() > 1:
            largest = max(self._tenants, key=lambda name: self._share(len(self._tenants[name]), self._bytes[name]))
            self.drop(largest, next(iter(self._tenants[largest])))

    def find(self, tenant: str, response_id: str) -> Kept | None:
        """The answer, if it is kept for this tenant."""
        answers = self._tenants.get(tenant, OrderedDict())
        if response_id not in answers:
            return None
        answers.move_to_end(response_id)
        return answers[response_id][0]

    def drop(self, tenant: str, response_id: str) -> bool:
        """Keep an answer no more. False: there was none."""
        answers = self._tenants.get(tenant, OrderedDict())
        if response_id not in answers:
            return False
        self._bytes[tenant] -= answers.pop(response_id)[1]
        if not answers:
            del self._tenants[tenant], self._bytes[tenant]
        return True

    def _share_of_all(self) -> float:
        return self._share(sum(map(len, self._tenants.values())), sum(self._bytes.values()))

    def _share(self, answers: int, size: int) -> float:
        """Part of the store: of its places or of its bytes, whichever is more."""
        return max(answers / self._max_answers, size / self._max_bytes)
