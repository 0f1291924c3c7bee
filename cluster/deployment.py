"""A whole deployment in one process tree: registry, nodes under Ray, router, gRPC and HTTP in front."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import grpc.aio
from pydantic import SecretStr

from cluster.access.keys import read_keys
from cluster.nodes.addresses import host_answers, own_address
from cluster.nodes.listening import check_addresses, check_free, raise_open_files, split_address
from cluster.nodes.node_logs import NodeLogs
from cluster.nodes.slots import Slot
from cluster.nodes.supervise import Supervisor
from cluster.state.embedded_redis import EmbeddedRedis
from cluster.state.holder import DeploymentLease, Holder
from cluster.state.registry import NodeDirectory
from cluster.state.registry_types import Registry
from paceline.assembly.shipped import with_real_drafter
from paceline.config import ServeConfig
from paceline.errors import NodeUnavailable, PairingRefused
from paceline.phases import phase
from paceline.rpc.grants import Grants
from paceline.rpc.identity import Identity, Secret
from paceline.rpc.tls import TlsFolder
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
SEEN_TIMEOUT_S = 10.0  # for a Redis that is away for a moment
SEEN_POLL_S = 0.1
DOUBT_S = 1.5  # a node whose lease ran out is used on for so long, in which it is asked


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
        self._secret = Secret.from_file(config.secret_file)
        self.identity = Identity("router", self._secret.call_token, TlsFolder.of(config.tls_dir))
        self.grants = Grants(self._secret.ticket_key)
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
        self.identity.check()
        await asyncio.to_thread(check_free, config)  # a host name may have to be looked up
        if config.api_keys:
            await asyncio.to_thread(read_keys, Path(config.api_keys))  # what is wrong there is said before nodes start
        front_door = asyncio.get_running_loop().run_in_executor(None, _import_front_door)  # while Ray starts
        if config.redis:
            await self._hold(config.redis)  # before anything of another holder's could be touched
        with self._waiting_for("Ray"):
            self._start_ray()
        registry_url = self._registry_url = config.redis or await self._start_redis()
        registry = Registry(registry_url, config.lease_ttl_s, config.deployment)
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
        self.directory = NodeDirectory(registry.url, registry.lease_ttl_s, registry.namespace, DOUBT_S)
        await self.directory.start()
        self._at_end("directory", self.directory.close)
        await self._start_nodes(registry)
        await self._show_own_nodes()
        self.directory.on_change(node_logs.follow)
        node_logs.follow(self.directory.nodes())
        watcher = CacheWatcher(registry.url, self.directory.nodes, registry.lease_ttl_s, registry.namespace)
        await watcher.start()
        self._at_end("cached prefixes", watcher.close)
        with self._waiting_for("nodes to pair"):
            self.served = await self._introduce(self.supervisor.slots)
        metrics = Metrics()
        metrics.watch_nodes(self.directory.nodes)
        metrics.watch_registry(lambda: self.directory.stale_for_s)
        if config.vllm_metrics:
            from cluster.routing.vllm_metrics import VllmMetrics

            metrics.registry.register(VllmMetrics(metrics, config.model, self.directory.nodes))
        journal = open_journal(config, registry.url, metrics.registry)
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
        from cluster.routing.node_calls import NodeCalls
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
            calls=NodeCalls(identity=self.identity, grants=self.grants),
            quotas=access.quotas if access is not None else None,
        )
        self._at_end("router", self.router.close)
        host, port = split_address(config.http)
        fingerprint = system_fingerprint(config, (node.fingerprint_digest for node in self.directory.nodes()))
        tls = self.public_tls
        if tls is None and self.identity.tls is not None:
            log.warning("%s has no server.pem: clients are served without TLS", self.identity.tls.path)
        options = HttpOptions(
            config.cors_origins, fingerprint, config.acceptance == "sample", access, config.open_metrics
        )
        http = await serve_http(create_app(self.router, metrics, options), host, port, tls)
        self._at_end("http", lambda: http.stop(self._grace_s))
        server = await serve_grpc(self.router, config.grpc, access, tls=tls)
        self._at_end("grpc", lambda: server.stop(self._grace_s))
        if config.admin:
            gate = operators_gate(METHODS, access)
            admin = await serve_admin(self.supervisor, config.admin, config.drain_timeout_s, self.identity, [gate])
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

    async def _start_redis(self) -> str:
        """A Redis of this deployment's own, held; returns its URL."""
        config = self.config
        if config.ray_address == "local":
            server = EmbeddedRedis()
        else:  # nodes may be on other hosts
            server = EmbeddedRedis(tcp=True, host=own_address(config.host, config.node_interface))
        self._at_end("redis", server.close)
        server.keep_running()
        await self._hold(server.url)
        return server.url

    async def _hold(self, redis_url: str) -> None:
        """Become the one process that supervises this deployment, or raise ConfigError."""
        loop = asyncio.get_running_loop()
        successor: asyncio.Future[str] = loop.create_future()
        lease = DeploymentLease(
            redis_url,
            self.config.deployment,
            Holder(self.config.model),
            on_lost=lambda who: loop.call_soon_threadsafe(successor.set_result, who),
        )
        self._at_end("deployment lease", lease.release)
        with self._waiting_for("the deployment's lease"):
            await asyncio.to_thread(lease.acquire)
        self._lease, self._successor = lease, successor

    async def _stand_down(self) -> None:
        await self.supervisor.stand_down(await asyncio.shield(self._successor))

    async def _start_nodes(self, registry: Registry) -> None:
        from cluster.nodes.launch import RayNode, RayNodes
        from cluster.nodes.places import Wanted

        config = self.config
        roles = [
            ("prefill", config.prefill_nodes, config.prefill_resource),
            ("decode", config.decode_nodes, config.decode_resource),
        ]
        wanted = [
            # With several, another goes on with its streams; without prefill nodes, decode computes prompts.
            Wanted(f"{role}-{i}", resource, config.standby and role == "decode" and count == 1, vital=role == "decode")
            for role, count, resource in roles
            for i in range(count)
        ]
        threads = config.threads_per_node or max(1, (os.cpu_count() or 1) // len(wanted))
        shares = not config.threads_per_node and config.device == "cpu"
        log.info("%d nodes %s", len(wanted), "share their host's cores" if shares else f"with {threads} threads each")
        node_config = config.node(threads, secrets.token_hex(8) if shares else "", self._open_weight_file())
        slots = {node.node_id: number for number, node in enumerate(wanted)}
        with self._waiting_for("Ray to place nodes"):
            nodes = await asyncio.to_thread(RayNodes, wanted, registry, config.node_interface, self.identity)
        self._at_end("placement", nodes.close)

        def launch(role: str, node_id: str, generation: int) -> RayNode:
            own = node_config.model_copy(update={"cores_slot": slots[node_id], **self._secrets_of(role)})
            return nodes.launch(role, node_id, generation, own)

        # A node that stopped without dying is replaced too.
        supervisor = self.supervisor = Supervisor(
            launch,
            issue=self._lease.issue,
            has_lease=self.directory.holds,
            heard=self.directory.heard,
            reachable=host_answers,
        )
        for role, count, _ in roles:
            supervisor.want(role, count)
        self._at_end("nodes", lambda: supervisor.stop(self._grace_s))
        told = asyncio.create_task(self._tell_phases(supervisor.slots))
        try:
            with self._waiting_for(f"{len(wanted)} nodes"):
                await supervisor.start()
        finally:
            told.cancel()
        standing_down = asyncio.create_task(self._stand_down(), name="stand-down")
        self._at_end("stand-down", standing_down.cancel)

    async def _tell_phases(self, slots: list[Slot]) -> None:
        """Tell what each node that has not started is at, until cancelled."""
        from cluster.nodes.launch import RayNode

        while self._tell is not None:
            await asyncio.sleep(PHASE_POLL_S)
            nodes = [slot.handle for slot in slots if not slot.address and isinstance(slot.handle, RayNode)]
            phases = await asyncio.gather(*(asyncio.to_thread(node.phase) for node in nodes))
            details = [f"{node.node_id} is {at}" for node, at in zip(nodes, phases, strict=True) if at]
            self._tell(f"{len(slots)} nodes", ", ".join(details))

    def _secrets_of(self, role: str) -> dict[str, SecretStr]:
        """What a node proves itself with, and a decode node checks hand-offs with."""
        secrets_ = {"call_token": SecretStr(self._secret.call_token)}
        return secrets_ | ({"ticket_key": SecretStr(self._secret.ticket_key)} if role == "decode" else {})

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
        prefills = [slot for slot in slots if slot.role == "prefill" and slot.address]
        decodes = [slot for slot in slots if slot.role == "decode" and slot.address]
        await asyncio.gather(*(_connect(self.identity, p, d) for p in prefills for d in decodes))
        async with self.identity.channel(decodes[0].address, "decode") as channel:
            stub = node_pb2_grpc.DecodeNodeStub(channel)
            status = await stub.Status(node_pb2.StatusRequest(), timeout=RPC_TIMEOUT_S, metadata=self.identity.metadata)
        return Served(status.max_model_len, status.vocab_size, status.bit_exact)

    async def _show_own_nodes(self) -> None:
        """See the nodes that have started, and from now on none that serve something else, whatever their name is."""
        end = time.monotonic() + SEEN_TIMEOUT_S
        while True:
            await self.directory.refresh()  # they have their leases now; the first request is not to miss one
            own = {(slot.node_id, slot.generation) for slot in self.supervisor.slots}
            records = [record for record in self.directory.nodes() if (record.id, record.generation) in own]
            if records:
                break
            if time.monotonic() >= end:
                raise NodeUnavailable(f"Redis (option redis) did not tell of the nodes in {SEEN_TIMEOUT_S:g} s")
            await asyncio.sleep(SEEN_POLL_S)
        self.directory.show_only((record.model, record.fingerprint_digest) for record in records)

    @property
    def public_tls(self) -> TlsFolder | None:
        """What clients are served with; None: in the clear."""
        tls = self.identity.tls
        return tls if tls is not None and tls.is_public else None

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


async def _connect(identity: Identity, prefill: Slot, decode: Slot) -> None:
    async with identity.channel(prefill.address, "prefill") as channel:
        stub = node_pb2_grpc.PrefillNodeStub(channel)
        try:
            await stub.Connect(
                node_pb2.ConnectRequest(decode_address=decode.address),
                timeout=RPC_TIMEOUT_S,
                metadata=identity.metadata,
            )
        except grpc.aio.AioRpcError as error:
            pair = f"{prefill.node_id} and {decode.node_id}"
            if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                raise PairingRefused.from_text(f"{pair}: {error.details()}") from None
            raise NodeUnavailable(f"{pair} did not connect: {error.details()}") from None
