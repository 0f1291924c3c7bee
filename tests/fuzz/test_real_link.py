"""Hand-off messages that are wrong, on a link that is open: a prefill node with a certificate, the router's grant and
real rows lies in any way. The decode node lives, gives every page back, and serves who means well."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import suppress
from pathlib import Path

import grpc.aio
import pytest
from google.protobuf.message import DecodeError

from paceline.v1 import handoff_pb2
from prefill_node.control import ControlStream
from tests.fakes.nodes import sequence_request
from tests.fakes.runner import expected_output
from tests.fuzz.campaign import FULL, SEED
from tests.fuzz.proto_mutations import WIRE, extreme
from tests.support.certificates import make_folder, secured

REQUESTS = FULL // 20
DEADLINES = dict.fromkeys(("transfer_timeout_s", "handoff_deadline_s", "reserve_deadline_s"), 2.0)
LIES = 0.25  # of the messages
REQUEST_S = 15.0  # above the deadlines of a hand-off
IN_THE_CLEAR = ("begin", "abort", "hello")  # gloo ends a process that gets more bytes than it waits for (SECURITY.md)
ENCRYPTED = (*IN_THE_CLEAR, "chunk", "state")


def lie(rng: random.Random, message: handoff_pb2.HandoffMessage) -> list[handoff_pb2.HandoffMessage]:
    """What is sent in a message's place."""
    match rng.randrange(6):
        case 0:
            return []
        case 1:
            return [message, message]
        case 2:
            message.ticket = rng.choice(("", "nobody's", message.ticket[:-1]))
            return [message]
        case 3:
            changed = rng.choice(list(WIRE.values()))(rng, message.SerializeToString())
        case _:
            extreme(rng, message, 1)
            changed = message.SerializeToString()
    with suppress(DecodeError):
        return [handoff_pb2.HandoffMessage.FromString(changed)]
    return [message]


@pytest.mark.skipif(not FULL, reason="slow: make fuzz-surface runs it")
@pytest.mark.parametrize("encrypted", [True, False])
async def test_a_prefill_node_that_lies(encrypted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutants: a grant is not looked at again when its hand-off began; a posted call that raises ends nothing."""
    rng, lies, seen = random.Random(SEED), Counter[str](), Counter[str]()
    post, lying = ControlStream.post, [True]

    def wrong(control: ControlStream, message: handoff_pb2.HandoffMessage) -> None:
        kind = str(message.WhichOneof("body"))
        if not lying[0] or kind not in (ENCRYPTED if encrypted else IN_THE_CLEAR) or rng.random() > LIES:
            return post(control, message)
        lies[kind] += 1
        for one in lie(rng, message):
            post(control, one)

    monkeypatch.setattr(ControlStream, "post", wrong)
    async with secured(make_folder(tmp_path / "a") if encrypted else None, **DEADLINES) as nodes:
        for number in range(REQUESTS):
            request = sequence_request(num_prompt=5 + number % 40)
            try:
                async with asyncio.timeout(REQUEST_S):
                    right = (await nodes.generate(request)).output == expected_output(request)
                seen["right" if right else "another text"] += 1
            except grpc.aio.AioRpcError as error:
                seen[error.code().name] += 1
            except (TimeoutError, AssertionError, StopAsyncIteration) as error:
                seen[type(error).__name__] += 1
        lying[0] = False
        await nodes.wait_for_release(timeout_s=30.0)
        request = sequence_request()
        with suppress(grpc.aio.AioRpcError):  # a link that the last lie put out of step shows it at its next message
            await nodes.generate(request)
        assert (await nodes.generate(request)).output == expected_output(request)
        await nodes.wait_for_release()
    print(f"\nlies: {dict(lies)}; requests: {dict(seen)}")
    assert seen["right"] > 0
    assert len(seen) > 1
