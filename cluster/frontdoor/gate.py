"""What every RPC of the public server needs, in this order: a key, a place, and a message that there is room for.

Places are counted by kind, so that watchers of health and readers of the schema take none of those for work.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from cluster.access.access import Access, Need, bearer
from cluster.access.caller import Caller, owner, set_current
from cluster.frontdoor.arriving import Arriving, sized
from cluster.frontdoor.held_bodies import HeldBodies, HeldBody
from paceline.errors import Overloaded
from paceline.rpc.audit import network_of, peer_of
from paceline.rpc.calls import answering_errors

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True)
class Kind:
    """Calls that share places."""

    need: Need
    most: int  # at once
    of_peer: int  # of one address at once


@dataclass(frozen=True)
class Rules:
    """The kind of every RPC by its full name. A name that is none here is refused."""

    kinds: Mapping[str, Kind]

    def of(self, method: str) -> Kind | None:
        """The kind of ``/package.Service/Method``."""
        return self.kinds.get(method)


class Gate(grpc.aio.ServerInterceptor):
    """Lets calls in by ``rules``; ``access`` None asks for no keys. bodies: has room for their messages."""

    def __init__(self, rules: Rules, access: Access | None, bodies: HeldBodies) -> None:
        self._rules, self._access, self._arriving = rules, access, Arriving(bodies)
        self._open: Counter[Kind] = Counter()
        self._of_peer: Counter[tuple[Kind, str]] = Counter()
        self._made: dict[str, tuple[Any, Any]] = {}  # by method: what is registered, and what stands for it

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """See grpc.aio.ServerInterceptor."""
        handler: Any = await continuation(handler_call_details)
        method: Any = handler_call_details.method
        made = self._made.get(method)
        if handler is not None and (made is None or made[0] is not handler):
            name = method.decode() if isinstance(method, bytes) else method
            kind = self._rules.of(name)  # a name that is none gets no handler
            made = handler, None if kind is None else self._behind(handler, name, kind)
            self._made[method] = made  # once: each call would pay for it
        answer: grpc.RpcMethodHandler[Any, Any] | None = None if handler is None or made is None else made[1]
        return answer

    def _behind(self, handler: Any, name: str, kind: Kind) -> Any:
        """A handler that does the same behind the gate. It takes a stream, since gRPC reads the message of every other
        one before it asks anybody."""
        kinds = {True: "stream", False: "unary"}
        takes, gives = kinds[handler.request_streaming], kinds[handler.response_streaming]
        behave = getattr(handler, f"{takes}_{gives}")

        @asynccontextmanager
        async def opened(context: Context) -> AsyncIterator[HeldBody]:
            async with answering_errors(context):
                caller = await self._known(context, name, kind)  # before it takes a place: strangers have none
                network = network_of(peer_of(context))
                with self._place(network, kind):
                    if self._access is not None:
                        await self._access.count(caller, name, kind.need)
                    if caller is not None:
                        set_current(caller)
                    with self._arriving.body(owner(network)) as body:
                        yield body

        async def asked(requests: AsyncIterator[Any], body: HeldBody) -> Any:
            if handler.request_streaming:
                return requests
            return await self._arriving.read(requests, body, is_open=kind.need is Need.OPEN)

        async def call(requests: AsyncIterator[Any], context: Context) -> Any:
            async with opened(context) as body:
                return await behave(await asked(requests, body), context)
            raise AssertionError("unreachable: the context was aborted")

        async def stream(requests: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
            async with opened(context) as body:
                async for answer in behave(await asked(requests, body), context):
                    yield answer

        make: Any = getattr(grpc, f"stream_{gives}_rpc_method_handler")
        run = stream if inspect.isasyncgenfunction(behave) else call
        read = handler.request_deserializer
        return make(run, read if handler.request_streaming else sized(read), handler.response_serializer)

    async def _known(self, context: Context, name: str, kind: Kind) -> Caller | None:
        if self._access is None:
            return None
        sent = dict(context.invocation_metadata() or ()).get("authorization")
        return await self._access.know(bearer(sent), peer_of(context), name, kind.need)

    @contextmanager
    def _place(self, peer: str, kind: Kind) -> Iterator[None]:
        """Raises Overloaded where there is none."""
        own = (kind, peer)
        if self._open[kind] >= kind.most or self._of_peer[own] >= kind.of_peer:
            raise Overloaded(f"{self._open[kind]} calls of this kind are open, {self._of_peer[own]} of your address")
        self._open[kind] += 1
        self._of_peer[own] += 1
        try:
            yield
        finally:
            self._open[kind] -= 1
            self._of_peer[own] -= 1
            if not self._of_peer[own]:
                del self._of_peer[own]
