"""Routers in front of a prefill and a decode node with a tiny model, in one process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from cluster.state.journal import Journal
from cluster.state.registry_types import NodeRecord
from paceline.config import NodeConfig, ServeConfig
from tests.support.byte_text import ByteTokenizer
from tests.support.node_pair import Pair, pair
from tests.support.tiny_model import VOCAB, tiny_runner
from tests.support.two_routers import StallingRouter


@dataclass
class Registry:
    """Both nodes, with the load they report."""

    pair: Pair

    def nodes(self) -> list[NodeRecord]:
        infos = self.pair.prefill_node.shell.load(), self.pair.decode_node.shell.load()
        return [
            NodeRecord(i.id, i.role, 1, i.address, free_pages=i.free_pages, total_pages=i.total_pages) for i in infos
        ]


@asynccontextmanager
async def tiny_routers(drafter: str) -> AsyncIterator[Callable[..., StallingRouter]]:
    """Makes routers in front of one pair of nodes."""
    options = {"drafter": drafter, "num_draft_tokens": 3}
    config = NodeConfig.model_validate({"model": "tiny", "dtype": "fp32", "kv_cache_tokens": 4096} | options)
    async with pair(config, tiny_runner(**options), tiny_runner(**options)) as both:

        def make(journal: Journal | None) -> StallingRouter:
            # Routers stall after a number of chunks.
            serve = ServeConfig(model="tiny", drafter=config.drafter, stream_interval_ms=0)
            return StallingRouter(Registry(both), ByteTokenizer(), serve, "tiny", 512, VOCAB, journal=journal)

        yield make
        await both.all_released()
