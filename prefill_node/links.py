"""Links of a prefill node, one per decode node, opened at first use and rebuilt under a new id when lost.

A link is three things that live and die together: the control stream (gRPC), the data pipe with its sender, and the
sentinel. Whichever breaks first reports to the sender, which fails the link's hand-offs; then the link is torn down
(aborted, never waited for).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

import grpc
import grpc.aio
import torch

from kv_transfer.handoff.block import ByteClass, RowBlock
from kv_transfer.handoff.sender import MAX_QUEUED_BYTES, HandoffSender
from kv_transfer.lanes.leader import Lanes, degree_of
from kv_transfer.lanes.pairing import degrees, make_lanes, open_with, wanted_by
from kv_transfer.layout.compat import check_pairing, decode_layout
from kv_transfer.layout.reshard import Side, reshard
from kv_transfer.layout.rows import RowSource
from kv_transfer.transports.base import MESSAGE_BYTES, NUM_BUFFERS, Transport
from kv_transfer.transports.registry import agreed_multiple, offered_bytes, open_transport, staging_device
from kv_transfer.transports.sentinel import Sentinel
from paceline.config import NodeConfig
from paceline.errors import NodeUnavailable, Overloaded, PacelineError
from paceline.kvcache.layout import KvLayout
from paceline.kvcache.pool import KvPool
from paceline.rpc.calls import error_from_peer
from paceline.rpc.identity import Identity
from paceline.serving.loop import notify
from paceline.v1 import handoff_pb2
from prefill_node.control import ControlStream
from prefill_node.feeder import RowFeeder

log = logging.getLogger(__name__)

MAX_LINKS = 256
CLOSE_TIMEOUT_S = 2.0  # each, for the threads of a link that ends


@dataclass(frozen=True)
class LinkContext:
    """What all links of a node share. ``ended(ticket, failure)`` is called on any thread, ``sent`` as HandoffSender's
    ``on_sent``."""

    node_id: str
    fingerprint: handoff_pb2.Fingerprint
    config: NodeConfig
    kv: KvPool
    identity: Identity
    ended: Callable[[str, str | None], None]
    sent: Callable[[handoff_pb2.HandoffMessage, float], None] | None = None

    @property
    def device(self) -> torch.device:
        """Where the transport reads from."""
        return staging_device(self.config.transport, self.kv.device)


class Link:
    """An open link; the jobs' `Carrier`. Made by `LinkPool`.

    What is to be sent goes to the feeder, which takes rows off the pool and passes everything on to the sender in
    order; the sender knows what became of it.
    """

    def __init__(
        self, link_id: str, decode_node_id: str, sender: HandoffSender, feeder: RowFeeder, sentinel: Sentinel
    ) -> None:
        self.link_id = link_id
        self.decode_node_id = decode_node_id
        self._sender = sender
        self._feeder = feeder
        self._sentinel = sentinel

    def groups(self, layers: range, num_tokens: int) -> tuple[range, ...]:
        """See `RowFeeder`."""
        return self._feeder.groups(layers, num_tokens)

    def begin(self, ticket: str, tokens: range, grant: bytes = b"") -> None:
        """See `RowFeeder`."""
        self._feeder.begin(ticket, tokens, grant)

    def rows(self, ticket: str, block: RowBlock, slots: torch.Tensor) -> None:
        """See `RowFeeder`."""
        self._feeder.rows(ticket, block, slots)

    def hidden_rows(self, ticket: str, rows: torch.Tensor, first_token: int) -> None:
        """See `RowFeeder`."""
        self._feeder.hidden_rows(ticket, rows, first_token)

    def state(self, ticket: str, state: handoff_pb2.State, hidden: torch.Tensor | None) -> None:
        """See `RowFeeder`."""
        self._feeder.state(ticket, state, hidden)

    def abort(self, ticket: str, reason: str) -> None:
        """See `RowFeeder`."""
        self._feeder.abort(ticket, reason)

    def bytes_sent(self, ticket: str) -> dict[ByteClass, int]:
        """See `HandoffSender`."""
        return self._sender.bytes_sent(ticket)

    def sending_s(self, ticket: str) -> float:
        """See `HandoffSender`."""
        return self._sender.sending_s(ticket)

    @property
    def alive(self) -> bool:
        """It can still be used."""
        return self._sender.alive

    def lost(self, reason: str) -> None:
        """The link is of no use any more: fail what is on it. From any thread."""
        self._sender.link_lost(reason)

    def close(self) -> None:
        """End the threads. Blocks for a few seconds at most."""
        if not self._sender.close(CLOSE_TIMEOUT_S):
            log.warning("link %s: a send is still blocked; its pages stay held until it returns", self.link_id)
        self._feeder.close(CLOSE_TIMEOUT_S)
        self._sentinel.close(CLOSE_TIMEOUT_S)


class LinkPool:
    """The node's links by decode address. Belongs to the event loop."""

    def __init__(self, context: LinkContext) -> None:
        self._context = context
        self._links: dict[str, tuple[Link, ControlStream]] = {}
        self._opening: dict[str, asyncio.Task[Link]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def get(self, address: str) -> Link:
        """The link to the decode node at ``address``, opened if need be; requests that need the same one share the
        attempt. Raises PairingRefused or NodeUnavailable."""
        entry = self._links.get(address)
        if entry is not None:
            if entry[0].alive:
                return entry[0]
            self._drop(address, None)  # it died before its loss could be told
        task = self._opening.get(address)
        if task is None:
            if len(self._links) + len(self._opening) >= MAX_LINKS:
                raise Overloaded(f"{MAX_LINKS} links are open on this prefill node")
            task = asyncio.create_task(self._open(address))
            self._opening[address] = task
            task.add_done_callback(lambda _: self._opening.pop(address, None))
        return await asyncio.shield(task)  # a caller that leaves does not end it for the others

    async def close(self) -> None:
        """Tear everything down; hand-offs in flight fail."""
        for task in list(self._opening.values()):
            task.cancel()
        await asyncio.gather(*self._opening.values(), return_exceptions=True)
        for address in list(self._links):
            self._drop(address, None)
        await asyncio.gather(*self._closing, return_exceptions=True)

    async def _open(self, address: str) -> Link:
        control = ControlStream(address, self._context.identity, self._context.config.transfer_timeout_s)
        try:
            link = await self._pair(address, control)
        except BaseException as error:
            await control.close()
            if isinstance(error, grpc.aio.AioRpcError):
                raise error_from_peer(error, f"decode node {address}") from error
            if isinstance(error, PacelineError) or not isinstance(error, Exception):
                raise
            raise NodeUnavailable(f"no link to decode node {address}: {error!r}") from error
        self._links[address] = link, control
        return link

    async def _pair(self, address: str, control: ControlStream) -> Link:
        """Pair, then open control stream, pipe and sentinel, in the order in which the decode node opens them."""
        context, config = self._context, self._context.config
        timeout = config.transfer_timeout_s
        offered = offered_bytes(config.transport, len(self._links) + len(self._opening) - 1)  # but for this one
        asked = handoff_pb2.PairRequest(
            prefill_node_id=context.node_id,
            fingerprint=context.fingerprint,
            ranks=degree_of(context.kv),
            rank_links=wanted_by(config),
            message_bytes=offered,
        )
        paired = await control.stub.Pair(asked, timeout=timeout, metadata=context.identity.metadata)
        check_pairing(context.fingerprint, paired.fingerprint, dtype_cast=config.handoff_dtype_cast)
        layouts = context.kv.layout, decode_layout(context.kv.layout, paired.fingerprint)
        control.open(paired.link_id)  # its first message comes before what the lanes tell their peers
        lanes = make_lanes(
            paired.link_id, degrees(asked, paired), layouts, context.kv, control.store, config, sends=True
        )
        rows = _source(context.kv, layouts, lanes)

        def open_own() -> Transport:
            return open_transport(
                config.transport, control.store, paired.link_id, 0, config.host, timeout, context.device,
                sealed=bool(config.tls_dir), multiple=agreed_multiple(offered, paired.message_bytes),
            )  # fmt: skip

        transport = await asyncio.to_thread(open_with, lanes, open_own)
        sender = self._sender(transport, control, address, paired.link_id)
        sentinel: Sentinel | None = None
        try:
            sentinel = await asyncio.to_thread(
                Sentinel,
                control.store,
                paired.link_id,
                0,
                config.host,
                timeout,
                sender.link_lost,
                lambda: sender.link_lost("the decode node closed the link"),
            )
            await control.accepted(sender)
        except BaseException:
            await asyncio.to_thread(sender.close, CLOSE_TIMEOUT_S)
            if sentinel is not None:
                await asyncio.to_thread(sentinel.close, CLOSE_TIMEOUT_S)
            raise
        feeder = RowFeeder(sender, rows, context.device, context.ended, lanes)
        return Link(paired.link_id, paired.decode_node_id, sender, feeder, sentinel)

    def _sender(self, transport: Transport, control: ControlStream, address: str, link_id: str) -> HandoffSender:
        context = self._context
        loop = asyncio.get_running_loop()
        return HandoffSender(
            transport,
            control.post,
            on_ended=lambda ticket, end: context.ended(ticket, _failure(end)),
            on_link_lost=lambda reason: notify(loop, self._lost, address, link_id, reason),
            on_sent=context.sent,
            max_queued_bytes=max(MAX_QUEUED_BYTES, NUM_BUFFERS * MESSAGE_BYTES * transport.multiple),
            checksums=context.config.handoff_checksum,
        )

    def _lost(self, address: str, link_id: str, reason: str) -> None:
        log.warning("link %s to decode node %s lost: %s", link_id, address, reason)
        self._drop(address, link_id)

    def _drop(self, address: str, link_id: str | None) -> None:
        """Forget the link and tear it down in the background."""
        entry = self._links.get(address)
        if entry is None or link_id not in (None, entry[0].link_id):
            return
        del self._links[address]
        task = asyncio.create_task(_tear_down(*entry))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


async def _tear_down(link: Link, control: ControlStream) -> None:
    await asyncio.to_thread(link.close)
    await control.close()


def _source(pool: KvPool, layouts: tuple[KvLayout, KvLayout], lanes: Lanes | None) -> RowSource:
    """What the link's own pipe carries: all rows, or with lanes those of rank 0 for rank 0."""
    if lanes is None:
        source, dest = layouts
        return RowSource(pool, reshard(Side(source), Side(dest)))
    return RowSource(lanes.own_pool, lanes.options.lead)


def _failure(end: handoff_pb2.HandoffAck | str) -> str | None:
    if isinstance(end, str):
        return end
    return None if end.WhichOneof("body") == "ready" else end.failed.reason or "refused"
