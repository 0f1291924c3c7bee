"""Refuses what cannot be parsed as its RPC's message, or has a field that this build does not know, with
INVALID_ARGUMENT, since it is the caller's fault. gRPC itself would answer UNKNOWN, as for a bug of the server, and
leave the field out."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from paceline.errors import InvalidRequest
from paceline.rpc.parts import too_many_fields
from paceline.rpc.unknown import read_known
from paceline.rpc.wire_errors import metadata_for, status_for

LENGTH_DELIMITED = 2
MAX_SEARCHED_BYTES = 64 * 1024  # of a message that is read on the event loop, and searched in Python
MAX_SEARCHED_FIELDS = 4096

Context = grpc.aio.ServicerContext[Any, Any]


class RefuseMalformed(grpc.aio.ServerInterceptor):
    """Answers a request that cannot be read with INVALID_ARGUMENT, on every RPC of the server."""

    def __init__(self, max_fields: int | None = None, on_refused: Callable[[], None] = lambda: None) -> None:
        """max_fields: a request above MAX_SEARCHED_BYTES with more is refused too; None: they are not counted.
        on_refused: hears of each, on the event loop."""
        self._max_fields, self._on_refused = max_fields, on_refused
        self._made: dict[str, tuple[Any, Any]] = {}  # by method: what is registered, and what stands for it
        self._large = ThreadPoolExecutor(1, "large-messages")  # reads those above MAX_SEARCHED_BYTES, one by one

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """See grpc.aio.ServerInterceptor."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        made = self._made.get(method)
        if made is None or made[0] is not handler:  # it is made once: each call would pay for it
            made = self._made[method] = handler, _refusing(handler, self._max_fields, self._on_refused, self._large)
        answer: grpc.RpcMethodHandler[Any, Any] = made[1]
        return answer


@dataclass(frozen=True)
class _Large:
    """Stands in for a message that is read beside the event loop, for which all streams would wait."""

    data: bytes


@dataclass(frozen=True)
class _Malformed:
    """Stands in for the message until the handler runs, since gRPC lets nobody answer while it deserializes."""

    error: InvalidRequest


def malformed(descriptor: Descriptor, data: bytes, error: DecodeError) -> InvalidRequest:
    """The error for ``data``, which failed to parse as ``descriptor`` with ``error``; it names the field if it can."""
    left = iter(range(MAX_SEARCHED_FIELDS))
    if len(data) <= MAX_SEARCHED_BYTES and (field := _field_not_utf8(descriptor, data, left)):
        return InvalidRequest(field, "is not valid UTF-8")
    return InvalidRequest("request", f"is not a {descriptor.full_name}: {str(error).rpartition(': ')[2]}")


def _field_not_utf8(descriptor: Descriptor, data: bytes, left: Iterator[int]) -> str:
    """The path of the first string that is not UTF-8. Empty when there is none, when the bytes are no message, and when
    there are more fields than ``left`` has items."""
    try:
        fields: Any = UnknownFieldSet(Empty.FromString(data))
    except DecodeError:
        return ""
    for item in fields:
        if next(left, None) is None:
            return ""
        field = descriptor.fields_by_number.get(item.field_number)
        if field is None or item.wire_type != LENGTH_DELIMITED:
            continue
        if field.message_type is not None:
            if inner := _field_not_utf8(field.message_type, item.data, left):
                return f"{field.name}.{inner}"
        elif field.type == FieldDescriptor.TYPE_STRING and not _is_utf8(item.data):
            return str(field.name)
    return ""


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _refusing(handler: Any, max_fields: int | None, on_refused: Callable[[], None], large: Executor) -> Any:
    """A handler that refuses what ``handler`` cannot read, and otherwise does the same. large: where long messages are
    read."""
    message_type = handler.request_deserializer.__self__  # generated code passes the message class's FromString
    descriptor = message_type.DESCRIPTOR

    def read(data: bytes) -> Any:
        if max_fields is not None and len(data) > MAX_SEARCHED_BYTES and too_many_fields(descriptor, data, max_fields):
            return _Malformed(InvalidRequest("request", f"has more than {max_fields} fields and messages"))
        try:
            return read_known(message_type, data)
        except DecodeError as error:
            return _Malformed(malformed(descriptor, data, error))
        except InvalidRequest as error:
            return _Malformed(error)

    kind = ("stream" if handler.request_streaming else "unary", "stream" if handler.response_streaming else "unary")
    make: Any = getattr(grpc, f"{kind[0]}_{kind[1]}_rpc_method_handler")
    behave = getattr(handler, f"{kind[0]}_{kind[1]}")

    def read_if_short(data: bytes) -> Any:
        return _Large(data) if len(data) > MAX_SEARCHED_BYTES else read(data)

    async def whole(request: Any) -> Any:
        if not isinstance(request, _Large):
            return request
        return await asyncio.get_running_loop().run_in_executor(large, read, request.data)

    checking = _checking(behave, handler.request_streaming, whole, on_refused)
    return make(checking, read_if_short, handler.response_serializer)


def _checking(
    behave: Any, streams_in: bool, whole: Callable[[Any], Awaitable[Any]], on_refused: Callable[[], None]
) -> Any:
    """A function of the same kind as ``behave`` that checks the request, or each request of a stream, before it.
    whole: the message of what gRPC's own reader made."""

    async def well_formed(request: Any, context: Context) -> Any:
        request = await whole(request)
        if isinstance(request, _Malformed):
            on_refused()
            code, details = status_for(request.error)
            await context.abort(code, details, metadata_for(request.error))
        return request

    async def each(requests: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
        async for request in requests:
            yield await well_formed(request, context)

    async def checked(request: Any, context: Context) -> Any:
        return each(request, context) if streams_in else await well_formed(request, context)

    if inspect.isasyncgenfunction(behave):

        async def generate(request: Any, context: Context) -> AsyncIterator[Any]:
            async for answer in behave(await checked(request, context), context):
                yield answer

        return generate

    async def call(request: Any, context: Context) -> Any:
        return await behave(await checked(request, context), context)

    return call
