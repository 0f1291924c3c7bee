"""A router that joins a deployment: another process's nodes, with gRPC and HTTP of its own.

It starts no node and supervises none. When it ends, or is killed, streams of the SDK and of clients that send
``Last-Event-ID`` go on at another router.
"""

from __future__ import annotations

import asyncio
import logging
import time
from importlib.metadata import version

import grpc.aio
import redis

from cluster.option_sets import ROUTER_OPTIONS, SHARED_OPTIONS
from cluster.parts import Parts, Tell
from cluster.serving_router import ServingRouter, check_front
from cluster.state.published import Published, read_published, wait_for_published
from cluster.state.registry_types import NodeRecord, Registry
from paceline.config import ServeConfig
from paceline.errors import ConfigError, NodeUnavailable
from paceline.rpc.identity import Secret
from paceline.v1 import node_pb2, node_pb2_grpc

log = logging.getLogger(__name__)

SEEN_TIMEOUT_S = 10.0  # for a decode node of the deployment
SEEN_POLL_S = 0.1
FOLLOW_S = 2.0
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
        self.problem = ""
        self.ended = asyncio.Event()  # by itself, for ``problem``

    async def start(self) -> None:
        """Join the deployment. On failure nothing is left running. Raises ConfigError, NodeUnavailable."""
        await self._parts.bring_up(self._start())

    async def _start(self) -> None:
        own = self._own
        await check_front(own)
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
        await front.open(told.served)
        following = asyncio.create_task(self.follow(), name="follow-deployment")
        self._parts.at_end("following the deployment", following.cancel)

    async def follow(self) -> None:
        """Until the deployment is started anew with something that this router does not know."""
        while True:
            await asyncio.sleep(FOLLOW_S)
            try:
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


def _joined_config(own: ServeConfig, url: str, told: Published) -> ServeConfig:
    """The deployment's options, and this process's own."""
    if told.build != version("paceline"):
        raise ConfigError("join", f"the deployment runs Paceline {told.build}, this is {version('paceline')}")
    shared = {name: value for name, value in told.options.items() if name in SHARED_OPTIONS}
    return ServeConfig.model_validate(shared | own.model_dump(include=set(ROUTER_OPTIONS)) | {"redis": url})
