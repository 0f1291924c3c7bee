"""One process of the deployment under test: ``process.py router|prefill|decode FOLDER REDIS_URL``. Prints its addresses
on one line and ends when its input does. The router waits for a line of input: the nodes are there."""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path

import torch

from cluster.frontdoor.http import create_app, serve_http
from cluster.frontdoor.service import serve_grpc
from cluster.nodes.host import NodeHost
from cluster.routing.metrics import Metrics
from cluster.routing.router import Router
from cluster.state.journal import open_journal
from cluster.state.registry import NodeDirectory
from cluster.state.registry_types import Registry
from paceline.config import ServeConfig
from paceline.long_lived import settle
from paceline.speculation import TreeKind
from paceline.text.tokenizer import Tokenizer
from tests.support.tiny_chat import CHAT_VOCAB
from tests.support.two_routers import JOURNAL_KEY

CONTEXT = 96  # tokens of prompt and output: bounds the work of every message that happens to be valid
GRACE_S = 2.0
MODEL = "tiny"


def options(folder: str) -> ServeConfig:
    """Options of router and nodes alike."""
    return ServeConfig(
        model=folder,
        drafter="ngram",
        drafters="none,suffix",
        num_draft_tokens=3,
        tree=TreeKind.DYNAMIC,
        page_size=8,
        max_model_len=CONTEXT,
        kv_cache_tokens=16384,
        max_waiting=512,
        request_timeout_s=60.0,
        reserve_deadline_s=10.0,
        handoff_deadline_s=10.0,
    )


def run_node(role: str, folder: str, redis_url: str) -> None:
    config = options(folder)
    host = NodeHost(role, f"{role}-0", 1, config.node(threads=1), Registry(redis_url, config.lease_ttl_s))
    print(host.start(), flush=True)
    sys.stdin.read()
    host.stop(GRACE_S)


async def run_router(folder: str, redis_url: str) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s router %(levelname)s %(name)s: %(message)s")
    config = options(folder)
    sys.stdin.readline()
    directory = NodeDirectory(redis_url, config.lease_ttl_s)
    await directory.start()
    metrics = Metrics()
    metrics.watch_nodes(directory.nodes)
    journal = open_journal(config, redis_url, JOURNAL_KEY, metrics.registry)
    assert journal is not None
    tokenizer = Tokenizer.from_folder(Path(folder))
    router = Router(directory, tokenizer, config, MODEL, CONTEXT, CHAT_VOCAB, metrics=metrics, journal=journal)
    http = await serve_http(create_app(router, metrics), "127.0.0.1", 0)
    grpc = await serve_grpc(router, "127.0.0.1:0")
    settle()
    print(f"127.0.0.1:{grpc.port} 127.0.0.1:{http.port}", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await grpc.stop(GRACE_S)
    await http.stop(GRACE_S)
    await router.close()
    await journal.close()
    await directory.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "router":
        asyncio.run(run_router(*sys.argv[2:]))
    else:
        run_node(*sys.argv[1:])
