"""The router's calls to nodes: one channel per address, streams that say who failed and how."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio

from cluster.state.registry_types import NodeRecord
from paceline.errors import ConfigError, NodeUnavailable, PacelineError, PermissionDenied
from paceline.rpc.grants import Grants
from paceline.rpc.identity import Identity
from paceline.rpc.tls import Stamp
from paceline.rpc.wire_errors import error_from_rpc
from paceline.v1 import node_pb2, node_pb2_grpc, trace_pb2

E = TypeVar("E", node_pb2.PrefillEvent, node_pb2.DecodeEvent)


class NodeFailure(Exception):
    """A node did not do its part. ``gone``: the connection is, not only this call."""

    def __init__(self, node: NodeRecord, error: PacelineError, gone: bool = False) -> None:
        super().__init__(f"{node.id}: {error}")
        self.node = node
        self.error = error
        self.gone = gone


def _of_node(error: PacelineError) -> PacelineError:
    """A node that does not let this router call is a fault of the deployment, not of the client's rights."""
    return NodeUnavailable(str(error)) if isinstance(error, PermissionDenied) else error


@dataclass
class _Line:
    """A channel, which has the certificates of when it was made, and the calls in progress on it."""

    channel: grpc.aio.Channel
    stamp: Stamp
    calls: int = 0


class NodeStream(Generic[E]):
    """One streaming call. Its user closes it, which cancels what is left."""

    def __init__(self, call: Any, node: NodeRecord, line: _Line, calls: NodeCalls, tokens: int = 0) -> None:
        """tokens: of the prompt that the node is to compute."""
        self.node = node
        self._load: int | None = tokens  # None: no longer counted
        self._call, self._line, self._owner = call, line, calls
        self._ahead: asyncio.Task[E | None] | None = None

    async def next(self) -> E | None:
        """The next event, None at the end. Raises NodeFailure."""
        if self._ahead is None:
            return await self._read()
        task, self._ahead = self._ahead, None
        return await task

    def read_ahead(self) -> asyncio.Task[E | None]:
        """A task whose result ``next`` will return: something to wait on beside other things."""
        if self._ahead is None:
            self._ahead = asyncio.create_task(self._read())
            self._ahead.add_done_callback(lambda task: task.cancelled() or task.exception())
        return self._ahead

    async def failure_within(self, seconds: float) -> NodeFailure | None:
        """The failure of this stream if it has one now or soon; otherwise nothing is lost of it."""
        task = self.read_ahead()
        await asyncio.wait({task}, timeout=seconds)
        error = task.exception() if task.done() and not task.cancelled() else None
        return error if isinstance(error, NodeFailure) else None

    async def _read(self) -> E | None:
        line = self._line  # ``close`` may come before the answer
        try:
            event = await self._call.read()
        except grpc.aio.AioRpcError as error:
            known = _of_node(error_from_rpc(error, self.node.id))
            state = line.channel.get_state()
            gone = isinstance(known, NodeUnavailable) and state is not grpc.ChannelConnectivity.READY
            raise NodeFailure(self.node, known, gone) from None
        return None if event is grpc.aio.EOF else event

    def computed(self) -> None:
        """The node's own work is done, though the stream goes on: it no longer counts as load. Idempotent."""
        if self._load is not None:
            self._owner.relieved(self.node, self._load)
            self._load = None

    def close(self) -> None:
        """Cancel what is left. Idempotent."""
        if self._line is None:
            return
        self.computed()
        self._call.cancel()
        if self._ahead is not None:
            self._ahead.cancel()
        self._line.calls -= 1
        self._line = None  # type: ignore[assignment]


@dataclass
class NodeCalls:
    """Opens streams; counts those in progress by node id, which is the router's own view of load.

    identity: who calls. grants: the router's word for hand-offs; None where nodes check none.
    """

    own: Counter[str] = field(default_factory=Counter)
    own_tokens: Counter[str] = field(default_factory=Counter)  # of prompts that prefill nodes have still to compute
    identity: Identity = field(default_factory=lambda: Identity("router"))
    grants: Grants | None = None
    _lines: dict[str, _Line] = field(default_factory=dict)
    _renewed: dict[str, _Line] = field(default_factory=dict)  # to take the place of a line once connected
    _old: list[_Line] = field(default_factory=list)

    def decode(
        self, node: NodeRecord, request: node_pb2.DecodeRequest, timeout_s: float
    ) -> NodeStream[node_pb2.DecodeEvent]:
        """Start DecodeNode.Decode."""
        line = self._line(node)
        stub = node_pb2_grpc.DecodeNodeStub(line.channel)
        return self._started(stub.Decode(request, timeout=timeout_s, metadata=self.identity.metadata), node, line)

    def prefill(
        self, node: NodeRecord, request: node_pb2.PrefillRequest, timeout_s: float, cached_tokens: int = 0
    ) -> NodeStream[node_pb2.PrefillEvent]:
        """Start PrefillNode.Prefill. cached_tokens: what the node is thought not to have to compute."""
        line = self._line(node)
        stub = node_pb2_grpc.PrefillNodeStub(line.channel)
        tokens = len(request.sequence.prompt_token_ids) + len(request.sequence.output_token_ids)
        return self._started(
            stub.Prefill(request, timeout=timeout_s, metadata=self.identity.metadata),
            node,
            line,
            max(tokens - cached_tokens, 0),
        )

    async def trace(self, node: NodeRecord, asked: trace_pb2.TraceRequest, timeout_s: float) -> trace_pb2.TraceResponse:
        """What the node keeps of a request. Raises NodeFailure."""
        decodes = node.role == "decode"
        stub: Any = node_pb2_grpc.DecodeNodeStub if decodes else node_pb2_grpc.PrefillNodeStub
        answer: trace_pb2.TraceResponse = await self._asked(node, lambda channel: stub(channel).Trace, asked, timeout_s)
        return answer

    async def recall(
        self, node: NodeRecord, asked: node_pb2.RecallRequest, timeout_s: float
    ) -> node_pb2.RecallResponse:
        """The tokens that a decode node made of sequences. Raises NodeFailure."""
        stub: Any = node_pb2_grpc.DecodeNodeStub
        answer: node_pb2.RecallResponse = await self._asked(
            node, lambda channel: stub(channel).Recall, asked, timeout_s
        )
        return answer

    async def _asked(self, node: NodeRecord, method: Callable[[Any], Any], asked: Any, timeout_s: float) -> Any:
        line = self._line(node)
        line.calls += 1  # it is not load, but its channel must stay
        try:
            return await method(line.channel)(asked, timeout=timeout_s, metadata=self.identity.metadata)
        except grpc.aio.AioRpcError as error:
            raise NodeFailure(node, _of_node(error_from_rpc(error, node.id))) from None
        finally:
            line.calls -= 1

    def _started(self, call: Any, node: NodeRecord, line: _Line, tokens: int = 0) -> NodeStream[Any]:
        line.calls += 1
        self.own[node.id] += 1
        self.own_tokens[node.id] += tokens
        return NodeStream(call, node, line, self, tokens)

    def grant(self, ticket: str, nodes: tuple[str, str], cache_salt: str, lasts_s: float) -> bytes:
        """The word that a prefill node may deliver a ticket. nodes: ids of prefill and decode."""
        return b"" if self.grants is None else self.grants.sign(ticket, *nodes, cache_salt, lasts_s)

    def _line(self, node: NodeRecord) -> _Line:
        line = self._lines.get(node.address)
        if line is None:
            line = self._lines[node.address] = self._make_line(node)
        try:
            stamp = self.identity.stamp()
            return line if stamp == line.stamp else self._renew(node, line, stamp)
        except ConfigError:  # a file is being replaced
            return line

    def _make_line(self, node: NodeRecord) -> _Line:
        stamp = self.identity.stamp()
        return _Line(self.identity.channel(node.address, "decode" if node.role == "decode" else "prefill"), stamp)

    def _renew(self, node: NodeRecord, line: _Line, stamp: Stamp) -> _Line:
        """The certificates are new: connect with them, and go over to that connection once it is there."""
        renewed = self._renewed.get(node.address)
        if renewed is None or renewed.stamp != stamp:  # it may be of files that did not fit together yet
            made = self._make_line(node)
            self._old += [renewed] if renewed is not None else []
            renewed = self._renewed[node.address] = made
        if renewed.channel.get_state(try_to_connect=True) is not grpc.ChannelConnectivity.READY:
            return line
        self._lines[node.address] = self._renewed.pop(node.address)
        self._old.append(line)
        return renewed

    def connected(self, node: NodeRecord) -> bool:
        """Whether there is a connection to the node, over which it has spoken. Where there is none, one is tried for
        from now on, again and again."""
        return self._line(node).channel.get_state(try_to_connect=True) is grpc.ChannelConnectivity.READY

    def relieved(self, node: NodeRecord, tokens: int) -> None:
        """A call is no load any more."""
        self.own[node.id] -= 1
        self.own_tokens[node.id] -= tokens
        if not self.own[node.id]:
            del self.own[node.id], self.own_tokens[node.id]

    async def prune(self, alive: set[str]) -> None:
        """Close the idle channels of addresses that are no longer served, and those with old certificates."""
        gone = [a for a, line in self._lines.items() if a not in alive and not line.calls]
        idle = [self._lines.pop(address) for address in gone]
        idle += [self._renewed.pop(address) for address in gone if address in self._renewed]
        idle += [line for line in self._old if not line.calls]
        self._old = [line for line in self._old if line.calls]
        for line in idle:
            await line.channel.close()

    async def close(self) -> None:
        """Close every channel; calls in progress are cancelled."""
        lines = [*self._lines.values(), *self._renewed.values(), *self._old]
        self._lines, self._renewed, self._old = {}, {}, []
        for line in lines:
            await line.channel.close()
