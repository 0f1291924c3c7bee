"""Requests that kill decode nodes: known by the nodes that died under them and under no other request in common.

A death counts when the connection is gone, the next generation of the node has come, the node was not draining, and
the attempt had brought few tokens: a request that kills does so where it stands. A cut cable, a host that is away and a
node that an operator stops are no deaths. Where decode nodes die without the request too, it needs more deaths to be
the reason. Routers tell each other of deaths under a request that comes back under the
same id, with what else was in progress there at any of them, and of prompts that they refuse
(`cluster/state/evidence.py`); each looks itself whether a node died.
"""

from __future__ import annotations

import hashlib
import logging
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from pydantic import TypeAdapter, ValidationError

from cluster.routing.breaker import Key, key_of
from cluster.state.registry_types import NodeRecord
from paceline.errors import InvalidRequest

log = logging.getLogger(__name__)

DEATHS = 3  # after which a request is refused
MORE_DEATHS, MOST_DEATHS = 3, 9  # for each that came without it meanwhile, up to so many: two requests may both kill
FEW_TOKENS = 16  # of an attempt that counts
EXPLAIN_S = 10.0  # longest wait for what became of a node, before the request is given to one more
FORGET_S = 600.0
MAX_PROMPTS, MAX_NODES = 1024, 256  # that are remembered
MAX_HEARD = 8  # deaths under one request, of other routers

Asked = str  # digest of a request: its id, which clients choose and may repeat, its prompt, and whose cache it may use
ASKED_CHARS = 24


@dataclass(frozen=True)
class Death:
    """A decode node that was lost under a request."""

    node: Key
    at: float
    requests: set[Asked]  # that were in progress there; of all attempts that failed, behind other routers too
    generations: Mapping[str, int]  # of all decode nodes then


@dataclass(frozen=True)
class Note:
    """What routers tell each other of a prompt: a death under a request, or, with ``said``, that it is refused."""

    prompt: str
    said: str = ""
    asked: Asked = ""
    node: Key = ("", 0)
    requests: tuple[Asked, ...] = ()


_NOTE = TypeAdapter(Note)


@dataclass
class Suspicion:
    """What is held against one choice of a request."""

    request_id: str
    asked: Asked
    prompt: str  # digest of what is asked, and in whose cache
    deaths: list[Death] = field(default_factory=list)


class Quarantine:
    """Who is suspected, and what is refused."""

    def __init__(self, nodes: Callable[[], list[NodeRecord]], clock: Callable[[], float] = time.monotonic) -> None:
        """nodes: the registry's view. clock: seconds, monotonic."""
        self._nodes, self._clock = nodes, clock
        self.tell: Callable[[bytes], None] = lambda note: None  # other routers
        self._heard: OrderedDict[Asked, list[Death]] = OrderedDict()
        self._running: dict[Key, list[Asked]] = {}
        self._seen: dict[str, int] = {}  # latest generation by node
        self._lost: OrderedDict[Key, set[Asked]] = OrderedDict()
        self._refused: OrderedDict[str, tuple[float, str]] = OrderedDict()  # by prompt: when, and what is said

    @staticmethod
    def suspicion(request_id: str, token_ids: Sequence[int], salt: str) -> Suspicion:
        """Nothing yet. token_ids: of the prompt. salt: whose cache it may use."""
        prompt = hashlib.sha256(salt.encode() + b"\0" + array("q", token_ids).tobytes()).hexdigest()
        asked = hashlib.sha256(f"{prompt} {request_id}".encode()).hexdigest()[:ASKED_CHARS]
        return Suspicion(request_id, asked, prompt)

    @contextmanager
    def running(self, node: NodeRecord, suspicion: Suspicion) -> Iterator[None]:
        """Around an attempt on a decode node."""
        asked = suspicion.asked
        there = self._running.setdefault(key_of(node), [])
        there.append(asked)
        try:
            yield
        finally:
            there.remove(asked)
            if not there:
                self._running.pop(key_of(node), None)

    def lost(self, node: NodeRecord, suspicion: Suspicion, num_tokens: int) -> None:
        """The connection to a decode node is gone. num_tokens: what the attempt had brought."""
        key = key_of(node)
        self._seen[node.id] = max(node.generation, self._seen.get(node.id, 0))
        together = self._together(key, [suspicion.asked, *self._running.get(key, ())])
        seen = next((record for record in self._nodes() if key_of(record) == key), node)
        if num_tokens < FEW_TOKENS and seen.state != "draining":
            before = [death for death in suspicion.deaths if death.node != key]  # a process dies once
            suspicion.deaths = [*before, Death(key, self._clock(), together, self._generations())]
            self._tell(Note(suspicion.prompt, asked=suspicion.asked, node=key, requests=tuple(together)))

    def _together(self, node: Key, requests: Iterable[Asked]) -> set[Asked]:
        """What was in progress on a node that was lost, as far as it is known by now; ``requests`` too."""
        together = self._lost.setdefault(node, set())
        together.update(requests)
        while len(self._lost) > MAX_NODES:
            self._lost.popitem(last=False)
        return together

    def _tell(self, note: Note) -> None:
        self.tell(_NOTE.dump_json(note))

    def hear(self, told: bytes) -> None:
        """Take what a router of the deployment told."""
        try:
            note = _NOTE.validate_json(told)
        except ValidationError as error:  # of another version
            log.warning("another router's note is not understood: %s", error)
            return
        if note.said:
            self._refuse(note.prompt, note.said)
            return
        together = self._together(note.node, note.requests)
        deaths = self._heard.setdefault(note.asked, [])
        if all(death.node != note.node for death in deaths) and len(deaths) < MAX_HEARD:
            deaths.append(Death(note.node, self._clock(), together, self._generations()))
        while len(self._heard) > MAX_PROMPTS:
            self._heard.popitem(last=False)

    def _deaths(self, suspicion: Suspicion) -> list[Death]:
        """Those under a request here, and those under it behind other routers."""
        own, now = {death.node for death in suspicion.deaths}, self._clock()
        heard = self._heard.get(suspicion.asked, ())
        return [*suspicion.deaths, *(one for one in heard if one.node not in own and now - one.at <= FORGET_S)]

    def unexplained(self, suspicion: Suspicion) -> bool:
        """Whether another node is to wait: one more death would be proof, and it is not known yet whether the latest
        loss was one."""
        deaths = self._deaths(suspicion)
        if len(deaths) < DEATHS:
            return False
        last = max(deaths, key=lambda death: death.at)
        there = any(key_of(record) == last.node for record in self._nodes())
        return not there and not self._died(last) and self._clock() - last.at < EXPLAIN_S

    def check(self, suspicion: Suspicion) -> None:
        """Raise InvalidRequest for a request that has been shown to kill nodes, also under another id."""
        now = self._clock()
        while self._refused and now - next(iter(self._refused.values()))[0] > FORGET_S:
            self._refused.popitem(last=False)
        if suspicion.prompt not in self._refused:
            deaths = [death for death in self._deaths(suspicion) if self._died(death)]
            if len(deaths) < self._enough(deaths) or set.intersection(*(death.requests for death in deaths)) != {
                suspicion.asked
            }:
                return
            nodes = ", ".join(f"{node_id} generation {generation}" for node_id, generation in (d.node for d in deaths))
            said = f"{suspicion.request_id!r} is quarantined: it was the one request in progress when {nodes} died"
            log.error("%s; its prompt is refused for %g s", said, FORGET_S)
            self._refuse(suspicion.prompt, said)
            self._tell(Note(suspicion.prompt, said))
        raise InvalidRequest("request", self._refused[suspicion.prompt][1], "quarantined")

    def _enough(self, deaths: Sequence[Death]) -> int:
        """How many deaths are proof, of those under a request."""
        if not deaths:
            return DEATHS
        first, now = min(deaths, key=lambda death: death.at), self._generations()
        since = sum(max(0, now.get(node, then) - then) for node, then in first.generations.items())
        return min(DEATHS + MORE_DEATHS * max(0, since - len(deaths)), MOST_DEATHS)

    def _generations(self) -> dict[str, int]:
        """By node; decode nodes that are away now are among them."""
        found = {record.id: record.generation for record in self._nodes() if record.role == "decode"}
        self._seen = dict(list((self._seen | found).items())[-MAX_NODES:])
        return self._seen

    def _refuse(self, prompt: str, said: str) -> None:
        self._refused.setdefault(prompt, (self._clock(), said))
        while len(self._refused) > MAX_PROMPTS:
            self._refused.popitem(last=False)

    def _died(self, death: Death) -> bool:
        node_id, generation = death.node
        return any(record.id == node_id and record.generation > generation for record in self._nodes())
