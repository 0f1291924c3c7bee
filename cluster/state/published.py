"""What a deployment tells routers that join it, in the hash of its holder: gone with the holder's lease."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import redis
from pydantic import TypeAdapter, ValidationError

from cluster.state.connection import connect
from cluster.state.node_lease import NOW_MS, routed_key
from cluster.state.registry_types import namespace_of
from paceline.errors import ConfigError

WAIT_S = 10.0  # for a deployment that starts, or a Redis that is away for a moment
POLL_S = 0.25
ROUTED_MS = 10_000
# Version of what the routers of a deployment keep together in Redis, and of what they ask of nodes. Builds serve
# together where it is the same.
SHARED_STATE = 1

# KEYS: holder. Returns what is served, empty where no lease runs.
_READ = f"""
{NOW_MS}
local serving, ends = unpack(redis.call('HMGET', KEYS[1], 'serving', 'ends'))
if serving and (tonumber(ends) or 0) > now then return serving end
return ''
"""


@dataclass(frozen=True)
class Served:
    """What the nodes say they serve."""

    max_model_len: int
    vocab_size: int
    bit_exact: bool
    weights: str = ""  # digest
    kernels: str = ""


@dataclass(frozen=True)
class Published:
    """A deployment that serves."""

    build: str  # version of Paceline
    options: dict[str, Any]  # of ServeConfig, those that are the same for every router
    served: Served
    kinds: list[tuple[str, str]]  # model and fingerprint digest of the deployment's nodes
    text_digest: str  # of tokenizer and chat template
    state: int = 0  # SHARED_STATE of that build; 0: it does not say
    chosen: list[str] = field(default_factory=list)  # options that are not at that build's defaults; roles' are not
    keyed: bool = False  # whether its front door asks for API keys

    def to_json(self) -> bytes:
        """As it lies in Redis."""
        return _PUBLISHED.dump_json(self)


_PUBLISHED = TypeAdapter(Published)


def say_routed(url: str, deployment: str) -> None:
    """A router is there for the next ROUTED_MS: nodes without a supervisor wait for one. Blocks. Raises
    redis.RedisError."""
    with connect(url) as client:
        client.set(routed_key(namespace_of(deployment)), 1, px=ROUTED_MS)


async def wait_for_published(url: str, deployment: str) -> Published:
    """What the deployment tells. Raises ConfigError where it tells nothing within WAIT_S."""
    end, told = time.monotonic() + WAIT_S, "nobody serves it there"
    while True:
        try:
            found = await asyncio.to_thread(read_published, url, deployment)
            if found is not None:
                return found
        except redis.RedisError as error:
            told = f"Redis: {error}"
        if time.monotonic() >= end:
            raise ConfigError("join", f"deployment {deployment!r} was not found within {WAIT_S:g} s: {told}")
        await asyncio.sleep(POLL_S)


def read_published(url: str, deployment: str) -> Published | None:
    """What the deployment tells now; None where nobody serves it. Blocks. Raises redis.RedisError, and ConfigError for
    what another version wrote."""
    with connect(url) as client:
        found: Any = client.eval(_READ, 1, f"{namespace_of(deployment)}:holder")
    try:
        return _PUBLISHED.validate_json(found) if found else None
    except ValidationError as error:
        raise ConfigError("join", f"deployment {deployment!r} is of another version: {error}") from None
