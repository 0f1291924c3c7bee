"""Lets only parts of the deployment call, each its own RPCs; whoever is refused leaves one line in the audit log."""

from __future__ import annotations

import hmac
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import grpc
import grpc.aio

from paceline.rpc.audit import Audit, peer_of
from paceline.rpc.tls import Role, role_of

TOKEN_KEY = "paceline-deployment"
SAN_KEY = "x509_subject_alternative_name"  # gRPC's own, in a call's auth context
MAX_SAID_CHARS = 200

Context = grpc.aio.ServicerContext[Any, Any]
Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[misc, unused-ignore]
    """Refuses with PERMISSION_DENIED what does not carry ``token``, or comes with the certificate of a role that may
    not call the method.

    ``roles``: by method's name, e.g. ``Decode``; a method that is not there is let to nobody. ``token``: empty asks for
    none. ``by_role``: the server asks for certificates. ``refused``: how many calls were; ``on_refused`` hears of each.
    """

    def __init__(
        self, roles: Mapping[str, Role], token: str, *, by_role: bool, on_refused: Callable[[], None] = lambda: None
    ) -> None:
        self._roles, self._token, self._by_role, self._on_refused = roles, token, by_role, on_refused
        self._audit = Audit()
        self.refused = 0

    async def intercept_service(self, continuation: Continuation, details: grpc.HandlerCallDetails) -> Any:
        """See grpc.aio.ServerInterceptor."""
        handler = await continuation(details)
        if handler is None or not (self._token or self._by_role):
            return handler
        sent = dict(details.invocation_metadata or ()).get(TOKEN_KEY, "")
        method = details.method
        if not self._token_fits(sent):
            return self._refusal(method, handler.response_streaming)

        async def check(context: Context) -> None:
            if found := self._role_problem(method, context):
                await self._abort(method, context, found)

        return checked(handler, check)

    def _refusal(self, method: str, gives_stream: bool) -> Any:
        """A handler for a stranger. It takes a stream, since gRPC reads the message of every other one before it asks
        anybody."""

        async def refuse(_: Any, context: Context) -> None:
            await self._abort(method, context, "it does not carry the token of this deployment")

        make: Any = grpc.stream_stream_rpc_method_handler if gives_stream else grpc.stream_unary_rpc_method_handler
        return make(refuse)

    async def _abort(self, method: str, context: Context, reason: str) -> None:
        self.refuse(method, context, reason)
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, f"{method}: {reason}")

    def refuse(self, method: str, context: Context, reason: str) -> None:
        """Count and tell a call that is refused."""
        self._count(peer_of(context), method, f"{_role(context) or 'nobody'}: {reason}"[:MAX_SAID_CHARS])

    def refuse_handshake(self, reason: str) -> None:
        """Count and tell a handshake that failed."""
        self._count("", "gRPC handshake", reason)

    def _count(self, peer: str, act: str, reason: str) -> None:
        self.refused += 1
        self._on_refused()
        self._audit.refused(peer, "", act, reason)

    def _token_fits(self, sent: str | bytes) -> bool:
        given = sent.encode() if isinstance(sent, str) else sent
        return not self._token or hmac.compare_digest(given, self._token.encode())

    def _role_problem(self, method: str, context: Context) -> str:
        allowed = self._roles.get(method.rpartition("/")[2])
        if not self._by_role or (allowed is not None and _role(context) == allowed):
            return ""
        return f"it is for {allowed or 'nobody'}, not for {_role(context) or 'a certificate without a role'}"


def _role(context: Context) -> str:
    """What the caller's certificate says; empty without one."""
    found = context.auth_context() or {}
    return role_of([entry.decode("utf-8", "replace") for entry in found.get(SAN_KEY, ())])


def checked(handler: Any, check: Callable[[Context], Awaitable[None]]) -> Any:
    """A handler that does the same as ``handler`` after ``check``, which may abort the call."""
    kind = ("stream" if handler.request_streaming else "unary", "stream" if handler.response_streaming else "unary")
    make: Any = getattr(grpc, f"{kind[0]}_{kind[1]}_rpc_method_handler")
    behave = _checked(getattr(handler, f"{kind[0]}_{kind[1]}"), check)
    return make(behave, handler.request_deserializer, handler.response_serializer)


def _checked(behave: Any, check: Callable[[Context], Awaitable[None]]) -> Any:
    """A function of the same kind as ``behave`` that checks the caller before it."""
    if inspect.isasyncgenfunction(behave):

        async def generate(request: Any, context: Context) -> AsyncIterator[Any]:
            await check(context)
            async for answer in behave(request, context):
                yield answer

        return generate

    async def call(request: Any, context: Context) -> Any:
        await check(context)
        return await behave(request, context)

    return call
