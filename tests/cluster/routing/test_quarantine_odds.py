"""Simulated deployments: who is refused where nodes are killed at random, and where requests kill them."""

from __future__ import annotations

import math
import random
from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest

from cluster.routing.quarantine import DEATHS, REST_LIFE_S, Quarantine, Suspicion
from cluster.state.registry_types import NodeRecord
from paceline.errors import InvalidRequest


class Simulated:
    """Decode nodes that die and start anew, and streams of tokens on them, in steps of 0.1 s."""

    START_S = 8.0

    def __init__(self, seed: int, nodes: int, streams: int, killers: int, kill_after_s: float) -> None:
        self.rng, self.now, self.kill_after_s = random.Random(seed), 0.0, kill_after_s
        self.nodes = [NodeRecord(f"decode-{i}", "decode", 1, f"host:{i}") for i in range(nodes)]
        self.back = [0.0] * nodes
        self.quarantine = Quarantine(self.alive, lambda: self.now)
        self.made = self.deaths = 0
        self.under: dict[str, int] = {}  # deaths of nodes by request
        self.refused: list[str] = []
        self.streams = [self.stream("killer" if i < killers else "stream") for i in range(streams)]

    def alive(self) -> list[NodeRecord]:
        return [node for node, back in zip(self.nodes, self.back, strict=True) if back <= self.now]

    def stream(self, kind: str) -> Streaming:
        self.made += 1
        return Streaming(Quarantine.suspicion(f"{kind}-{self.made}", [self.made], ""), self.rng.choice([2, 30, 300]))

    def kill(self, node: NodeRecord) -> None:
        at = self.nodes.index(node)
        for each in [each for each in self.streams if each.node == node]:
            each.attempt.close()
            self.quarantine.lost(node, each.suspicion, each.tokens)
            self.under[each.suspicion.request_id] = self.under.get(each.suspicion.request_id, 0) + 1
            each.node, each.tokens = None, 0
        self.nodes[at] = NodeRecord(node.id, "decode", node.generation + 1, node.address)
        self.back[at] = self.now + self.START_S * self.rng.uniform(0.8, 1.4)
        self.deaths += 1

    def run(self, seconds: float, kills: tuple[float, float] | None) -> None:
        """kills: least and longest time between two that nobody is the cause of."""
        end, kill_at = self.now + seconds, self.now + self.rng.uniform(*kills) if kills else math.inf
        while self.now < end:
            self.now += 0.1
            if self.now >= kill_at and kills:
                kill_at = self.now + self.rng.uniform(*kills)
                if alive := self.alive():
                    self.kill(self.rng.choice(alive))
            for at, each in enumerate(self.streams):
                if each.node is None:
                    self.begin(at, each)
                elif each.suspicion.request_id.startswith("stream"):
                    self.go_on(at, each)
                elif self.now - each.began >= self.kill_after_s:
                    self.kill(each.node)

    def begin(self, at: int, each: Streaming) -> None:
        if self.quarantine.waits(each.suspicion):
            return
        try:
            self.quarantine.check(each.suspicion)
        except InvalidRequest:
            self.refused.append(each.suspicion.request_id)
            self.streams[at] = self.stream("stream")
            return
        if alive := self.alive():
            each.node = min(alive, key=lambda node: sum(other.node == node for other in self.streams))
            each.began = self.now
            each.attempt = ExitStack()
            each.attempt.enter_context(self.quarantine.running(each.node, each.suspicion))

    def go_on(self, at: int, each: Streaming) -> None:
        if self.now - each.began > 0.5:  # its prefill
            each.tokens += 1
            each.left -= 1
        if each.left <= 0:
            each.attempt.close()
            self.streams[at] = self.stream("stream")


@dataclass
class Streaming:
    """A request."""

    suspicion: Suspicion
    left: int  # tokens
    node: NodeRecord | None = None
    began: float = 0.0
    tokens: int = 0  # of the attempt
    attempt: ExitStack = field(default_factory=ExitStack)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(
    ("nodes", "streams", "kills"), [(2, 8, (3.0, 8.0)), (2, 1, (3.0, 8.0)), (2, 4, (0.5, 2.0)), (4, 12, (1.0, 3.0))]
)
def test_kills_at_random_have_nobody_refused(nodes: int, streams: int, kills: tuple[float, float], seed: int) -> None:
    """Mutants: a request is refused for a number of deaths; deaths without it are not counted; neither is what nodes
    lived; the quiet before its first death speaks against it."""
    simulated = Simulated(seed, nodes, streams, killers=0, kill_after_s=0.0)
    simulated.run(300.0, None)
    simulated.run(300.0, kills)
    assert simulated.deaths >= 40
    assert simulated.refused == []


@pytest.mark.parametrize(
    ("nodes", "streams", "killers", "kill_after_s", "deaths"),
    [
        (1, 1, 1, 0.5, 6),
        (1, 8, 1, 0.5, 8),
        (2, 8, 1, 0.5, 7),
        (2, 8, 2, 0.5, 10),
        (8, 16, 1, 0.5, 5),
        (2, 8, 1, 5.0, 9),
    ],
)
def test_a_request_that_kills_is_refused_soon_and_no_other(
    nodes: int, streams: int, killers: int, kill_after_s: float, deaths: int
) -> None:
    """In company too. Mutants: suspects are tried at once; nodes are not left alive between their attempts; only one
    that was alone from its first death on is a suspect."""
    simulated = Simulated(1, nodes, streams, killers, kill_after_s)
    simulated.run(150.0, None)
    assert [request.partition("-")[0] for request in simulated.refused] == ["killer"] * killers
    assert max(simulated.under[request] for request in simulated.refused) <= deaths


def test_thousands_of_deaths_are_counted() -> None:
    """Mutant: what many deaths multiply to is more than a float holds."""
    now, records = 0.0, [NodeRecord(f"decode-{i}", "decode", 1, f"host:{i}") for i in range(20)]
    quarantine = Quarantine(lambda: records, lambda: now)
    suspicion = quarantine.suspicion("r", [1], "")
    for _ in range(DEATHS):
        with quarantine.running(records[0], suspicion):
            pass
        quarantine.lost(records[0], suspicion, 0)
        records = [NodeRecord(node.id, "decode", node.generation + 100, node.address) for node in records]
        quarantine.check(suspicion)
        now += REST_LIFE_S
    assert len(quarantine._fallen) > 4000
    assert not quarantine.waits(suspicion)
    quarantine.check(suspicion)
