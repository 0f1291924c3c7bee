"""Clients that leave, links that break, queues that fill, steps that raise: pages return and the node goes on."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import pytest

from kv_transfer.transports.gloo import GlooTransport
from paceline.request import SequenceRequest
from paceline.v1 import node_pb2
from paceline.wire import sequence_to_proto
from tests.fakes.nodes import Cluster, cluster, node_config, sequence_request, wait_until
from tests.fakes.runner import expected_output


async def first_event(call: Any) -> Any:
    return await anext(aiter(call))


async def status_of(call: Any) -> grpc.StatusCode:
    """Read a call to its end; one that this side cancelled ends too."""
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
        async for _ in call:
            pass
    return await call.code()  # type: ignore[no-any-return]


async def assert_serves(nodes: Cluster) -> None:
    request = sequence_request()
    assert (await nodes.generate(request)).output == expected_output(request)
    await nodes.wait_for_release()


async def reserve(nodes: Cluster, request: SequenceRequest) -> tuple[Any, Any]:
    decode = nodes.open_decode(request)
    event = await first_event(decode)
    return decode, event.reserved


async def test_client_leaves_after_the_reservation() -> None:
    async with cluster() as nodes:
        decode, _ = await reserve(nodes, sequence_request())
        assert nodes.decode.shell.load().free_pages < nodes.decode.shell.load().total_pages
        decode.cancel()
        await nodes.wait_for_release()
        await assert_serves(nodes)


async def test_client_leaves_while_the_prompt_is_computed() -> None:
    async with cluster() as nodes:
        nodes.prefill_runner.step_s = 0.05
        request = sequence_request(num_prompt=200)
        decode, reserved = await reserve(nodes, request)
        prefill = nodes.open_prefill(request, reserved)
        follower = asyncio.create_task(status_of(prefill))
        landing = nodes.decode._engine.streams[reserved.ticket].landing
        assert landing is not None
        await wait_until(lambda: any(landing.handoff.bytes_by_class.values()), 5.0, "the first rows")
        decode.cancel()
        prefill.cancel()
        await follower
        await nodes.wait_for_release()
        await assert_serves(nodes)


async def test_only_the_decode_side_leaves_while_rows_cross() -> None:
    """dynamo #7489: the decode node tells the sender, whose Abort releases both sides."""
    async with cluster() as nodes:
        nodes.prefill_runner.step_s = 0.2  # five seconds for the whole prompt
        request = sequence_request(num_prompt=200)
        decode, reserved = await reserve(nodes, request)
        prefill = asyncio.create_task(status_of(nodes.open_prefill(request, reserved)))
        landing = nodes.decode._engine.streams[reserved.ticket].landing
        assert landing is not None
        await wait_until(lambda: any(landing.handoff.bytes_by_class.values()), 5.0, "the first rows")
        decode.cancel()
        assert await prefill is grpc.StatusCode.ABORTED
        await nodes.wait_for_release()
        nodes.prefill_runner.step_s = 0.0
        await assert_serves(nodes)


async def test_pages_stay_held_while_a_transfer_may_write_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """sglang #24527, sglang #35049: both RPCs are gone, but a send is under way: no page comes back before its end."""
    sending, receiving, go_on = threading.Event(), threading.Event(), threading.Event()
    receive = GlooTransport.recv

    def blocked(self: GlooTransport, data: Any) -> Callable[[], None]:
        def wait() -> None:
            sending.set()
            go_on.wait(30.0)
            self.send(data)

        return wait

    def recv(self: GlooTransport, data: Any) -> None:
        receiving.set()
        receive(self, data)

    monkeypatch.setattr(GlooTransport, "start_send", blocked)
    monkeypatch.setattr(GlooTransport, "recv", recv)
    patient = {"transfer_timeout_s": 60.0, "handoff_deadline_s": 60.0, "reserve_deadline_s": 60.0}
    async with cluster(node_config(**patient), node_config(page_size=8, **patient)) as nodes:
        request = sequence_request(num_prompt=40)
        decode, reserved = await reserve(nodes, request)
        prefill = nodes.open_prefill(request, reserved)
        follower = asyncio.create_task(status_of(prefill))
        # Until it waits for rows, the decode node may well give up a ticket at once: nothing writes its pages.
        await wait_until(lambda: sending.is_set() and receiving.is_set(), 20.0, "both ends of the first message")
        decode.cancel()
        prefill.cancel()
        await follower
        await asyncio.sleep(0.3)
        for node in (nodes.prefill, nodes.decode):
            assert node.shell.status().held == 1
            assert node.shell.load().free_pages < node.shell.load().total_pages
        go_on.set()
        await nodes.wait_for_release()
        await assert_serves(nodes)


async def test_client_leaves_while_decoding() -> None:
    async with cluster() as nodes:
        nodes.decode_runner.step_s = 0.02
        request = sequence_request(max_tokens=200)
        decode, reserved = await reserve(nodes, request)
        assert await status_of(nodes.open_prefill(request, reserved)) is grpc.StatusCode.OK
        await wait_until(lambda: len(nodes.decode_runner.batch_sizes) > 2, 5.0, "rounds")
        decode.cancel()
        await nodes.wait_for_release()
        await assert_serves(nodes)


async def test_client_leaves_during_local_prefill() -> None:
    async with cluster() as nodes:
        nodes.decode_runner.step_s = 0.05
        call = nodes.open_decode(sequence_request(num_prompt=200), local_prefill=True)
        await first_event(call)
        call.cancel()
        await nodes.wait_for_release()
        await assert_serves(nodes)


async def test_client_leaves_while_waiting_for_pages() -> None:
    async with cluster(decode_config=node_config(kv_cache_tokens=128)) as nodes:
        first, _ = await reserve(nodes, sequence_request(num_prompt=80))
        second = nodes.open_decode(sequence_request(num_prompt=80))
        follower = asyncio.create_task(status_of(second))
        await wait_until(lambda: nodes.decode.shell.load().waiting == 1, 5.0, "the second to wait")
        second.cancel()
        await follower
        await wait_until(lambda: nodes.decode.shell.load().waiting == 0, 5.0, "the line to empty")
        first.cancel()
        await nodes.wait_for_release()
        await assert_serves(nodes)


async def test_waiting_request_gets_the_pages_that_come_back() -> None:
    async with cluster(decode_config=node_config(kv_cache_tokens=128)) as nodes:
        nodes.decode_runner.step_s = 0.01
        requests = [sequence_request(num_prompt=60, max_tokens=12, seed=i) for i in range(3)]
        outcomes = await asyncio.gather(*(nodes.generate(request) for request in requests))
        assert [outcome.output for outcome in outcomes] == [expected_output(request) for request in requests]
        await nodes.wait_for_release()


async def test_full_line_is_resource_exhausted() -> None:
    async with cluster(decode_config=node_config(kv_cache_tokens=128, max_waiting=1)) as nodes:
        calls = [nodes.open_decode(sequence_request(num_prompt=80)) for _ in range(3)]
        followers = [asyncio.create_task(status_of(call)) for call in calls]
        done, _ = await asyncio.wait(followers, timeout=5.0, return_when=asyncio.FIRST_COMPLETED)
        assert [task.result() for task in done] == [grpc.StatusCode.RESOURCE_EXHAUSTED]
        for call in calls:
            call.cancel()
        await asyncio.gather(*followers)
        await nodes.wait_for_release()


async def test_wait_for_pages_ends_at_its_deadline() -> None:
    config = node_config(kv_cache_tokens=128, reserve_deadline_s=0.4)
    async with cluster(decode_config=config) as nodes:
        nodes.decode_runner.step_s = 0.2  # five seconds, of which the other waits 0.4
        holder = nodes.open_decode(sequence_request(num_prompt=80, max_tokens=45), local_prefill=True)
        await first_event(holder)
        assert await status_of(nodes.open_decode(sequence_request(num_prompt=80))) is grpc.StatusCode.RESOURCE_EXHAUSTED
        holder.cancel()
        await nodes.wait_for_release()


async def test_reservation_expires_without_new_traffic() -> None:
    """TensorRT-LLM #12313: clean-up does not wait for new work."""
    async with cluster(decode_config=node_config(reserve_deadline_s=0.3)) as nodes:
        started = time.monotonic()
        assert await status_of(nodes.open_decode(sequence_request())) is grpc.StatusCode.ABORTED
        assert 0.3 <= time.monotonic() - started < 8.0
        await nodes.wait_for_release()


async def test_stalled_transfer_fails_at_its_deadline() -> None:
    async with cluster(decode_config=node_config(handoff_deadline_s=2.0, page_size=8)) as nodes:
        request = sequence_request(num_prompt=100)
        nodes.prefill_runner.step_s = 1.0  # thirteen seconds for the whole prompt
        decode, reserved = await reserve(nodes, request)
        prefill = asyncio.create_task(status_of(nodes.open_prefill(request, reserved)))
        assert await status_of(decode) is grpc.StatusCode.ABORTED
        assert await prefill is grpc.StatusCode.ABORTED
        await nodes.wait_for_release()
        nodes.prefill_runner.step_s = 0.0
        await assert_serves(nodes)


async def test_broken_link_fails_its_handoffs_and_nothing_else() -> None:
    """sglang #25287: a failed link blacklists nobody; the next hand-off opens a new one."""
    async with cluster() as nodes:
        nodes.decode_runner.step_s = 0.02
        running = sequence_request(max_tokens=60)
        survivor = asyncio.create_task(nodes.generate(running))
        await wait_until(lambda: len(nodes.decode_runner.batch_sizes) > 0, 5.0, "the survivor to decode")
        await wait_until(lambda: nodes.prefill.shell.status().held == 0, 5.0, "the acknowledgement of its hand-off")
        nodes.prefill_runner.step_s = 0.1
        victim = sequence_request(num_prompt=200)
        decode, reserved = await reserve(nodes, victim)
        prefill = asyncio.create_task(status_of(nodes.open_prefill(victim, reserved)))
        landing = nodes.decode._engine.streams[reserved.ticket].landing
        assert landing is not None
        await wait_until(lambda: any(landing.handoff.bytes_by_class.values()), 5.0, "the first rows")
        old_id = next(iter(nodes.decode._links._links))
        nodes.prefill._links._links[nodes.decode_address][0].lost("pulled")
        assert await status_of(decode) is grpc.StatusCode.ABORTED
        assert await prefill is grpc.StatusCode.ABORTED
        assert (await survivor).output == expected_output(running)
        nodes.prefill_runner.step_s = 0.0
        await assert_serves(nodes)
        assert list(nodes.decode._links._links) != [old_id]


async def test_receive_that_fails_mid_transfer_fails_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm #52234: a failed receive is never taken for a whole one. sglang #35890: the injection did fire."""
    async with cluster() as nodes:
        request = sequence_request(num_prompt=100)
        fired: list[str] = []
        guard = GlooTransport._guard

        def broken(self: GlooTransport, verb: str, num_bytes: int, work: Any) -> None:
            if verb == "recv" and len(fired) < 3:
                fired.append(verb)
            elif verb == "recv":
                monkeypatch.setattr(GlooTransport, "_guard", guard)
                fired.append("abort")
                self.abort()
            guard(self, verb, num_bytes, work)

        monkeypatch.setattr(GlooTransport, "_guard", broken)
        decode, reserved = await reserve(nodes, request)
        prefill = asyncio.create_task(status_of(nodes.open_prefill(request, reserved)))
        assert await status_of(decode) is grpc.StatusCode.ABORTED
        assert await prefill is grpc.StatusCode.ABORTED
        assert fired[-1] == "abort"
        await nodes.wait_for_release()
        await assert_serves(nodes)


async def test_step_that_raises_fails_its_sequences_only() -> None:
    async with cluster() as nodes:
        request = sequence_request(max_tokens=40)
        decode, reserved = await reserve(nodes, request)
        nodes.decode_runner.fail_next = True
        prefill = asyncio.create_task(status_of(nodes.open_prefill(request, reserved)))
        assert await status_of(decode) is grpc.StatusCode.INTERNAL
        assert "the forward broke" in (await decode.details())
        assert await prefill is grpc.StatusCode.OK
        assert nodes.decode.shell.alive()
        await nodes.wait_for_release()
        await assert_serves(nodes)


async def test_prefill_step_that_raises_fails_its_sequences_only() -> None:
    async with cluster() as nodes:
        request = sequence_request(num_prompt=60)
        decode, reserved = await reserve(nodes, request)
        nodes.prefill_runner.fail_next = True
        prefill = nodes.open_prefill(request, reserved)
        assert await status_of(prefill) is grpc.StatusCode.INTERNAL
        # Nothing had crossed yet, so the reservation stands for another prefill node.
        retried = asyncio.create_task(status_of(nodes.open_prefill(request, reserved)))
        tokens = [token async for event in decode for token in event.tokens.token_ids]
        assert await retried is grpc.StatusCode.OK
        assert tokens == expected_output(request)[1:]
        await nodes.wait_for_release()


async def test_slow_reader_pauses_its_sequence_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decode_node.stream.MAX_PENDING_EVENTS", 2)
    async with cluster() as nodes:
        nodes.decode_runner.step_s = 0.002
        stream_request = sequence_request(max_tokens=120)
        slow = nodes.decode.decode(
            node_pb2.DecodeRequest(sequence=sequence_to_proto(stream_request), local_prefill=True)
        )
        await anext(slow)  # reserved; nobody reads on
        fast = sequence_request(max_tokens=30)
        assert (await nodes.generate_locally(fast)).output == expected_output(fast)
        rounds = len(nodes.decode_runner.batch_sizes)
        await asyncio.sleep(0.1)
        assert len(nodes.decode_runner.batch_sizes) == rounds  # paused, not spinning
        tokens = [token async for event in slow for token in event.tokens.token_ids]
        assert tokens == expected_output(stream_request)
        await nodes.wait_for_release()


async def test_draining_node_refuses_new_and_finishes_old() -> None:
    async with cluster() as nodes:
        nodes.decode_runner.step_s = 0.02
        nodes.decode_runner.gate.clear()  # in the midst of its first round
        request = sequence_request(max_tokens=40)
        running = asyncio.create_task(nodes.generate(request))
        await wait_until(lambda: nodes.decode.shell.load().running == 1, 5.0, "decoding")
        await wait_until(lambda: nodes.prefill.shell.status().held == 0, 5.0, "the acknowledgement of the hand-off")
        stopping = asyncio.create_task(nodes.decode.stop(9.0))
        await asyncio.sleep(0.05)
        assert nodes.decode.shell.status().draining
        assert await status_of(nodes.open_decode(sequence_request())) is grpc.StatusCode.UNAVAILABLE
        nodes.decode_runner.gate.set()
        assert (await running).output == expected_output(request)
        await stopping
        assert not nodes.decode.shell.alive()


async def test_a_stopped_node_leaves_no_thread_behind() -> None:
    before = set(threading.enumerate())
    async with cluster() as nodes:
        await nodes.generate(sequence_request())
    ours = ("engine-", "handoff-", "link-", "rendezvous")

    def left() -> list[str]:  # a thread that has done its work is there for a moment more
        return [t.name for t in set(threading.enumerate()) - before if t.name.startswith(ours)]

    await wait_until(lambda: not left(), 5.0, "the threads to end")
    assert left() == []


async def test_a_prefill_node_that_stops_in_order_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with cluster() as nodes:
        await assert_serves(nodes)
        await nodes.prefill.stop(0.0)
        await wait_until(lambda: any("closed the link" in one.message for one in caplog.records), 5.0, "the other end")
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == []
