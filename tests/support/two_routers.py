"""Two routers in front of the same nodes and the same journal; the first one stalls where it is told, and dies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from cluster.contract.generation import GenerationRequest
from cluster.contract.plan import Plan
from cluster.frontdoor.service import GrpcServer, serve_grpc
from cluster.routing.router import Router
from cluster.state.journal import Journal, open_journal
from paceline.config import ServeConfig
from paceline.results import Chunk

JOURNAL_KEY = "11" * 32  # of the deployment


class StallingRouter(Router):
    """Passes on ``stall_after`` chunks of each stream, then none."""

    stall_after: int | None = None

    async def generate(
        self, request: GenerationRequest, on_plan: Callable[[Plan], None] = lambda plan: None
    ) -> AsyncGenerator[Chunk, None]:
        sent = 0
        async with aclosing(super().generate(request, on_plan)) as chunks:
            async for chunk in chunks:
                if sent == self.stall_after:
                    self.stalled.set()
                    await asyncio.Event().wait()
                yield chunk
                sent += 1

    @property
    def stalled(self) -> asyncio.Event:
        if not hasattr(self, "_stalled"):
            self._stalled = asyncio.Event()
        return self._stalled


@dataclass
class One:
    """A router that serves."""

    router: StallingRouter
    server: GrpcServer
    journal: Journal | None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.port}"

    async def die(self) -> None:
        """Its connections break; nothing is told to anybody, and nothing more is journaled."""
        if self.journal is not None:
            await self.journal.close()
        await self.server.server.stop(None)
        await self.router.close()

    async def die_when_stalled(self) -> None:
        await self.router.stalled.wait()
        await self.die()


@dataclass
class Two:
    """``a`` dies, ``b`` goes on."""

    a: One
    b: One

    @property
    def addresses(self) -> list[str]:
        return [self.a.address, self.b.address]


@asynccontextmanager
async def two_routers(make: Callable[..., StallingRouter], config: ServeConfig, url: str) -> AsyncIterator[Two]:
    """make: a router from its journal. url: of Redis; empty for routers without a journal."""
    made: list[One] = []
    try:
        for _ in range(2):
            journal = open_journal(config, url, JOURNAL_KEY) if url else None
            router = make(journal=journal)
            made.append(One(router, await serve_grpc(router, "127.0.0.1:0"), journal))
        yield Two(*made)
    finally:
        for one in made:
            await one.die()


def scripted(fleet: Any, **options: Any) -> Callable[..., StallingRouter]:
    """Makes routers in front of a tests.support.scripted_nodes.Fleet."""
    from tests.support.byte_text import VOCAB, ByteDetokenizer, ByteTokenizer
    from tests.support.scripted_nodes import MAX_MODEL_LEN

    def make(journal: Journal | None) -> StallingRouter:
        config = fleet.router.config.model_copy(update=options)
        return StallingRouter(
            fleet.registry,
            ByteTokenizer(),
            config,
            "tiny",
            MAX_MODEL_LEN,
            VOCAB,
            detokenizer=ByteDetokenizer,
            journal=journal,
        )

    return make
