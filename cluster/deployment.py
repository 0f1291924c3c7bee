"""A whole deployment in one process tree: registry, nodes under Ray, router, gRPC and HTTP in front."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from importlib.metadata import version

import grpc.aio
import redis

from cluster.nodes.addresses import own_address
from cluster.nodes.listening import warn_of_clear_nodes
from cluster.nodes.node_logs import NodeLogs
from cluster.nodes.slots import Slot
from cluster.option_sets import ROUTER_OPTIONS
from cluster.parts import Parts, Tell
from cluster.role_check import check_roles
from cluster.serving_router import ServingRouter, check_front, import_front_door
from cluster.state.embedded_redis import EmbeddedRedis
from cluster.state.holder import DeploymentLease, Holder
from cluster.state.published import SHARED_STATE, Published, Served, say_routed
from cluster.state.registry_types import Registry
from cluster.supervision import Supervision, nodes_outlive
from paceline.assembly.shipped import with_real_drafter
from paceline.config import ServeConfig
from paceline.errors import ConfigError, NodeUnavailable, PairingRefused
from paceline.role_options import ROLES
from paceline.rpc.identity import Identity, Secret
from paceline.v1 import node_pb2, node_pb2_grpc

log = logging.getLogger(__name__)

RPC_TIMEOUT_S = 30.0
SEEN_TIMEOUT_S = 10.0  # for a Redis that is away for a moment
SEEN_POLL_S = 0.1
ROUTED_S = 2.0  # between two times that a router which supervises no more says that it is there


class Deployment:
    """``start`` brings everything up or raises; ``stop`` ends everything that was started, in reverse."""

    def __init__(self, config: ServeConfig, tell: Tell | None = None) -> None:
        """tell: called with what the start is waiting for. Raises ConfigError when the heads that ``default`` would
        draft with cannot be told."""
        self.config = with_real_drafter(config)  # once, for nodes, requests, ModelInfo and metrics alike
        self._parts = Parts(tell)
        self._secret = Secret.from_file(config.secret_file)
        self.front = ServingRouter(self.config, self._parts, self._secret)
        self.admin_address = ""
        self.problem = ""
        self.ended = asyncio.Event()  # never by itself

    async def start(self) -> None:
        """Bring everything up. On failure nothing is left running."""
        await self._parts.bring_up(self._start())

    async def _start(self) -> None:
        config, front = self.config, self.front
        await check_front(config)
        front.identity.check()
        await asyncio.to_thread(check_roles, config)
        imported = asyncio.get_running_loop().run_in_executor(None, import_front_door)  # while Ray starts
        if config.redis:
            await self._hold(config.redis)  # before anything of another holder's could be touched
        with self._parts.waiting_for("Ray"):
            self._start_ray()
        registry = Registry(config.redis or await self._start_redis(), config.lease_ttl_s, config.deployment)
        with self._parts.waiting_for("the front door's modules"):
            await imported
            await front.prepare()
        node_logs = NodeLogs()
        self._parts.at_end("node logs", node_logs.close)  # after the nodes, for their last words
        await front.watch(registry)
        nodes = self.nodes = Supervision(front, self._secret, self._parts, self._lease, config, config.leave_nodes)
        await nodes.start()
        standing_down = asyncio.create_task(self._stand_down(), name="stand-down")
        self._parts.at_end("stand-down", standing_down.cancel)
        kinds = await self._show_own_nodes()
        front.directory.on_change(node_logs.follow)
        node_logs.follow(front.directory.nodes())
        addresses = [slot.address for slot in nodes.supervisor.slots if slot.address]
        warn_of_clear_nodes(addresses, parts_tls=front.identity.tls is not None)
        with self._parts.waiting_for("nodes to pair"):
            served = await self._introduce(nodes.supervisor.slots)
        await front.open(served)
        await nodes.open_admin()
        self.admin_address = nodes.admin_address
        self._lease.publish(published_of(config, served, kinds, front.text_digest).to_json())

    def _start_ray(self) -> None:
        """On this thread: the kernel ends Ray's processes with the thread that started them."""
        from cluster.nodes.ray_session import start_ray, stop_ray

        config = self.config
        start_ray(config.ray_address, config.prefill_nodes + config.decode_nodes)
        self._parts.at_end("ray", stop_ray)

    async def _start_redis(self) -> str:
        """A Redis of this deployment's own, held; returns its URL."""
        config = self.config
        if config.ray_address == "local":
            server = EmbeddedRedis()
        else:  # nodes may be on other hosts
            server = EmbeddedRedis(tcp=True, host=own_address(config.host, config.node_interface))
        self._parts.at_end("redis", server.close)
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
        self._parts.at_end("deployment lease", lease.release)
        with self._parts.waiting_for("the deployment's lease"):
            await asyncio.to_thread(lease.acquire)
        self._lease, self._successor = lease, successor
        if self.config.redis and not nodes_outlive(self.config):
            log.warning("no router can take over the nodes: they end with this process, and so does its Ray")
        if self.config.leave_nodes and not nodes_outlive(self.config):
            raise ConfigError("leave_nodes", "needs a Ray and a Redis that go on too (--ray-address, --redis)")

    async def _stand_down(self) -> None:
        """Another process supervises from now on. This one routes on, and nodes know that a router is there."""
        await self.nodes.supervisor.stand_down(await asyncio.shield(self._successor))
        while self.config.redis:
            with suppress(redis.RedisError):
                await asyncio.to_thread(say_routed, self.config.redis, self.config.deployment)
            await asyncio.sleep(ROUTED_S)

    async def _introduce(self, slots: list[Slot]) -> Served:
        """Pair every prefill node with every decode node now, so that a mismatch shows before the first request."""
        prefills = [slot for slot in slots if slot.role == "prefill" and slot.address]
        decodes = [slot for slot in slots if slot.role == "decode" and slot.address]
        identity = self.front.identity
        await asyncio.gather(*(_connect(identity, p, d) for p in prefills for d in decodes))
        async with identity.channel(decodes[0].address, "decode") as channel:
            stub = node_pb2_grpc.DecodeNodeStub(channel)
            status = await stub.Status(node_pb2.StatusRequest(), timeout=RPC_TIMEOUT_S, metadata=identity.metadata)
        made_of = status.fingerprint
        return Served(status.max_model_len, status.vocab_size, status.bit_exact, made_of.weights, made_of.kernels)

    async def _show_own_nodes(self) -> list[tuple[str, str]]:
        """See the nodes that have started, and from now on none that serve something else, whatever their name is.
        Returns their models and fingerprint digests."""
        end = time.monotonic() + SEEN_TIMEOUT_S
        while True:
            await self.front.directory.refresh()  # they have their leases now; the first request is not to miss one
            own = {(slot.node_id, slot.generation) for slot in self.nodes.supervisor.slots}
            records = [record for record in self.front.directory.nodes() if (record.id, record.generation) in own]
            if records:
                break
            if time.monotonic() >= end:
                raise NodeUnavailable(f"Redis (option redis) did not tell of the nodes in {SEEN_TIMEOUT_S:g} s")
            await asyncio.sleep(SEEN_POLL_S)
        kinds = sorted({(record.model, record.fingerprint_digest) for record in records})
        self.front.directory.show_only(kinds)
        return kinds

    async def stop(self, grace_s: float) -> None:
        """End everything, newest first; each part has its own deadline. Idempotent.

        grace_s: what runs may go on for so long."""
        await self._parts.close(grace_s)


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


def published_of(config: ServeConfig, served: Served, kinds: list[tuple[str, str]], text_digest: str) -> Published:
    """What this build tells routers that join a deployment with these options."""
    options = config.model_dump(exclude={*ROUTER_OPTIONS, "redis"} - {"ray_address"}, mode="json")
    options |= {role: getattr(config, role).given() for role in ROLES}
    chosen = [name for name in config.chosen if name in options]
    build, keyed = version("paceline"), bool(config.api_keys)
    return Published(build, options, served, kinds, text_digest, SHARED_STATE, chosen, keyed)
