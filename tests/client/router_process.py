"""A router in a process of its own, to be killed: ``router_process.py REDIS_URL CHUNKS RECORD...`` (NodeRecord's JSON).
Prints its port, and "stalled" once a stream stalled after CHUNKS chunks and what it needs is in the journal."""

from __future__ import annotations

import asyncio
import math
import sys

from cluster.frontdoor.service import serve_grpc
from cluster.state.journal import open_journal
from cluster.state.registry_types import NodeRecord
from paceline.config import ServeConfig
from tests.support.byte_text import VOCAB, ByteDetokenizer, ByteTokenizer
from tests.support.scripted_nodes import MAX_MODEL_LEN, FakeRegistry
from tests.support.two_routers import JOURNAL_KEY, StallingRouter


async def main(url: str, chunks: str, *records: str) -> None:
    registry = FakeRegistry()
    for record in map(NodeRecord.from_json, records):
        registry.records[record.id] = record
    config = ServeConfig(model="tiny")
    journal = open_journal(config, url, JOURNAL_KEY)
    assert journal is not None
    router = StallingRouter(
        registry,
        ByteTokenizer(),
        config,
        "tiny",
        MAX_MODEL_LEN,
        VOCAB,
        detokenizer=ByteDetokenizer,
        journal=journal,
    )
    router.stall_after = int(chunks)
    server = await serve_grpc(router, "127.0.0.1:0")
    print(server.port, flush=True)
    await router.stalled.wait()
    while not all(kept.written_at > -math.inf for kept in journal._held.values()):
        await asyncio.sleep(0.005)
    print("stalled", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
