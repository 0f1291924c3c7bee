"""A router that joins a deployment: another process's nodes, with gRPC and HTTP of its own.

When it ends, or is killed, streams of the SDK and of clients that send ``Last-Event-ID`` go on at another router. It
starts no node and supervises none, until the process that does is lost: one that was given the deployment's Ray takes
over then, and goes on with the nodes that are there.
"""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import grpc.aio
import redis

from cluster.nodes.listening import split_address
from cluster.option_sets import ROUTER_OPTIONS, SHARED_OPTIONS
from cluster.parts import Parts, Tell
from cluster.serving_router import ServingRouter, check_front
from cluster.state.connection import check_url
from cluster.state.holder import DeploymentLease, Holder, read_holder
from cluster.state.published import SHARED_STATE, Published, read_published, say_routed, wait_for_published
from cluster.state.registry_types import NodeRecord, Registry
from cluster.supervision import Supervision, open_admin
from paceline.config import ServeConfig
from paceline.errors import ConfigError, NodeUnavailable
from paceline.role_options import ROLES, RoleOptions
from paceline.rpc.identity import Secret
from paceline.v1 import node_pb2, node_pb2_grpc

if TYPE_CHECKING:
    from cluster.nodes.admin import AdminServer

log = logging.getLogger(__name__)

SEEN_TIMEOUT_S = 10.0  # for a decode node of the deployment
SEEN_POLL_S = 0.1
FOLLOW_S = 2.0
SUCCEED_S = 0.25  # between two looks at the supervisor's lease
AGAIN_S = 5.0  # after a takeover that failed
RPC_TIMEOUT_S = 2.0  # for a node to answer that it is there


class JoinedRouter:
    """``start`` joins and serves, or raises; ``stop`` ends what was started."""

    def __init__(self, url: str, config: ServeConfig, tell: Tell | None = None) -> None:
        """url: of the deployment's Redis. config: of which ROUTER_OPTIONS count. Raises ConfigError."""
        if not config.secret_file:
            raise ConfigError("secret_file", "is needed: name the same file as the deployment does (--secret-file)")
        self._url, self._own = url, config
        self._parts = Parts(tell)
        self._secret = Secret.from_file(config.secret_file)
        self.admin_address = ""
        self._pointing: AdminServer | None = None
        self.problem = ""
        self.ended = asyncio.Event()  # by itself, for ``problem``

    async def start(self) -> None:
        """Join the deployment. On failure nothing is left running. Raises ConfigError, NodeUnavailable."""
        await self._parts.bring_up(self._start())

    async def _start(self) -> None:
        own = self._own
        await check_front(own)
        check_url("join", self._url)
        with self._parts.waiting_for(f"deployment {own.deployment}"):
            told = self._told = await wait_for_published(self._url, own.deployment)
        self.config = _joined_config(own, self._url, told)
        front = self.front = ServingRouter(self.config, self._parts, self._secret)
        front.identity.check()
        with self._parts.waiting_for("the front door's modules"):
            await front.prepare()
        if front.text_digest != told.text_digest:
            what = f"the tokenizer or the chat template of {self.config.model!r}"
            raise ConfigError("join", f"{what} here is not the deployment's")
        await front.watch(Registry(self._url, self.config.lease_ttl_s, own.deployment))
        front.directory.show_only(told.kinds)
        with self._parts.waiting_for("a decode node"):
            await self._meet_nodes()
        may_supervise = self._may_supervise(told)
        await front.open(told.served)
        await self._point()
        self._parts.at_end("admin", self._point_no_more)
        if may_supervise:
            succession = asyncio.create_task(self._succeed(), name="succession")
            self._parts.at_end("succession", partial(_cancelled, succession))
        following = asyncio.create_task(self.follow(), name="follow-deployment")
        self._parts.at_end("following the deployment", following.cancel)

    def _may_supervise(self, told: Published) -> bool:
        """Whether this router can take over; joins Ray for it. Raises ConfigError, NodeUnavailable."""
        if self._own.ray_address == "local":
            return False
        if told.options.get("ray_address") == "local":
            raise ConfigError("ray_address", "the deployment's Ray ends with its process: nobody can take over")
        from cluster.nodes.ray_session import start_ray, stop_ray

        with self._parts.waiting_for("Ray"):
            start_ray(self._own.ray_address)  # now: its loss is to cost no start of Ray
        self._parts.at_end("ray", stop_ray)
        return True

    async def _point(self) -> None:
        """Tell operators where the supervisor serves them, at the address that is this router's once it takes over.
        Raises ConfigError for an address that cannot be had."""
        if not self._own.admin:
            return
        from cluster.nodes.elsewhere import ElsewhereService

        find = partial(read_holder, self._url, self._own.deployment)
        self._pointing = await open_admin(ElsewhereService(find), self.front, self._own.admin)
        self.admin_address = f"{split_address(self._own.admin)[0]}:{self._pointing.port}"
        self._own = self._own.model_copy(update={"admin": self.admin_address})  # the same after a takeover

    async def _point_again(self) -> None:
        """After a takeover that failed, or ended."""
        try:
            if self._pointing is None:
                await self._point()
        except ConfigError as error:
            log.warning("operators are not told who supervises: %s", error)

    async def _point_no_more(self) -> None:
        if self._pointing is not None:
            await self._pointing.stop()
            self._pointing = None

    async def _succeed(self) -> None:
        """Wait until the supervisor is lost, take over, and go on until another process has taken over from here."""
        from cluster.nodes.ray_watch import RayThere

        loop, ray_there = asyncio.get_running_loop(), RayThere()
        while True:
            lost: asyncio.Future[str] = loop.create_future()
            holder = Holder(self.config.model)
            lease = DeploymentLease(self._url, self._own.deployment, holder, partial(_tell, loop, lost))
            while not (await ray_there.asked() and await self._taken(lease)):
                await asyncio.sleep(SUCCEED_S)
            parts = Parts()
            nodes = await self._supervise(lease, parts)
            if nodes is None:
                await asyncio.sleep(AGAIN_S)
            else:
                await nodes.supervisor.stand_down(await lost)
                await parts.close(grace_s=0)  # the operators' address above all: this router may take over again
            await self._point_again()

    async def _taken(self, lease: DeploymentLease) -> bool:
        try:
            return await asyncio.to_thread(lease.succeed)
        except redis.RedisError:  # nobody else can take it there either
            return False

    async def _supervise(self, lease: DeploymentLease, parts: Parts) -> Supervision | None:
        """Supervise the nodes from now on, until ``parts`` end. None: it failed, and another process may try."""
        log.warning("the supervisor of %s is lost; this router takes over", self._own.deployment)
        parts.at_end("deployment lease", lease.release)
        config = _whole_config(self._own, self._url, self._told)
        nodes = Supervision(self.front, self._secret, parts, lease, config, leaves=True)
        try:
            await nodes.start()
            await self._point_no_more()
            await nodes.open_admin()
        except BaseException as error:
            lease.leaves = True
            await parts.close(grace_s=0)
            if not isinstance(error, Exception):  # the router ends meanwhile
                raise
            log.exception("this router cannot supervise the nodes")
            return None
        self._parts.at_end("supervision", lambda: parts.close(self._parts.grace_s))
        lease.publish(self._told.to_json())
        return nodes

    async def follow(self) -> None:
        """Until the deployment is started anew with something that this router does not know. While it does, nodes
        know that a router is there."""
        while True:
            await asyncio.sleep(FOLLOW_S)
            try:
                await asyncio.to_thread(say_routed, self._url, self._own.deployment)
                told = await asyncio.to_thread(read_published, self._url, self._own.deployment)
            except redis.RedisError:
                continue
            except ConfigError:
                break
            if told not in (None, self._told):
                break
        self.problem = (
            f"deployment {self._own.deployment!r} was started anew with other options: start this router again"
        )
        self.ended.set()

    async def _meet_nodes(self) -> None:
        """Until a decode node answers, whichever, so that a router whom nodes refuse does not open. Others may be gone
        or stopped. Raises ConfigError when one refuses, NodeUnavailable when none answers in time."""
        end, last = time.monotonic() + SEEN_TIMEOUT_S, "none was seen"
        while time.monotonic() < end:
            await self.front.directory.refresh()
            found = [node for node in self.front.directory.nodes() if node.role == "decode"]
            said = await asyncio.gather(*(self._meet(node) for node in found))
            if "" in said:
                return
            last = "; ".join(said) or last
            if not found and (strangers := self.front.directory.strangers()):
                refused = f"{strangers[0]} refuses this router: it has another secret"
                raise ConfigError("secret_file", f"{refused}; it must be the deployment's")
            await asyncio.sleep(SEEN_POLL_S)
        raise NodeUnavailable(f"no decode node of the deployment answered within {SEEN_TIMEOUT_S:g} s: {last}")

    async def _meet(self, node: NodeRecord) -> str:
        """Ask a node. Returns why it did not answer; empty when it did. Raises ConfigError when it refuses."""
        identity = self.front.identity
        async with identity.channel(node.address, "decode") as channel:
            stub = node_pb2_grpc.DecodeNodeStub(channel)
            try:
                await stub.Status(node_pb2.StatusRequest(), timeout=RPC_TIMEOUT_S, metadata=identity.metadata)
            except grpc.aio.AioRpcError as error:
                if error.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
                    refused = f"{node.id} refuses this router: {error.details()}"
                    raise ConfigError("secret_file", f"{refused}; it must be the deployment's") from None
                return f"{node.id} at {node.address}: {error.details()}"
        return ""

    async def stop(self, grace_s: float) -> None:
        """End everything, newest first. Idempotent. grace_s: what runs may go on for so long."""
        await self._parts.close(grace_s)


async def _cancelled(task: asyncio.Task[None]) -> None:
    """Once a cancelled task has ended."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _tell(loop: asyncio.AbstractEventLoop, lost: asyncio.Future[str], who: str) -> None:
    """From the thread of a lease."""
    loop.call_soon_threadsafe(lost.set_result, who)


def _joined_config(own: ServeConfig, url: str, told: Published) -> ServeConfig:
    """The deployment's options, and this process's own. Which of the roles' options go together depends on whether
    there are prefill nodes. Raises ConfigError where this build cannot serve as that one does."""
    if told.state != SHARED_STATE:
        builds = f"the deployment runs Paceline {told.build}, this is {version('paceline')}"
        raise ConfigError("join", f"{builds}, and routers of the two keep different things in Redis")
    if told.keyed and not own.api_keys:
        raise ConfigError("api_keys", "are asked for by the deployment: name the same file as it does (--api-keys)")
    taken = SHARED_OPTIONS | {"prefill_nodes"}
    shared = {name: value for name, value in _known(told).items() if name in taken}
    return ServeConfig.model_validate(shared | own.model_dump(include=set(ROUTER_OPTIONS)) | {"redis": url})


def _whole_config(own: ServeConfig, url: str, told: Published) -> ServeConfig:
    """The same, with the options that say what nodes there are."""
    return ServeConfig.model_validate(_known(told) | own.model_dump(include=set(ROUTER_OPTIONS)) | {"redis": url})


def _known(told: Published) -> dict[str, Any]:
    """The deployment's options that this build has. Raises ConfigError for another one that was chosen there."""
    fields = ServeConfig.model_fields
    lacking = [name for name in told.options if name not in fields and name in told.chosen]
    for role in ROLES:
        lacking += [f"{role}_{name}" for name in told.options.get(role, {}) if name not in RoleOptions.model_fields]
    if lacking:
        builds = f"the deployment runs Paceline {told.build}, this is {version('paceline')}"
        raise ConfigError("join", f"this build has no option {lacking[0]!r}, which the deployment has: {builds}")
    return {name: value for name, value in told.options.items() if name in fields}
