"""Links of a decode node, one per paired prefill node.

    PAIRED --Hello on a control stream--> CLAIMED --both ends opened pipe and sentinel--> OPEN --anything breaks--> gone
       |                                     |
       +--- unclaimed at its deadline -------+--- the peer does not open its ends --------------------------------> gone

The control stream comes first: over it the two ends tell each other where pipe and sentinel are (rendezvous.py). A link
is never repaired: the prefill node pairs again and gets a new id.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from decode_node.link import Link
from decode_node.permits import Permits
from decode_node.sink import ReservedPages
from kv_transfer.handoff.receiver import HandoffReceiver
from kv_transfer.lanes.arrivals import Arrivals
from kv_transfer.lanes.leader import degree_of
from kv_transfer.lanes.pairing import degrees, make_lanes, open_with, wanted_by
from kv_transfer.layout.compat import check_pairing, handoff_layout
from kv_transfer.transports.base import MESSAGE_BYTES, MessageRefused, Transport
from kv_transfer.transports.registry import agreed_multiple, offered_bytes, open_transport, staging_device
from kv_transfer.transports.rendezvous import LinkStore
from kv_transfer.transports.sentinel import Sentinel
from paceline.config import NodeConfig
from paceline.errors import InvalidRequest, NodeUnavailable, Overloaded, PacelineError, PermissionDenied, quoted
from paceline.rpc.audit import Audit
from paceline.serving.loop import notify
from paceline.v1 import handoff_pb2

log = logging.getLogger(__name__)

MAX_LINKS = 256
MAX_OPENING = 16  # threads that wait for peers
MAX_ID_CHARS = 256
REFUSAL_S = 0.2  # for the status of a control stream to arrive
CLOSE_TIMEOUT_S = 2.0  # each, for the threads of a link that ends
CLOSED = "the prefill node closed the link"  # in order: not worth a warning


@dataclass(frozen=True)
class HostContext:
    """What all links of a node share."""

    node_id: str
    fingerprint: handoff_pb2.Fingerprint
    config: NodeConfig
    device: torch.device  # of the pool
    sink: ReservedPages
    permits: Permits


class LinkHost:
    """Pairs with prefill nodes and receives their hand-offs. Belongs to the event loop, but ``cancel`` and ``fail``
    may be called from any thread."""

    def __init__(self, context: HostContext) -> None:
        self._context = context
        self._links: dict[str, Link] = {}
        self._threads = ThreadPoolExecutor(MAX_OPENING, thread_name_prefix="link-open")
        self._closing: set[asyncio.Task[None]] = set()
        self._audit = Audit()
        self.refused = 0  # hand-offs that no router had given to who began them
        self.refused_messages = 0  # and bytes of rows, that no prefill node of ours sends
        self._counting = threading.Lock()  # receivers refuse on threads of their own

    # -- what the prefill node calls -----------------------------------------------------------------------------

    async def pair(self, request: handoff_pb2.PairRequest) -> handoff_pb2.PairResponse:
        """Check fingerprints; the link then waits for its control stream. Raises PairingRefused or Overloaded."""
        context, config = self._context, self._context.config
        check_pairing(request.fingerprint, context.fingerprint, dtype_cast=config.handoff_dtype_cast)
        if len(self._links) >= MAX_LINKS:
            raise Overloaded(f"{MAX_LINKS} links are open on this decode node")
        if len(request.prefill_node_id) > MAX_ID_CHARS or not request.prefill_node_id.isprintable():  # it is logged
            raise InvalidRequest("prefill_node_id", f"must be at most {MAX_ID_CHARS} printable characters")
        answer = handoff_pb2.PairResponse(
            fingerprint=context.fingerprint,
            decode_node_id=context.node_id,
            ranks=degree_of(context.sink.pool),
            rank_links=wanted_by(config),
        )
        ranks = degrees(request, answer)
        link_id = f"{request.prefill_node_id}/{context.node_id}/{uuid.uuid4().hex}"
        deadline = time.monotonic() + 2 * config.transfer_timeout_s
        multiple = agreed_multiple(offered_bytes(config.transport, len(self._links)), request.message_bytes)
        multiple = multiple if ranks is None else 1  # lanes have messages of one size
        link = Link(link_id, request.prefill_node_id, deadline, asyncio.get_running_loop(), multiple, ranks=ranks)
        link.store = LinkStore(
            lambda key, value: link.ack(
                handoff_pb2.HandoffAck(rendezvous=handoff_pb2.Rendezvous(key=key, value=value))
            ),
            config.transfer_timeout_s,
        )
        self._links[link_id] = link
        answer.link_id, answer.message_bytes = link_id, multiple * MESSAGE_BYTES
        return answer

    async def handoff(
        self, messages: AsyncIterable[handoff_pb2.HandoffMessage], address: str
    ) -> AsyncGenerator[handoff_pb2.HandoffAck, None]:
        """Serve the control stream of one link until either side ends it. address: of the other side, for the audit."""
        incoming = aiter(messages)
        try:
            async with asyncio.timeout(self._context.config.transfer_timeout_s):
                hello = await anext(incoming)
        except (TimeoutError, StopAsyncIteration):
            raise NodeUnavailable("the control stream did not begin with Hello") from None
        link = self._links.get(hello.hello.link_id)
        if hello.WhichOneof("body") != "hello" or link is None or link.opening is not None:
            raise NodeUnavailable(f"no link {quoted(hello.hello.link_id)} waits for a control stream")
        link.opening = link.loop.run_in_executor(self._threads, self._open, link, hello)
        link.opening.add_done_callback(lambda done: self._opened(link, done))
        reader = asyncio.create_task(self._feed(incoming, link, address))
        try:
            while (ack := await link.acks.get()) is not None:
                yield ack
            if link.problem is not None:
                raise link.problem
        finally:
            reader.cancel()
            if not isinstance(link.problem, PermissionDenied):
                self._drop(link, "the control stream ended")

    # -- what the engine and the timer call ----------------------------------------------------------------------

    def cancel(self, link_id: str, ticket: str) -> None:
        """Tell the sender of ``ticket`` that nobody wants it any more."""
        receiver = self._receiver(link_id)
        if receiver is not None:
            receiver.cancel(ticket)

    def fail(self, link_id: str, ticket: str, reason: str) -> None:
        """End the hand-off of ``ticket`` now."""
        receiver = self._receiver(link_id)
        if receiver is not None:
            receiver.fail(ticket, reason)

    def expire(self) -> None:
        """Drop the links that nobody claimed in time."""
        now = time.monotonic()
        for link in list(self._links.values()):
            if link.opening is None and link.deadline <= now:
                self._drop(link, f"unclaimed by {link.peer}")

    async def close(self) -> None:
        """Tear everything down; hand-offs in flight fail."""
        for link in list(self._links.values()):
            self._drop(link, "the decode node stops")
        await asyncio.gather(*self._closing, return_exceptions=True)
        await asyncio.to_thread(self._threads.shutdown)

    # -- insides -------------------------------------------------------------------------------------------------

    def _receiver(self, link_id: str) -> HandoffReceiver | None:
        """None once the link is gone: its receiver has failed, or is about to fail, every ticket by itself."""
        link = self._links.get(link_id)
        return None if link is None else link.receiver

    def _open(self, link: Link, hello: handoff_pb2.HandoffMessage) -> None:
        """Open pipe and sentinel, in the order in which the prefill node does, then answer its Hello; blocks until it
        has opened its own."""
        context, config = self._context, self._context.config
        device = staging_device(config.transport, context.device)
        timeout = config.transfer_timeout_s
        layout = handoff_layout(context.sink.pool.layout, context.fingerprint)
        lanes = make_lanes(
            link.link_id, link.ranks, (layout, layout), context.sink.pool, link.store, config, sends=False
        )

        arrivals = None if lanes is None else Arrivals(lanes)

        def open_own() -> Transport:
            return open_transport(
                config.transport, link.store, link.link_id, 1, config.host, timeout, device,
                sealed=bool(config.tls_dir), multiple=link.multiple,
            )  # fmt: skip

        receiver = HandoffReceiver(
            open_with(lanes, open_own),
            context.sink.over(arrivals),
            link.ack,
            link_id=link.link_id,
            on_link_lost=lambda reason: self._lost(link, reason),
            device=device,
            pool_device=context.device,
            checksums=config.handoff_checksum,
            arrivals=arrivals,
            on_refused=self._note_refused,
        )
        try:
            link.sentinel = Sentinel(
                link.store,
                link.link_id,
                1,
                config.host,
                timeout,
                receiver.link_lost,
                lambda: receiver.link_lost(CLOSED),
            )
        except PacelineError:
            receiver.close(CLOSE_TIMEOUT_S)
            raise
        link.receiver = receiver
        receiver.feed(hello)

    async def _feed(self, messages: AsyncIterator[handoff_pb2.HandoffMessage], link: Link, address: str) -> None:
        """Take what comes on the control stream; when it cannot go on, neither does the link."""
        try:
            async for message in messages:
                self._context.permits.check(link.peer, message)
                _take(message, link)
        except PermissionDenied as error:
            self.refused += 1
            self._audit.refused(address, "", f"hand-off on link {link.link_id}", str(error))
            link.refuse(error)
            link.loop.call_later(REFUSAL_S, self._drop, link, str(error))
        except PacelineError as error:
            if isinstance(error, MessageRefused):
                self._note_refused()
            link.end(NodeUnavailable(f"control stream: {error}"))
        except Exception as error:  # gRPC's own, when the peer vanished
            link.end(NodeUnavailable(f"control stream broke: {error!r}"))
        else:
            link.end(NodeUnavailable("control stream ended"))

    def _note_refused(self) -> None:
        """From any thread."""
        with self._counting:
            self.refused_messages += 1

    def _opened(self, link: Link, done: asyncio.Future[None]) -> None:
        if not done.cancelled() and (error := done.exception()) is not None:
            link.end(NodeUnavailable(f"link {link.link_id} did not open: {error}"))
            self._drop(link, f"{link.peer} did not come: {error}")

    def _lost(self, link: Link, reason: str) -> None:
        """The receiver's thread has failed every ticket of the link and ends."""
        level = logging.INFO if reason == CLOSED else logging.WARNING
        log.log(level, "link %s from prefill node %s lost: %s", link.link_id, link.peer, reason)
        link.ack(None)
        notify(link.loop, self._drop, link, reason)

    def _drop(self, link: Link, reason: str) -> None:
        """Forget the link and tear it down in the background."""
        if self._links.pop(link.link_id, None) is None:
            return
        log.debug("link %s dropped: %s", link.link_id, reason)
        task = asyncio.create_task(self._tear_down(link, reason))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _tear_down(self, link: Link, reason: str) -> None:
        link.store.close(reason)
        if link.opening is not None:
            await asyncio.wait([link.opening])  # bounded by its own timeouts
        link.acks.put_nowait(None)
        await asyncio.to_thread(_close, link, reason)


def _close(link: Link, reason: str) -> None:
    if link.receiver is not None:
        link.receiver.link_lost(reason)
        if not link.receiver.close(CLOSE_TIMEOUT_S):
            log.warning("link %s: a receive is still blocked; its pages stay held until it returns", link.link_id)
    if link.sentinel is not None:
        link.sentinel.close(CLOSE_TIMEOUT_S)


def _take(message: handoff_pb2.HandoffMessage, link: Link) -> None:
    """One message of the control stream. PacelineError when it ends the link."""
    if message.WhichOneof("body") == "rendezvous":
        try:
            link.store.receive(message.rendezvous.key, message.rendezvous.value)
        except ValueError as error:
            raise MessageRefused(str(error)) from None
    elif link.receiver is None:
        raise MessageRefused("a message came before the link was open")
    else:
        link.receiver.feed(message)
