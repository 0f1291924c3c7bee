"""The control stream of a link, at the prefill node's end."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio

from kv_transfer.handoff.sender import HandoffSender
from kv_transfer.transports.rendezvous import LinkStore
from paceline.errors import NodeUnavailable
from paceline.rpc.identity import Identity
from paceline.serving.loop import notify
from paceline.v1 import handoff_pb2, node_pb2_grpc


class ControlStream:
    """The control stream of a link: messages out in order, acknowledgements in. It comes before the data pipe, whose
    ends tell each other over it where they are."""

    def __init__(self, address: str, identity: Identity, timeout_s: float) -> None:
        """ConfigError naming ``tls_dir``."""
        self.channel = identity.channel(address, "decode")
        self._identity = identity
        self.stub = node_pb2_grpc.DecodeNodeStub(self.channel)
        self.store = LinkStore(self._tell, timeout_s)
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._outgoing: asyncio.Queue[handoff_pb2.HandoffMessage] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._accepted: asyncio.Future[None] = self._loop.create_future()
        self._sender: HandoffSender | None = None  # once the link is open

    def post(self, message: handoff_pb2.HandoffMessage) -> None:
        """Queue a message. Thread-safe; bounded by the sender, which waits for the bytes of each."""
        notify(self._loop, self._outgoing.put_nowait, message)

    def open(self, link_id: str) -> None:
        """Claim the link; both directions run until the stream ends, which ends the link."""
        self._call = self.stub.Handoff(metadata=self._identity.metadata)
        self.post(handoff_pb2.HandoffMessage(hello=handoff_pb2.Hello(link_id=link_id)))
        self._tasks = [asyncio.create_task(self._write()), asyncio.create_task(self._read())]

    async def accepted(self, sender: HandoffSender) -> None:
        """Wait until the decode node's ends are open too; ``sender`` hears of the stream from now on. NodeUnavailable
        when it does not accept."""
        self._sender = sender
        async with asyncio.timeout(self._timeout_s):
            await asyncio.shield(self._accepted)

    def _tell(self, key: str, value: bytes) -> None:
        self.post(handoff_pb2.HandoffMessage(rendezvous=handoff_pb2.Rendezvous(key=key, value=value)))

    async def _write(self) -> None:
        try:
            while True:
                await self._call.write(await self._outgoing.get())
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the call is over: `_read` hears why, and ends the link

    async def _read(self) -> None:
        try:
            while isinstance(ack := await self._call.read(), handoff_pb2.HandoffAck):  # else the end of the stream
                self._take(ack)
        except grpc.aio.AioRpcError as error:
            self._end(f"control stream broke: {error.code()} {error.details()}")
        except ValueError as error:
            self._end(str(error))
        else:
            self._end("control stream ended")

    def _take(self, ack: handoff_pb2.HandoffAck) -> None:
        """ValueError when no decode node of ours says that."""
        match ack.WhichOneof("body"):
            case "rendezvous":
                self.store.receive(ack.rendezvous.key, ack.rendezvous.value)
            case "hello" if not self._accepted.done():
                self._accepted.set_result(None)
            case _ if self._sender is not None:
                self._sender.acknowledge(ack)

    def _end(self, reason: str) -> None:
        self.store.close(reason)
        if not self._accepted.done():
            self._accepted.set_exception(NodeUnavailable(reason))
            self._accepted.exception()  # read by now: nobody may be waiting for it
        if self._sender is not None:
            self._sender.link_lost(reason)

    async def close(self) -> None:
        """End the stream and its channel."""
        self.store.close("the link is closed")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.channel.close()
