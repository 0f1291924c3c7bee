"""A deployment in this process: gRPC, the router, and two real nodes with the model of a folder."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from cluster.frontdoor.service import serve_grpc
from cluster.routing.router import Router
from cluster.state.registry_types import NodeRecord
from paceline.assembly.build import build_runner
from paceline.config import NodeConfig, ServeConfig
from paceline.results import TextSource
from paceline.text.tokenizer import Tokenizer
from tests.support.node_pair import Pair, pair


class _Registry:
    """Both nodes, with the load they report."""

    def __init__(self, nodes: Pair) -> None:
        self._nodes = nodes

    def nodes(self) -> list[NodeRecord]:
        infos = self._nodes.prefill_node.shell.load(), self._nodes.decode_node.shell.load()
        return [
            NodeRecord(i.id, i.role, 1, i.address, free_pages=i.free_pages, total_pages=i.total_pages) for i in infos
        ]


@asynccontextmanager
async def deployed(folder: Path, **options: object) -> AsyncIterator[str]:
    """The address of its gRPC. options: of both the nodes and the router, above those of a small model in float32."""
    shared = {"model": str(folder), "dtype": "fp32", "num_draft_tokens": 3} | options
    sizes = {"kv_cache_tokens": 8192, "threads": 1, "head_check": False}
    config = NodeConfig.model_validate(shared | sizes)
    runners = [build_runner(config) for _ in range(2)]
    async with pair(config, *runners) as nodes:
        runner, identity = runners[0], runners[0].identity
        source = TextSource(True, f"fp_{identity.weights[:8]}", identity.weights, identity.kernels)
        serve = ServeConfig.model_validate(shared)
        router = Router(
            _Registry(nodes),
            Tokenizer.from_folder(folder),
            serve,
            serve.model,
            runner.max_model_len,
            runner.vocab_size,
            source=source,
        )
        server = await serve_grpc(router, "127.0.0.1:0")
        try:
            yield f"127.0.0.1:{server.port}"
        finally:
            await server.stop(0)
            await router.close()
            await nodes.all_released()
