"""Rows leave in the midst of a forward; whatever becomes of their hand-off, their pages stay until its end."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import grpc
import pytest

from kv_transfer.handoff.block import TARGET_KV
from kv_transfer.handoff.state import HandoffState
from paceline.v1 import node_pb2
from tests.fakes.nodes import Cluster, cluster, sequence_request, wait_until
from tests.fakes.runner import expected_output


@pytest.fixture(autouse=True)
def every_layer_is_a_message() -> Iterator[None]:
    with patch("prefill_node.groups.MIN_BYTES", 1), patch("prefill_node.groups.MESSAGE_BYTES", 1024):
        yield


class Midst:
    """Holds the prefill engine after the first layer of its n-th forward, until ``go_on``."""

    def __init__(self, nodes: Cluster, forward: int) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        self._left = forward
        self._prefill: Callable[..., Any] = nodes.prefill_runner.prefill
        setattr(nodes.prefill_runner, "prefill", self._run)  # noqa: B010

    def _run(self, chunks: Any, after_layer: Callable[[int], None]) -> Any:
        self._left -= 1

        def after(layer: int) -> None:
            after_layer(layer)
            if self._left == 0 and layer == 0:
                self.reached.set()
                assert self.go_on.wait(30.0)

        return self._prefill(chunks, after)


async def start(nodes: Cluster, **changes: Any) -> tuple[Any, Any, Any, node_pb2.Reserved]:
    """A request whose Prefill call is under way: the request, both calls, the reservation."""
    request = sequence_request(**changes)
    decode = nodes.open_decode(request)
    reserved = (await anext(aiter(decode))).reserved
    return request, decode, nodes.open_prefill(request, reserved), reserved


async def status_of(call: Any) -> grpc.StatusCode:
    try:
        async for _ in call:
            pass
    except (grpc.aio.AioRpcError, asyncio.CancelledError):
        pass
    return await call.code()  # type: ignore[no-any-return]


async def test_a_layer_arrives_while_the_next_one_is_not_computed() -> None:
    async with cluster() as nodes:
        midst = Midst(nodes, forward=2)
        request, decode, prefill, reserved = await start(nodes, num_prompt=20)
        follower = asyncio.create_task(status_of(prefill))
        await wait_until(midst.reached.is_set, 5.0, "the second chunk's first layer")
        landing = nodes.decode._engine.streams[reserved.ticket].landing
        assert landing is not None
        rows = 8 * 64  # 8 tokens of one layer
        await wait_until(lambda: landing.handoff.bytes_by_class[TARGET_KV] == 3 * rows, 5.0, "its rows")
        midst.go_on.set()
        assert await follower is grpc.StatusCode.OK
        tokens = [token async for event in decode for token in event.tokens.token_ids]
        assert tokens == expected_output(request)[1:]
        await nodes.wait_for_release()


@pytest.mark.parametrize("who", ["client", "decode", "link"])
async def test_pages_stay_until_the_forward_is_over(who: str) -> None:
    """The client cancels, decode gives up at its deadline, or the link is lost, in the midst of a forward."""
    async with cluster() as nodes:
        midst = Midst(nodes, forward=2)
        _, decode, prefill, reserved = await start(nodes, num_prompt=40)
        follower = asyncio.create_task(status_of(prefill))
        await wait_until(midst.reached.is_set, 5.0, "the second chunk's first layer")
        (link,) = nodes.prefill._links._links.values()
        landing = nodes.decode._engine.streams[reserved.ticket].landing
        assert landing is not None
        await wait_until(lambda: landing.handoff.status is HandoffState.SENDING, 5.0, "its Begin")
        if who == "client":
            decode.cancel()
            prefill.cancel()
        elif who == "decode":
            nodes.decode._links.fail(landing.handoff.link_id, reserved.ticket, "too late")
        else:
            link[0].lost("pulled")
        await wait_until(lambda: landing.handoff.status is HandoffState.FAILED, 10.0, "the hand-off's end at decode")
        await asyncio.sleep(0.1)
        load = nodes.prefill.shell.load()
        assert load.free_pages < load.total_pages, "the engine still computes on them"
        midst.go_on.set()
        await follower
        await nodes.wait_for_release()
        request = sequence_request()
        assert (await nodes.generate(request)).output == expected_output(request)
        await nodes.wait_for_release()


async def test_a_forward_that_breaks_after_rows_have_left_fails_that_hand_off() -> None:
    async with cluster() as nodes:
        midst = Midst(nodes, forward=1)
        broken = nodes.prefill_runner._write

        def write(seq: Any, start_row: int, end: int, layers: range) -> None:
            if layers.start == 1:
                setattr(nodes.prefill_runner, "_write", broken)  # noqa: B010
                raise RuntimeError("the second layer broke")
            broken(seq, start_row, end, layers)

        setattr(nodes.prefill_runner, "_write", write)  # noqa: B010
        midst.go_on.set()
        _, decode, prefill, _ = await start(nodes)
        assert await status_of(prefill) is grpc.StatusCode.INTERNAL
        assert await status_of(decode) is grpc.StatusCode.ABORTED
        await nodes.wait_for_release()
        request = sequence_request()
        assert (await nodes.generate(request)).output == expected_output(request)


async def test_rows_of_the_cache_leave_before_the_first_forward() -> None:
    async with cluster() as nodes:
        prompt = tuple(range(40))
        await nodes.generate(sequence_request(prompt=prompt, max_tokens=1))
        await nodes.wait_for_release()
        await nodes.decode.shell.loop.call(lambda: nodes.decode_runner.prefix.evict(1000))  # type: ignore[union-attr]
        nodes.prefill_runner.gate.clear()
        _, decode, prefill, reserved = await start(nodes, prompt=prompt)
        follower = asyncio.create_task(status_of(prefill))
        await wait_until(lambda: reserved.ticket in nodes.decode._engine.streams, 5.0, "the reservation")
        landing = nodes.decode._engine.streams[reserved.ticket].landing
        assert landing is not None
        assert reserved.cached_tokens == 0
        began = time.monotonic()
        await wait_until(lambda: landing.handoff.bytes_by_class[TARGET_KV] >= 36 * 2 * 64, 5.0, "the cached rows")
        assert time.monotonic() - began < 5.0
        nodes.prefill_runner.gate.set()
        assert await follower is grpc.StatusCode.OK
        decode.cancel()
        await nodes.wait_for_release()
