"""Bytes to an RPC, and whether the answer is one that bytes may get."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from paceline.rpc.wire_errors import FIELD_KEY, RETRY_AFTER_KEY
from tests.fuzz.campaign import ANSWER_S, Wrongly
from tests.fuzz.grpc_calls import Rpc, Wrong

CHANNEL = [("grpc.max_receive_message_length", 64 << 20), ("grpc.max_send_message_length", 64 << 20)]
REFUSALS = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.RESOURCE_EXHAUSTED}
PRODUCT = "/paceline."  # our own services say which field is wrong


class Sender:
    """Sends over one channel."""

    def __init__(self, channel: grpc.aio.Channel, also: Collection[grpc.StatusCode] = ()) -> None:
        """also: codes that are answers here."""
        self._channel, self._allowed = channel, REFUSALS | set(also)

    async def send(self, wrong: Wrong) -> str:
        """The name of the answer's status. Raises Wrongly."""
        try:
            answers = [answer async for answer in self._answers(wrong.rpc, wrong.data)]
        except grpc.aio.AioRpcError as error:
            self._judge(wrong.rpc, error)
            return error.code().name
        for answer in answers:
            _parsed(wrong.rpc, answer)
        return "OK"

    async def _answers(self, rpc: Rpc, data: bytes) -> AsyncIterator[bytes]:
        kind = ("stream" if rpc.streams_in else "unary") + "_" + ("stream" if rpc.streams_out else "unary")
        call = getattr(self._channel, kind)(rpc.path)
        if not rpc.streams_out:
            yield await call(data, timeout=ANSWER_S)
            return
        stream = call(iter([data]) if rpc.streams_in else data, timeout=ANSWER_S)
        try:
            while (answer := await stream.read()) is not grpc.aio.EOF:
                yield answer
                if rpc.endless:
                    return
        finally:
            stream.cancel()

    def _judge(self, rpc: Rpc, error: grpc.aio.AioRpcError) -> None:
        code, details = error.code(), error.details() or ""
        metadata = dict(error.trailing_metadata() or ())
        said = f"{code.name} {details[:500]!r} {metadata}"
        if code not in self._allowed:
            raise Wrongly(said)
        if not rpc.path.startswith(PRODUCT):
            return
        if code is grpc.StatusCode.INVALID_ARGUMENT:
            name = str(metadata.get(FIELD_KEY, ""))
            if not name or not details.startswith(f"{name}: ") or len(details) < len(name) + 5:
                raise Wrongly(f"the field is not named: {said}")
        if code is grpc.StatusCode.NOT_FOUND and not details:
            raise Wrongly(f"nothing is said: {said}")
        if (
            code is grpc.StatusCode.RESOURCE_EXHAUSTED
            and RETRY_AFTER_KEY not in metadata
            and "larger than max" not in details
        ):
            raise Wrongly(f"it is not said when to come back: {said}")


def _parsed(rpc: Rpc, answer: bytes) -> Message:
    try:
        return rpc.answer.FromString(answer)
    except DecodeError as error:
        raise Wrongly(f"the answer is no {rpc.answer.__name__}: {error}") from None
