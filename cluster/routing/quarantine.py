"""Requests that kill decode nodes: they are suspected by their deaths, and refused when chance does not explain these.

A death counts when the connection is gone, the next generation of the node has come, the node was not draining, and
the attempt had brought few tokens: a request that kills does so where it stands. A cut cable, a host that is away and a
node that an operator stops are no deaths.

Requests with several deaths are suspects. They are tried one after the other, so that no two stand for each other for
long. One that was alone in being there at all its deaths also waits after each until decode nodes have lived for a
while. So its share of their lives is another than its share of the deaths, if it is the cause. A request that has no
part in the deaths, and was there for a share ``f`` of what decode nodes lived since its first one, meets each with
probability ``f``. It is refused when so many would be an accident by the binomial distribution.

Routers tell each other of deaths under a request that comes back under the same id, with what else was in progress
there at any of them, and of prompts that they refuse (`cluster/state/evidence.py`); each looks itself whether a node
died.
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from pydantic import TypeAdapter, ValidationError

from cluster.routing.breaker import Key, key_of
from cluster.state.registry_types import NodeRecord
from paceline.errors import InvalidRequest

log = logging.getLogger(__name__)

DEATHS = 3  # after which a request is a suspect
ACCIDENT = 1e-5  # probability of so many deaths, below which a suspect is refused
LEAST_S = 1.0  # of an attempt: nodes do not die evenly, but often as soon as they are there
REST_LIFE_S, REST_S = 15.0, 20.0  # after a death under a suspect: what nodes are to live together; longest wait for it
TURN_S = 3.0  # after which the next suspect may be tried, beside one whose node lives
FEW_TOKENS = 16  # of an attempt that counts
EXPLAIN_S = 10.0  # longest wait for what became of a node, before the request is given to one more
FORGET_S = 600.0
MAX_PROMPTS, MAX_NODES = 1024, 256  # that are remembered
MAX_DEATHS = 64  # under one request
MAX_FALLEN = 4096

Asked = str  # digest of a request: its id, which clients choose and may repeat, its prompt, and whose cache it may use
ASKED_CHARS = 24


@dataclass(frozen=True)
class Death:
    """A decode node that was lost under a request."""

    node: Key
    at: float
    requests: set[Asked]  # that were in progress there; of all attempts that failed, behind other routers too
    seconds: float  # that the attempt took
    life_s: tuple[float, float]  # what decode nodes had lived together when the attempt began, and then


@dataclass(frozen=True)
class Note:
    """What routers tell each other of a prompt: a death under a request, or, with ``said``, that it is refused."""

    prompt: str
    said: str = ""
    asked: Asked = ""
    node: Key = ("", 0)
    seconds: float = 0.0
    requests: tuple[Asked, ...] = ()


_NOTE = TypeAdapter(Note)


@dataclass
class Suspicion:
    """What is held against one choice of a request."""

    request_id: str
    asked: Asked
    prompt: str  # digest of what is asked, and in whose cache
    began: float = 0.0  # of its latest attempt
    life_s: float = 0.0  # of decode nodes then


class Quarantine:
    """Who is suspected, and what is refused."""

    def __init__(self, nodes: Callable[[], list[NodeRecord]], clock: Callable[[], float] = time.monotonic) -> None:
        """nodes: the registry's view. clock: seconds, monotonic."""
        self._nodes, self._clock = nodes, clock
        self.tell: Callable[[bytes], None] = lambda note: None  # other routers
        self._deaths: OrderedDict[Asked, list[Death]] = OrderedDict()  # here and behind other routers
        self._running: dict[Key, list[Asked]] = {}
        self._seen: dict[str, int] = {}  # latest generation by node
        self._lost: OrderedDict[Key, set[Asked]] = OrderedDict()
        self._refused: OrderedDict[str, tuple[float, str]] = OrderedDict()  # by prompt: when, and what is said
        self._fallen: deque[tuple[float, Key]] = deque(maxlen=MAX_FALLEN)  # that died, and when it was seen
        self._alive: set[Key] = set()  # decode nodes at the last look
        self._life_s, self._looked = 0.0, clock()  # what decode nodes have lived together
        self._turn: tuple[Asked, float] = "", -math.inf  # the suspect that is tried, and from when on

    @staticmethod
    def suspicion(request_id: str, token_ids: Sequence[int], salt: str) -> Suspicion:
        """Nothing yet. token_ids: of the prompt. salt: whose cache it may use."""
        prompt = hashlib.sha256(salt.encode() + b"\0" + array("q", token_ids).tobytes()).hexdigest()
        asked = hashlib.sha256(f"{prompt} {request_id}".encode()).hexdigest()[:ASKED_CHARS]
        return Suspicion(request_id, asked, prompt)

    @contextmanager
    def running(self, node: NodeRecord, suspicion: Suspicion) -> Iterator[None]:
        """Around an attempt on a decode node."""
        self._look()
        asked, suspicion.began, suspicion.life_s = suspicion.asked, self._clock(), self._life_s
        there = self._running.setdefault(key_of(node), [])
        there.append(asked)
        try:
            yield
        finally:
            there.remove(asked)
            if not there:
                self._running.pop(key_of(node), None)
            if self._turn[0] == asked:
                self._turn = "", -math.inf

    def lost(self, node: NodeRecord, suspicion: Suspicion, num_tokens: int) -> None:
        """The connection to a decode node is gone. num_tokens: what the attempt had brought."""
        key, now = key_of(node), self._clock()
        self._look(node)
        together = self._together(key, [suspicion.asked, *self._running.get(key, ())])
        seen = next((record for record in self._nodes() if key_of(record) == key), node)
        if num_tokens >= FEW_TOKENS:  # nodes live under it, so what died before is no evidence
            self._deaths.pop(suspicion.asked, None)
        elif seen.state != "draining":
            death = Death(key, now, together, now - suspicion.began, (suspicion.life_s, self._life_s))
            self._add(suspicion.asked, death)
            self._tell(Note(suspicion.prompt, "", suspicion.asked, key, death.seconds, tuple(together)))

    def _add(self, asked: Asked, death: Death) -> None:
        """Remember a death under a request; a process dies once."""
        before = [one for one in self._deaths.pop(asked, ()) if one.node != death.node]
        self._deaths[asked] = [*before, death][-MAX_DEATHS:]
        while len(self._deaths) > MAX_PROMPTS:
            self._deaths.popitem(last=False)

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
        if all(death.node != note.node for death in self._deaths.get(note.asked, ())):
            self._look()
            life_s = self._life_s, self._life_s
            self._add(note.asked, Death(note.node, self._clock(), together, note.seconds, life_s))

    def waits(self, suspicion: Suspicion) -> bool:
        """Whether another node is to wait: it is not known yet whether the latest loss was a death, or the request is a
        suspect, and nodes are to live first or another suspect is tried. To be asked again and again until then."""
        losses = self._recent(suspicion.asked)
        if suspicion.prompt in self._refused or len(losses) < DEATHS:
            return False
        self._look()
        last = losses[-1]
        there = any(key_of(record) == last.node for record in self._nodes())
        if not there and not self._died(last) and self._clock() - last.at < EXPLAIN_S:
            return True
        died = self._died_under(suspicion.asked)
        if len(died) < DEATHS:
            return False
        if _alone(suspicion.asked, died):
            if self._proven(died):
                return False
            if self._life_s - last.life_s[1] < REST_LIFE_S and self._clock() - last.at < REST_S:
                return True
        tried, since = self._turn
        return tried not in ("", suspicion.asked) and self._clock() - since < TURN_S

    def check(self, suspicion: Suspicion) -> None:
        """Raise InvalidRequest for a request that has been shown to kill nodes, also under another id. A suspect that
        no longer waits is tried from now on."""
        now = self._clock()
        self._look()
        while self._refused and now - next(iter(self._refused.values()))[0] > FORGET_S:
            self._refused.popitem(last=False)
        if suspicion.prompt not in self._refused:
            died = self._died_under(suspicion.asked)
            if len(died) < DEATHS:
                return
            if not _alone(suspicion.asked, died) or not self._proven(died):
                log.warning("%r is tried again: %d decode nodes died under it", suspicion.request_id, len(died))
                self._turn = suspicion.asked, now
                return
            nodes = ", ".join(f"{node_id} generation {generation}" for node_id, generation in (d.node for d in died))
            said = f"{suspicion.request_id!r} is quarantined: it was the one request in progress when {nodes} died"
            log.error("%s; its prompt is refused for %g s", said, FORGET_S)
            self._refuse(suspicion.prompt, said)
            self._tell(Note(suspicion.prompt, said))
        raise InvalidRequest("request", self._refused[suspicion.prompt][1], "quarantined")

    def _recent(self, asked: Asked) -> list[Death]:
        return [death for death in self._deaths.get(asked, ()) if self._clock() - death.at <= FORGET_S]

    def _died_under(self, asked: Asked) -> list[Death]:
        if len(self._deaths.get(asked, ())) < DEATHS:  # of most requests
            return []
        return [death for death in self._recent(asked) if self._died(death)]

    def _proven(self, died: Sequence[Death]) -> bool:
        """Whether these deaths under one request are no accident."""
        first = died[0]
        under_s = sum(max(LEAST_S, death.seconds) for death in died)
        share = under_s / max(under_s, self._life_s - first.life_s[0])
        all_of = max(len(died), sum(at >= first.at - first.seconds for at, _ in self._fallen))
        fewer = (math.comb(all_of, n) * share**n * (1 - share) ** (all_of - n) for n in range(len(died)))
        return 1 - sum(fewer) < ACCIDENT

    def _look(self, lost: NodeRecord | None = None) -> None:
        """Take in which decode nodes live, and which have died since the last look. lost: was there until now."""
        now, alive = self._clock(), {key_of(record) for record in self._nodes() if record.role == "decode"}
        for node, generation in [*([key_of(lost)] if lost else []), *alive]:
            before = self._seen.get(node, generation)
            self._fallen.extend((now, (node, died)) for died in range(before, min(generation, before + MAX_NODES)))
            self._seen[node] = max(before, generation)
        self._seen = dict(list(self._seen.items())[-MAX_NODES:])
        self._life_s += (now - self._looked) * len(alive & self._alive)
        self._alive, self._looked = alive, now

    def _refuse(self, prompt: str, said: str) -> None:
        self._refused.setdefault(prompt, (self._clock(), said))
        while len(self._refused) > MAX_PROMPTS:
            self._refused.popitem(last=False)

    def _died(self, death: Death) -> bool:
        node_id, generation = death.node
        return self._seen.get(node_id, 0) > generation


def _alone(asked: Asked, died: Sequence[Death]) -> bool:
    """Whether a request is the one that was there at all of these deaths."""
    return set.intersection(*(death.requests for death in died)) == {asked}
