"""One request's trace from everybody who kept some of it: the router itself, and every node under a live lease."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence

from cluster.contract.generation import check_name
from cluster.routing.node_calls import NodeCalls, NodeFailure
from cluster.state.registry_types import NodeRecord
from paceline.errors import InvalidRequest, NotFound
from paceline.results import RequestTrace
from paceline.tracing import Recorder
from paceline.v1 import trace_pb2
from paceline.wire import trace_from_proto

ROUTER = "router"  # the name of its row
NODE_TIMEOUT_S = 2.0
MAX_ASKING = 16  # nodes asked at once


async def collect(
    request_id: str,
    recorder: Recorder,
    nodes: Sequence[NodeRecord],
    calls: NodeCalls,
    timeout_s: float = NODE_TIMEOUT_S,
    salt: str | None = None,
) -> RequestTrace:
    """All events, by start. salt: of the request, where router and nodes are to tell of this one alone: somebody else's
    may have the same id. A node that does not answer within ``timeout_s`` is named as silent. Raises NotFound
    when nobody who answered knows the request."""
    if not request_id:
        raise InvalidRequest("request_id", "must not be empty")
    check_name("request_id", request_id)
    limit = asyncio.Semaphore(MAX_ASKING)
    asked = trace_pb2.TraceRequest(request_id=request_id, cache_salt=salt)

    async def ask(node: NodeRecord) -> trace_pb2.TraceResponse | None:
        async with limit:
            try:
                return await calls.trace(node, asked, timeout_s)
            except NodeFailure:
                return None

    answers = await asyncio.gather(*(ask(node) for node in nodes))
    silent = tuple(node.id for node, answer in zip(nodes, answers, strict=True) if answer is None)

    def merged() -> RequestTrace:
        own = recorder.read(request_id, ROUTER, salt)
        parts = [own, *(trace_from_proto(request_id, answer) for answer in answers if answer is not None)]
        events = sorted((event for part in parts for event in part.events), key=lambda event: event.start_s)
        return RequestTrace(request_id, tuple(events), silent, sum(part.dropped for part in parts))

    found = await recorder.beside_the_loop(merged)
    if not found.events:
        raise not_kept(request_id, recorder.num_requests, silent)
    return found


def not_kept(request_id: str, kept: int, silent: tuple[str, ...] = ()) -> NotFound:
    """Nobody has a trace of it for who asks."""
    if not kept:
        return NotFound(f"no trace of {request_id!r}: the deployment keeps none (trace_requests is 0)")
    also = f"; {', '.join(silent)} did not answer" if silent else ""
    text = f"no trace of {request_id!r}: the router and each node keep those of their latest {kept} requests{also}"
    return NotFound(text)


class Owners:
    """Which of the latest requests are whose. Several tenants may take the same id: each finds its own."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._salts: OrderedDict[tuple[str, str], str] = OrderedDict()  # by tenant and id without choice

    def note(self, request_id: str, tenant: str, salt: str) -> None:
        """A request of ``tenant`` runs. salt: of its cache."""
        of = (tenant, _without_choice(request_id))
        self._salts[of] = salt
        self._salts.move_to_end(of)
        while len(self._salts) > self._most:
            self._salts.popitem(last=False)

    def salt(self, tenant: str, request_id: str) -> str | None:
        """The salt of the tenant's latest request of this id; None where it has none."""
        return self._salts.get((tenant, _without_choice(request_id)))


def _without_choice(request_id: str) -> str:
    """A '#' numbers the choices of a request."""
    return request_id.partition("#")[0]
