"""Requests that kill decode nodes: they are suspected by their deaths, and refused after a trial.

A death counts when the connection is gone, the next generation of the node has come, the node was not draining, and
the attempt had brought few tokens: a request that kills does so where it stands. A cut cable, a host that is away and a
node that an operator stops are no deaths.

A suspect is the one request in progress at several deaths. Where decode nodes die without any suspect too, something
else ends them, and it takes more deaths. A suspect waits until decode nodes have lived without suspects for a while.
Then it is tried once more, one suspect at a time, and refused if that node dies too.

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
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from pydantic import TypeAdapter, ValidationError

from cluster.routing.breaker import Key, key_of
from cluster.state.registry_types import NodeRecord
from paceline.errors import InvalidRequest

log = logging.getLogger(__name__)

DEATHS = 3  # after which a request is a suspect
MORE_DEATHS = 3  # for each that came without a suspect meanwhile
QUIET_S = 30.0  # that decode nodes live without suspects, before one of these is tried
UNWATCHED_S = 5.0  # after which it is not known whether they lived
FEW_TOKENS = 16  # of an attempt that counts
EXPLAIN_S = 10.0  # longest wait for what became of a node, before the request is given to one more
FORGET_S = 600.0
MAX_PROMPTS, MAX_NODES = 1024, 256  # that are remembered
MAX_DEATHS = 64  # under one request

Asked = str  # digest of a request: its id, which clients choose and may repeat, its prompt, and whose cache it may use
ASKED_CHARS = 24


@dataclass(frozen=True)
class Death:
    """A decode node that was lost under a request."""

    node: Key
    at: float
    requests: set[Asked]  # that were in progress there; of all attempts that failed, behind other routers too
    generations: Mapping[str, int]  # of all decode nodes then
    on_trial: bool = False  # the request was a suspect, and nodes had lived without it


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
    on_trial: bool = False  # until a node dies under it, or it does well


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
        self._lived: set[Key] = set()  # decode nodes when a suspect last looked
        self._looked = self._quiet_from = -math.inf

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
        self._seen = self._seen | {node.id: max(node.generation, self._seen.get(node.id, 0))}
        together = self._together(key, [suspicion.asked, *self._running.get(key, ())])
        seen = next((record for record in self._nodes() if key_of(record) == key), node)
        if num_tokens >= FEW_TOKENS:  # nodes live under it, so what died before is no evidence
            self._deaths.pop(suspicion.asked, None)
            suspicion.on_trial = False
        elif seen.state != "draining":
            self._add(suspicion.asked, Death(key, self._clock(), together, self._generations(), suspicion.on_trial))
            self._tell(Note(suspicion.prompt, asked=suspicion.asked, node=key, requests=tuple(together)))
            suspicion.on_trial = False

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
            self._add(note.asked, Death(note.node, self._clock(), together, self._generations()))

    def waits(self, suspicion: Suspicion) -> bool:
        """Whether another node is to wait: it is not known yet whether the latest loss was a death, or the request is a
        suspect and its trial has not come. To be asked again and again until then."""
        losses = self._recent(suspicion.asked)
        if suspicion.on_trial or suspicion.prompt in self._refused or len(losses) < DEATHS:
            return False
        last = losses[-1]
        there = any(key_of(record) == last.node for record in self._nodes())
        if not there and not self._died(last) and self._clock() - last.at < EXPLAIN_S:
            return True
        return self._is_suspect(suspicion.asked) and not self._proof(suspicion) and not self._quiet()

    def check(self, suspicion: Suspicion) -> None:
        """Raise InvalidRequest for a request that has been shown to kill nodes, also under another id. A suspect that
        no longer waits is on trial from now on."""
        now = self._clock()
        while self._refused and now - next(iter(self._refused.values()))[0] > FORGET_S:
            self._refused.popitem(last=False)
        if suspicion.prompt not in self._refused:
            if not (proof := self._proof(suspicion)):
                if not suspicion.on_trial and self._is_suspect(suspicion.asked):
                    suspicion.on_trial = True
                    log.warning("%r is tried once more: decode nodes died under it alone", suspicion.request_id)
                    self._quiet_from = now  # the next suspect waits for what becomes of this one
                return
            nodes = ", ".join(f"{node_id} generation {generation}" for node_id, generation in (d.node for d in proof))
            said = f"{suspicion.request_id!r} is quarantined: it was the one request in progress when {nodes} died"
            log.error("%s; its prompt is refused for %g s", said, FORGET_S)
            self._refuse(suspicion.prompt, said)
            self._tell(Note(suspicion.prompt, said))
        raise InvalidRequest("request", self._refused[suspicion.prompt][1], "quarantined")

    def _recent(self, asked: Asked) -> list[Death]:
        return [death for death in self._deaths.get(asked, ()) if self._clock() - death.at <= FORGET_S]

    def _alone(self, asked: Asked) -> list[Death]:
        """What died under a request, if it is the one that was always there and these are enough for a suspicion."""
        if len(self._deaths.get(asked, ())) < DEATHS:  # of most requests
            return []
        died = [death for death in self._recent(asked) if self._died(death)]
        return died if len(died) >= DEATHS and set.intersection(*(one.requests for one in died)) == {asked} else []

    def _proof(self, suspicion: Suspicion) -> list[Death]:
        """Deaths under a request, where one of them came in its trial."""
        died = self._alone(suspicion.asked)
        return died if any(death.on_trial for death in died) else []

    def _is_suspect(self, asked: Asked) -> bool:
        """Whether enough decode nodes died under a request, beside those that died without any such."""
        died = self._alone(asked)
        if not died:
            return False
        first, now = min(died, key=lambda death: death.at), self._generations()
        since = sum(max(0, now.get(node, then) - then) for node, then in first.generations.items())
        under = {death.node for other in self._deaths for death in self._alone(other) if death.at >= first.at}
        return len(died) >= DEATHS + MORE_DEATHS * max(0, since - len(under))

    def _quiet(self) -> bool:
        """Whether decode nodes have lived for a while, looked at again and again meanwhile."""
        now, there = self._clock(), {key_of(record) for record in self._nodes() if record.role == "decode"}
        if not there or self._lived - there or now - self._looked > UNWATCHED_S:
            self._quiet_from = now
        self._lived, self._looked = there, now
        return now - self._quiet_from >= QUIET_S

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
        return self._generations().get(node_id, 0) > generation
