"""A node process whose Ray is lost: it serves on, and is known by its process id and its address."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from contextlib import suppress

import grpc.aio
import psutil

from cluster.state.registry_types import NodeRecord
from paceline.rpc.identity import Identity
from paceline.v1 import node_pb2, node_pb2_grpc

log = logging.getLogger(__name__)

IDLE_POLL_S = 0.2
ASK_TIMEOUT_S = 2.0


class NodeProcess:
    """``pid`` is 0 where it runs on another host: nothing but its own fence can end it there."""

    def __init__(self, record: NodeRecord, identity: Identity) -> None:
        """record: what the registry knows of the node. identity: of who asks it."""
        self.role, self.address, self._identity = record.role, record.address, identity
        self._process: psutil.Process | None = None
        self._gone = False
        if record.hostname == socket.gethostname():
            try:
                self._process = _listener(record.pid, record.address)
            except psutil.NoSuchProcess:
                self._gone = True
            except psutil.AccessDenied:
                log.warning("process %d of %s may not be looked at; it is left to itself", record.pid, record.id)

    @property
    def pid(self) -> int:
        """Its process id; 0 where it runs on another host, or is gone."""
        return self._process.pid if self._process is not None else 0

    def died(self) -> bool:
        """Whether the process is gone; false where nobody can say."""
        if self._process is None:
            return self._gone
        try:
            return not self._process.is_running() or self._process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    async def idle(self, grace_s: float) -> None:
        """Until nothing runs there any more, for at most ``grace_s``. New requests may still come meanwhile."""
        end = time.monotonic() + grace_s
        while not self.died() and time.monotonic() < end and await self._works():
            await asyncio.sleep(IDLE_POLL_S)

    async def _works(self) -> bool:
        decodes = self.role == "decode"
        async with self._identity.channel(self.address, "decode" if decodes else "prefill") as channel:
            stub = node_pb2_grpc.DecodeNodeStub(channel) if decodes else node_pb2_grpc.PrefillNodeStub(channel)
            request, metadata = node_pb2.StatusRequest(), self._identity.metadata
            try:
                status = await stub.Status(request, timeout=ASK_TIMEOUT_S, metadata=metadata)
            except grpc.aio.AioRpcError:
                return False
        return bool(status.held + status.node.running + status.node.waiting)

    def kill(self) -> None:
        """End the process now, and those that it has started. Never raises."""
        if self._process is None:
            log.warning("the node at %s is on another host, and its Ray is lost: its successor ends it", self.address)
            return
        with suppress(psutil.NoSuchProcess):
            below = self._process.children(recursive=True)
            self._process.kill()
            for child in below:
                with suppress(psutil.NoSuchProcess):
                    child.kill()


def _listener(pid: int, address: str) -> psutil.Process:
    """The process that listens at a node's address. Its record proves its address and nothing else: a process id that
    somebody else wrote there must end no other process. Raises NoSuchProcess, AccessDenied."""
    process, port = psutil.Process(pid), int(address.rpartition(":")[2])
    listens = (each.laddr.port for each in process.net_connections("tcp") if each.status == psutil.CONN_LISTEN)
    if port not in listens:
        raise psutil.NoSuchProcess(pid)
    return process
