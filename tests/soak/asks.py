"""What is asked: some forty distinct requests, and how, by whom and how long each turn asks one of them.

A turn is a function of the run's seed and its own number alone. A fifth of all turns come from a tenant that was never
seen before and will not be again: whatever is kept by tenant, or by prefix and tenant, meets ever new keys.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Way = Literal["grpc stream", "grpc whole", "http stream", "http whole"]
Moment = Literal["before the first token", "mid-stream", "near the end", "at any time"]
How = Literal["closes", "deadline"]

WAYS: dict[Way, int] = {"grpc stream": 4, "http stream": 4, "grpc whole": 1, "http whole": 1}  # weights
MOMENTS: dict[Moment, int] = {"before the first token": 3, "mid-stream": 4, "near the end": 3}
LEAVING = 0.36  # of all turns: some end before their client could leave
DEADLINES = 0.25  # of those who leave over gRPC
TENANTS = ("", "red", "green")
NEW_TENANTS = 0.2
CHARACTERS = "etaoin shrdlu,.ETAOIN\n0123"
SHARED_PREFIX = "You ride in a paceline. " * 6

SAMPLED, GREEDY = {"temperature": 1.0}, {"temperature": 0.0}
EOS = 257  # of tests.support.tiny_chat
# Each kind has characters of the prompt, tokens of the answer, and what is special about it.
KINDS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "greedy": (30, 48, GREEDY),
    "sampled": (60, 40, SAMPLED),
    "hot": (40, 40, {"temperature": 1.5, "top_p": 0.9, "top_k": 60, "min_p": 0.01}),
    "two": (40, 32, SAMPLED | {"n": 2}),
    "penalties": (70, 48, {"temperature": 0.8, "frequency_penalty": 0.4, "presence_penalty": 0.2}),
    "repetition": (30, 40, {"temperature": 0.6, "repetition_penalty": 1.3, "min_tokens": 5}),
    "stop": (30, 80, SAMPLED | {"stop": ["q", "Zx", "7"]}),
    "ends itself": (30, 80, SAMPLED | {"logit_bias": {EOS: 6.0}, "ignore_eos": False}),
    "logprobs": (50, 24, SAMPLED | {"top_logprobs": 2}),
    "long prompt": (600, 12, GREEDY),
    "long sampled": (450, 24, SAMPLED),
    "ngram": (60, 48, GREEDY | {"drafter": "ngram"}),
    "suffix": (60, 48, GREEDY | {"drafter": "suffix"}),
    "trie": (60, 48, GREEDY | {"drafter": "trie"}),
    "chat": (40, 32, {"temperature": 0.7}),
    "short": (16, 2, SAMPLED),
}
COPYING, LONG = ("ngram", "suffix", "trie"), ("long prompt", "long sampled")
LONG_WHEN_EARLY = 0.6  # of the turns that end before the first token: prompts that take their time


@dataclass(frozen=True)
class Ask:
    """One distinct request, but for who asks. ``options`` are GenerateOptions'."""

    kind: str
    prompt: str
    options: dict[str, Any]


@dataclass(frozen=True)
class Leave:
    """A client that goes away. ``share``: of the answer, or of its usual time, that it stays for."""

    how: How
    moment: Moment
    share: float


@dataclass(frozen=True)
class Turn:
    """One request of the soak."""

    number: int
    which: int  # of the asks
    way: Way
    tenant: str
    priority: int
    leave: Leave | None


def make_asks(seed: int, each: int = 3) -> list[Ask]:
    """``each`` of every kind, the second with a prefix that all of those share."""
    rng = random.Random(f"asks {seed}")
    asks = []
    for turn in range(each):
        for kind, (characters, max_tokens, special) in KINDS.items():
            length = int(characters * rng.uniform(0.6, 1.4))
            words = "".join(rng.choice(CHARACTERS) for _ in range(length))
            prompt = words[:12] * (length // 12) if kind in COPYING else words  # which find what repeats
            prompt = SHARED_PREFIX + prompt if turn % 3 == 1 else prompt
            tokens = max(1, int(max_tokens * rng.uniform(0.6, 1.4)))
            options = {"seed": rng.randrange(1 << 40), "max_tokens": tokens, "ignore_eos": True} | special
            asks.append(Ask(kind, prompt, options))
    return asks


def make_turn(seed: int, number: int, asks: Sequence[Ask]) -> Turn:
    """The turn of that number among these requests."""
    rng = random.Random(f"turn {seed} {number}")
    way = rng.choices(list(WAYS), list(WAYS.values()))[0]
    tenant = f"new-{number}" if rng.random() < NEW_TENANTS else rng.choice(TENANTS)
    leave = _leave(rng, way) if rng.random() < LEAVING else None
    which = rng.randrange(len(asks))
    if leave is not None and leave.moment == "before the first token" and rng.random() < LONG_WHEN_EARLY:
        which = rng.choice([index for index, ask in enumerate(asks) if ask.kind in LONG])
    return Turn(number, which, way, tenant, rng.randint(-10, 10), leave)


def _leave(rng: random.Random, way: Way) -> Leave:
    if way.startswith("grpc") and rng.random() < DEADLINES:
        return Leave("deadline", "at any time", rng.uniform(0.05, 0.9))
    if way.endswith("whole"):
        return Leave("closes", "at any time", rng.uniform(0.0, 0.9))
    moment = rng.choices(list(MOMENTS), list(MOMENTS.values()))[0]
    bounds = {"before the first token": (0.1, 1.0), "mid-stream": (0.02, 0.7), "near the end": (0.8, 0.97)}[moment]
    return Leave("closes", moment, rng.uniform(*bounds))
