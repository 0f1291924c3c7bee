"""A whole deployment in one process: HTTP on a socket, the router, and two real nodes with a tiny model."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from cluster.access.access import Access
from cluster.frontdoor.http import HttpOptions, create_app, serve_http
from cluster.state.registry_types import NodeRecord
from paceline.config import NodeConfig, ServeConfig
from paceline.text.tokenizer import Tokenizer
from tests.support.node_pair import Pair, pair
from tests.support.tiny_chat import CHAT_VOCAB, write_chat_tokenizer
from tests.support.tiny_model import tiny_runner
from tests.support.two_routers import StallingRouter

MODEL = "tiny"
CONTEXT = 512  # tokens of prompt and output


@dataclass
class _Registry:
    """Both nodes, with the load they report."""

    nodes_: Pair

    def nodes(self) -> list[NodeRecord]:
        infos = self.nodes_.prefill_node.shell.load(), self.nodes_.decode_node.shell.load()
        return [
            NodeRecord(i.id, i.role, 1, i.address, free_pages=i.free_pages, total_pages=i.total_pages) for i in infos
        ]


@dataclass
class Served:
    """What runs."""

    url: str
    router: StallingRouter  # it stalls where a test tells it to
    nodes: Pair


@asynccontextmanager
async def served(
    folder: Path, drafter: str = "ngram", access: Access | None = None, names: str = ""
) -> AsyncIterator[Served]:
    """folder: for the tokenizer's files. access: who may ask. names: of the model, if others than ``MODEL``. At the end
    every page must be free."""
    options = {"drafter": drafter, "num_draft_tokens": 3}
    config = NodeConfig.model_validate({"model": MODEL, "dtype": "fp32", "kv_cache_tokens": 4096} | options)
    runners = [tiny_runner("fp32", 0, CHAT_VOCAB, **options) for _ in range(2)]
    tokenizer = Tokenizer.from_folder(write_chat_tokenizer(folder))
    async with pair(config, *runners) as nodes:
        serve = ServeConfig(model=MODEL, drafter=drafter, served_model_name=names)
        name = serve.served_names[0]
        quotas = None if access is None else access.quotas
        router = StallingRouter(_Registry(nodes), tokenizer, serve, name, CONTEXT, CHAT_VOCAB, quotas=quotas)
        app = create_app(router, router.metrics, HttpOptions(access=access))
        http = await serve_http(app, "127.0.0.1", 0)
        try:
            yield Served(f"http://127.0.0.1:{http.port}", router, nodes)
        finally:
            await http.stop(1.0)
            await nodes.all_released()
            await router.close()
