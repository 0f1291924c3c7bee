"""A whole deployment in one process tree: registry, nodes under Ray, router, gRPC and HTTP in front."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
import logging
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import grpc.aio

from cluster.access.keys import read_keys
from cluster.nodes.addresses import host_answers, own_address
from cluster.nodes.listening import check_addresses, check_free, raise_open_files, split_address
from cluster.nodes.node_logs import NodeLogs
from cluster.nodes.supervise import Slot, Supervisor
from cluster.state.embedded_redis import EmbeddedRedis
from cluster.state.registry import NodeDirectory
from paceline.assembly.shipped import with_real_drafter
from paceline.config import ServeConfig
from paceline.errors import NodeUnavailable, PairingRefused
from paceline.phases import phase
from paceline.v1 import node_pb2, node_pb2_grpc

if TYPE_CHECKING:
    from cluster.routing.metrics import Metrics
    from cluster.state.journal import Journal
    from cluster.state.prefix_index import PrefixIndex
    from paceline.grammar.compile import GrammarCompiler
    from paceline.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

Tell = Callable[[str, str], None]  # (what is waited for, details)
RPC_TIMEOUT_S = 30.0
PHASE_POLL_S = 0.5


@dataclass(frozen=True)
class Served:
    """What the nodes say they serve."""

    max_model_len: int
    vocab_size: int
    bit_exact: bool


class Deployment:
    """``start`` brings everything up or raises; ``stop`` ends everything that was started, in reverse."""

    def __init__(self, config: ServeConfig, tell: Tell | None = None) -> None:
        """tell: called with what the start is waiting for. Raises ConfigError when the heads that ``default`` would
        draft with cannot be told."""
        self.config = with_real_drafter(config)  # once, for nodes, requests, ModelInfo and metrics alike
        self._tell = tell
        self.grpc_address = ""
        self.http_address = ""
        self.admin_address = ""
        self._parts = AsyncExitStack()  # what was started; each part ends by itself and lets the others end
        self._grace_s = 0.0
        self._registry_url = ""

    async def start(self) -> None:
        """Bring everything up. On failure nothing is left running."""
        try:
            await self._start()
        except BaseException:
            await self.stop(grace_s=0)
            raise

    async def _start(self) -> None:
        config = self.config
        check_addresses(config)
        await asyncio.to_thread(check_free, config)  # a host name may have to be looked up
        if config.api_keys:
            await asyncio.to_thread(read_keys, Path(config.api_keys))  # what is wrong there is said before nodes start
        front_door = asyncio.get_running_loop().run_in_executor(None, _import_front_door)  # while Ray starts
        with self._waiting_for("Ray"):
            self._start_ray()
        registry_url = self._registry_url = self._start_registry()
        with self._waiting_for("the front door's modules"):
            await front_door
            from cluster.routing.metrics import Metrics
            from cluster.state.cache_events import CacheWatcher
            from cluster.state.journal import open_journal
            from paceline.grammar.compile import GrammarCompiler
            from paceline.models.hub import resolve_model
            from paceline.text.tokenizer import Tokenizer

            folder = await asyncio.to_thread(resolve_model, config.model)
            tokenizer = Tokenizer.from_folder(folder, config.chat_template)
        node_logs = NodeLogs()
        self._at_end("node logs", node_logs.close)  # after the nodes, for their last words
        self.directory = NodeDirectory(registry_url, config.lease_ttl_s)
        await self.directory.start()
        self._at_end("directory", self.directory.close)
        self.supervisor = await self._start_nodes(registry_url)
        await self.directory.refresh()  # the nodes have their leases now; the first request is not to miss one
        self.directory.on_change(node_logs.follow)
        node_logs.follow(self.directory.nodes())
        watcher = CacheWatcher(registry_url, self.directory.nodes, config.lease_ttl_s)
        await watcher.start()
        self._at_end("cached prefixes", watcher.close)
        with self._waiting_for("nodes to pair"):
            self.served = await self._introduce(self.supervisor.slots)
        metrics = Metrics()
        metrics.watch_nodes(self.directory.nodes)
        if config.vllm_metrics:
            from cluster.routing.vllm_metrics import VllmMetrics

            metrics.registry.register(VllmMetrics(metrics, config.model, self.directory.nodes))
        journal = open_journal(config, registry_url, metrics.registry)
        if journal is not None:
            self._at_end("journal", journal.close)
        grammars = GrammarCompiler(folder, self.served.vocab_size)
        self._at_end("grammars", grammars.close)
        await self._open_front_door(tokenizer, metrics, journal, watcher.index, grammars)

    async def _open_front_door(
        self,
        tokenizer: Tokenizer,
        metrics: Metrics,
        journal: Journal | None,
        prefixes: PrefixIndex,
        grammars: GrammarCompiler,
    ) -> None:
        from cluster.access.access import open_access
        from cluster.frontdoor.http import HttpOptions, create_app, serve_http
        from cluster.frontdoor.service import operators_gate, serve_grpc
        from cluster.nodes.admin import METHODS, serve_admin
        from cluster.routing.router import Router

        config, served = self.config, self.served
        raise_open_files()
        access = open_access(config, self._registry_url, metrics)
        if access is not None:
            access.start()
            self._at_end("access", access.close)
        self.router = Router(
            self.directory,
            tokenizer,
            config,
            config.model,
            served.max_model_len,
            served.vocab_size,
            metrics=metrics,
            bit_exact=served.bit_exact,
            journal=journal,
            prefixes=prefixes,
            grammars=grammars,
            quotas=access.quotas if access is not None else None,
        )
        self._at_end("router", self.router.close)
        host, port = split_address(config.http)
        fingerprint = system_fingerprint(config, (node.fingerprint_digest for node in self.directory.nodes()))
        options = HttpOptions(config.cors_origins, fingerprint, access, config.open_metrics)
        http = await serve_http(create_app(self.router, metrics, options), host, port)
        self._at_end("http", lambda: http.stop(self._grace_s))
        server = await serve_grpc(self.router, config.grpc, access)
        self._at_end("grpc", lambda: server.stop(self._grace_s))
        if config.admin:
            gate = operators_gate(METHODS, access)
            admin = await serve_admin(self.supervisor, config.admin, config.drain_timeout_s, [gate])
            self._at_end("admin", admin.stop)
            self.admin_address = f"{split_address(config.admin)[0]}:{admin.port}"
        self.http_address = f"{host}:{http.port}"
        self.grpc_address = f"{split_address(config.grpc)[0]}:{server.port}"

    def _at_end(self, name: str, end: Callable[[], object]) -> None:
        """``stop`` calls ``end`` before those of all parts that were started earlier; it may return an awaitable."""

        async def stop() -> None:
            try:
                ended = end()
                if inspect.isawaitable(ended):
                    await ended
            except Exception:  # one part that fails to stop must not keep the others running
                log.exception("stopping %s failed", name)

        self._parts.push_async_callback(stop)

    @contextmanager
    def _waiting_for(self, what: str) -> Iterator[None]:
        if self._tell is not None:
            self._tell(what, "")
        with phase(what):
            yield

    def _start_ray(self) -> None:
        """On this thread: the kernel ends Ray's processes with the thread that started them."""
        from cluster.nodes.launch import start_ray, stop_ray

        config = self.config
        start_ray(config.ray_address, config.prefill_nodes + config.decode_nodes)
        self._at_end("ray", stop_ray)

    def _start_registry(self) -> str:
        config = self.config
        if config.redis:
            return config.redis
        if config.ray_address == "local":
            server = EmbeddedRedis()
        else:  # nodes may be on other hosts
            server = EmbeddedRedis(tcp=True, host=own_address(config.host, config.node_interface))
        self._at_end("redis", server.close)
        return server.url

    async def _start_nodes(self, registry_url: str) -> Supervisor:
        from cluster.nodes.launch import RayNode, RayNodes, Wanted

        config = self.config
        roles = [
            ("prefill", config.prefill_nodes, config.prefill_resource),
            ("decode", config.decode_nodes, config.decode_resource),
        ]
        wanted = [
            # With several, another goes on with its streams; without prefill nodes, decode computes prompts.
            Wanted(f"{role}-{i}", resource, standby=config.standby and role == "decode" and count == 1)
            for role, count, resource in roles
            for i in range(count)
        ]
        threads = config.threads_per_node or max(1, (os.cpu_count() or 1) // len(wanted))
        shares = not config.threads_per_node and config.device == "cpu"
        log.info("%d nodes %s", len(wanted), "share their host's cores" if shares else f"with {threads} threads each")
        node_config = config.node(threads, secrets.token_hex(8) if shares else "", self._open_weight_file())
        slots = {node.node_id: number for number, node in enumerate(wanted)}
        with self._waiting_for("Ray to place nodes"):
            nodes = await asyncio.to_thread(RayNodes, wanted, registry_url, config.lease_ttl_s, config.node_interface)
        self._at_end("placement", nodes.close)

        def launch(role: str, node_id: str, generation: int) -> RayNode:
            own = node_config.model_copy(update={"cores_slot": slots[node_id]})
            return nodes.launch(role, node_id, generation, own)

        # A node that stopped without dying is replaced too.
        supervisor = Supervisor(launch, has_lease=self.directory.holds, reachable=host_answers)
        for role, count, _ in roles:
            supervisor.want(role, count)
        self._at_end("nodes", lambda: supervisor.stop(self._grace_s))
        told = asyncio.create_task(self._tell_phases(supervisor.slots))
        try:
            with self._waiting_for(f"{len(wanted)} nodes"):
                await supervisor.start()
        finally:
            told.cancel()
        return supervisor

    async def _tell_phases(self, slots: list[Slot]) -> None:
        """Tell what each node that has not started is at, until cancelled."""
        from cluster.nodes.launch import RayNode

        while self._tell is not None:
            await asyncio.sleep(PHASE_POLL_S)
            nodes = [slot.handle for slot in slots if not slot.address and isinstance(slot.handle, RayNode)]
            phases = await asyncio.gather(*(asyncio.to_thread(node.phase) for node in nodes))
            details = [f"{node.node_id} is {at}" for node, at in zip(nodes, phases, strict=True) if at]
            self._tell(f"{len(slots)} nodes", ", ".join(details))

    def _open_weight_file(self) -> str:
        """Path of the memory file for the nodes' weights; empty where they are on other hosts, or each is better off
        with weights of its own."""
        from paceline.layers.weight_file import WeightFile, huge_pages_need_own_memory

        config = self.config
        if config.ray_address != "local" or config.device != "cpu" or huge_pages_need_own_memory():
            return ""
        try:
            file = WeightFile()
        except OSError as error:
            log.warning("each node keeps weights of its own: %s", error)
            return ""
        self._at_end("weight file", file.close)
        return file.path

    async def _introduce(self, slots: list[Slot]) -> Served:
        """Pair every prefill node with every decode node now, so that a mismatch shows before the first request."""
        prefills = [slot for slot in slots if slot.role == "prefill"]
        decodes = [slot for slot in slots if slot.role == "decode"]
        await asyncio.gather(*(_connect(p, d) for p in prefills for d in decodes))
        async with grpc.aio.insecure_channel(decodes[0].address) as channel:
            stub = node_pb2_grpc.DecodeNodeStub(channel)
            status = await stub.Status(node_pb2.StatusRequest(), timeout=RPC_TIMEOUT_S)
        return Served(status.max_model_len, status.vocab_size, status.bit_exact)

    async def stop(self, grace_s: float) -> None:
        """End everything, newest first; each part has its own deadline. Idempotent.

        grace_s: what runs may go on for so long."""
        self._grace_s = grace_s
        await self._parts.aclose()


def system_fingerprint(config: ServeConfig, node_digests: Iterable[str]) -> str:
    """Names what the text depends on besides the request. node_digests: of what the nodes' pairing compares, which is
    model, weights, number format and kernels among others; nodes that come later pair with them."""
    parts = json.dumps([config.model, config.acceptance, config.draft_sampling, sorted(set(node_digests))])
    return f"fp_{hashlib.sha256(parts.encode()).hexdigest()[:16]}"


def _import_front_door() -> None:
    """What imports fastapi, jinja and more: a second of work."""
    for name in ("cluster.frontdoor.http", "cluster.frontdoor.service", "cluster.routing.router"):
        import_module(name)


async def _connect(prefill: Slot, decode: Slot) -> None:
    async with grpc.aio.insecure_channel(prefill.address) as channel:
        stub = node_pb2_grpc.PrefillNodeStub(channel)
        try:
            await stub.Connect(node_pb2.ConnectRequest(decode_address=decode.address), timeout=RPC_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            pair = f"{prefill.node_id} and {decode.node_id}"
            if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                raise PairingRefused.from_text(f"{pair}: {error.details()}") from None
            raise NodeUnavailable(f"{pair} did not connect: {error.details()}") from None
