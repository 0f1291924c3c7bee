"""Messages between router and nodes that are wrong in every way: no node dies, or keeps a page."""

from __future__ import annotations

import functools

import grpc
import grpc.aio
import pytest

from tests.fuzz.campaign import FULL, Kept, campaign, seeded, too_few
from tests.fuzz.deployment import Deployment
from tests.fuzz.grpc_calls import Rpc, wrong
from tests.fuzz.grpc_sending import CHANNEL, Sender
from tests.fuzz.node_calls import DECODE_RPCS, PREFILL_RPCS, NodeMessages

MESSAGES = FULL // 10 or 60
# A peer that is not there, a pairing that does not fit, a hand-off that nobody waits for.
ALSO = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.ABORTED)


@pytest.mark.parametrize(("role", "rpcs"), [("prefill", PREFILL_RPCS), ("decode", DECODE_RPCS)])
async def test_messages_that_are_wrong(served: Deployment, kept: Kept, role: str, rpcs: tuple[Rpc, ...]) -> None:
    """``campaign`` fails for each answer that none may get; here good ones and refusals have to come."""
    valid = NodeMessages(served.nodes, served.node_status("decode", served.nodes["decode"]).fingerprint)
    make = seeded(role, functools.partial(wrong, rpcs=rpcs, valid=valid))
    async with grpc.aio.insecure_channel(served.nodes[role], options=CHANNEL) as channel:
        seen = await campaign(role, served, MESSAGES, make, Sender(channel, ALSO).send, kept)
    assert too_few(seen, 0.05, "OK", "INVALID_ARGUMENT") == []
