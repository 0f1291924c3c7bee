"""What a prefill node answers, beside a whole hand-off (tests/decode_node)."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import pytest

from kv_transfer.transports.gloo import GlooTransport
from paceline.v1 import node_pb2
from paceline.wire import sequence_to_proto
from tests.fakes.nodes import Cluster, cluster, node_config, sequence_request, wait_until
from tests.fakes.runner import expected_output


async def status_of(call: Any) -> grpc.StatusCode:
    """Read a call to its end; one that this side cancelled ends too."""
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
        async for _ in call:
            pass
    return await call.code()  # type: ignore[no-any-return]


async def reserve(nodes: Cluster, **changes: Any) -> tuple[Any, Any, Any]:
    """A reservation: the request, the Decode call (its task keeps it read), Reserved."""
    request = sequence_request(**changes)
    decode = nodes.open_decode(request)
    event = await anext(aiter(decode))
    return request, decode, event.reserved


async def test_the_first_token_does_not_wait_for_the_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()

    def held(self: GlooTransport, data: Any) -> Callable[[], None]:
        def wait() -> None:
            assert go_on.wait(8.0)
            self.send(data)

        return wait

    monkeypatch.setattr(GlooTransport, "start_send", held)
    async with cluster(
        node_config(transfer_timeout_s=10.0), node_config(page_size=8, transfer_timeout_s=10.0)
    ) as nodes:
        request, decode, reserved = await reserve(nodes, num_prompt=60)
        seen = []
        async for event in nodes.open_prefill(request, reserved):
            seen.append(event.WhichOneof("event"))
            if event.HasField("handed_off"):
                assert event.handed_off.exposed_s > 0.5
            else:  # no byte has left, and rows are still to be read from the pages
                assert nodes.prefill.shell.load().free_pages < nodes.prefill.shell.load().total_pages
                await asyncio.sleep(0.6)
                go_on.set()
        assert seen == ["first_token", "handed_off"]
        tokens = [token async for event in decode for token in event.tokens.token_ids]
        assert tokens == expected_output(request)[1:]
        await nodes.wait_for_release()


async def test_connect_opens_the_link_that_requests_use() -> None:
    async with cluster() as nodes:
        message = node_pb2.ConnectRequest(decode_address=nodes.decode_address)
        first, second = await asyncio.gather(nodes.prefill_stub.Connect(message), nodes.prefill_stub.Connect(message))
        assert first.link_id == second.link_id
        assert first.decode_node_id == "decode-0"
        await nodes.generate(sequence_request())
        assert list(nodes.decode._links._links) == [first.link_id]


async def test_an_absent_decode_node_is_unavailable() -> None:
    async with cluster() as nodes:
        with pytest.raises(grpc.aio.AioRpcError) as gone:
            await nodes.prefill_stub.Connect(node_pb2.ConnectRequest(decode_address="127.0.0.1:9"))
        assert gone.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "127.0.0.1:9" in (gone.value.details() or "")


async def test_a_decode_node_that_left_is_paired_anew() -> None:
    """vllm #49238. The sentinel and the control stream tell; the next request opens a link under a new id."""
    async with cluster() as nodes:
        await nodes.generate(sequence_request())
        (old,) = nodes.decode._links._links.values()
        assert old.receiver is not None
        old.receiver.link_lost("decode lost it")
        await wait_until(lambda: not nodes.prefill._links._links, 5.0, "the prefill side to notice")
        request = sequence_request()
        assert (await nodes.generate(request)).output == expected_output(request)
        assert list(nodes.decode._links._links) != [old.link_id]
        await nodes.wait_for_release()


async def test_prompts_wait_for_pages_and_the_line_is_bounded() -> None:
    async with cluster(prefill_config=node_config(kv_cache_tokens=128, max_waiting=1)) as nodes:
        nodes.prefill_runner.step_s = 0.1  # a second for the first prompt, in which the others come
        reserved = [await reserve(nodes, num_prompt=80, seed=i) for i in range(3)]
        followers = [asyncio.create_task(status_of(nodes.open_prefill(r, t))) for r, _, t in reserved]
        codes = sorted(code.name for code in await asyncio.gather(*followers))
        assert codes == ["OK", "OK", "RESOURCE_EXHAUSTED"]
        for _, decode, _ in reserved:
            decode.cancel()
        await nodes.wait_for_release()


async def test_a_prompt_waits_for_pages_until_its_deadline() -> None:
    async with cluster(prefill_config=node_config(kv_cache_tokens=128, reserve_deadline_s=2.0)) as nodes:
        nodes.prefill_runner.step_s = 0.5  # five seconds for the first prompt
        reserved = [await reserve(nodes, num_prompt=80, seed=i) for i in range(2)]
        first = asyncio.create_task(status_of(nodes.open_prefill(reserved[0][0], reserved[0][2])))
        await wait_until(lambda: nodes.prefill.shell.status().held == 1, 5.0, "the first prompt to have its pages")
        second = nodes.open_prefill(reserved[1][0], reserved[1][2])
        assert await status_of(second) is grpc.StatusCode.DEADLINE_EXCEEDED
        assert await first is grpc.StatusCode.OK
        for _, decode, _ in reserved:
            decode.cancel()
        await nodes.wait_for_release()


async def test_a_caller_that_leaves_the_line_holds_nothing() -> None:
    async with cluster(prefill_config=node_config(kv_cache_tokens=128)) as nodes:
        nodes.prefill_runner.step_s = 0.1  # a second for the first prompt, in which the other comes
        reserved = [await reserve(nodes, num_prompt=80, seed=i) for i in range(2)]
        first = asyncio.create_task(status_of(nodes.open_prefill(reserved[0][0], reserved[0][2])))
        call = nodes.open_prefill(reserved[1][0], reserved[1][2])
        second = asyncio.create_task(status_of(call))
        await wait_until(lambda: nodes.prefill.shell.load().waiting == 1, 5.0, "the second to wait")
        call.cancel()
        await second
        await wait_until(lambda: nodes.prefill.shell.load().waiting == 0, 5.0, "the line to empty")
        assert await first is grpc.StatusCode.OK
        for _, decode, _ in reserved:
            decode.cancel()
        await nodes.wait_for_release()


async def test_several_prompts_share_a_step() -> None:
    async with cluster(prefill_config=node_config(prefill_chunk_tokens=64)) as nodes:
        nodes.prefill_runner.gate.clear()
        reserved = [await reserve(nodes, num_prompt=12, seed=i) for i in range(3)]
        followers = [asyncio.create_task(status_of(nodes.open_prefill(r, t))) for r, _, t in reserved]
        await wait_until(lambda: nodes.prefill.shell.status().held > 0, 5.0, "the first prompt")
        await wait_until(lambda: nodes.prefill.shell._active == 3, 5.0, "the others")
        await asyncio.sleep(0.1)  # and turns of the event loop in which they are posted
        nodes.prefill_runner.gate.set()
        assert {await follower for follower in followers} == {grpc.StatusCode.OK}
        assert max(nodes.prefill_runner.prefill_sizes) > 1
        for _, decode, _ in reserved:
            decode.cancel()
        await nodes.wait_for_release()


async def test_a_peer_that_never_answers_costs_its_link() -> None:
    """Everything was sent, no acknowledgement comes: the wait is bounded."""
    config = node_config(handoff_deadline_s=0.2, transfer_timeout_s=2.0)
    async with cluster(prefill_config=config, decode_config=node_config(page_size=8)) as nodes:
        request, decode, reserved = await reserve(nodes)
        await nodes.prefill_stub.Connect(node_pb2.ConnectRequest(decode_address=nodes.decode_address))
        (link,) = nodes.decode._links._links.values()
        link.ack = lambda ack: None  # type: ignore[method-assign]
        assert link.receiver is not None
        link.receiver._in_flight._ack = lambda ack: None
        assert await status_of(nodes.open_prefill(request, reserved)) is grpc.StatusCode.ABORTED
        decode.cancel()
        await nodes.wait_for_release()


async def test_bad_requests_name_the_field() -> None:
    async with cluster() as nodes:
        request = sequence_request(num_prompt=10)
        base = {"sequence": sequence_to_proto(request), "decode_address": nodes.decode_address}
        for changes, field in (
            ({"ticket": ""}, "ticket"),
            ({"ticket": "t", "decode_cached_tokens": 10}, "decode_cached_tokens"),
        ):
            call = nodes.prefill_stub.Prefill(node_pb2.PrefillRequest(**base, **changes))  # type: ignore[arg-type]
            assert await status_of(call) is grpc.StatusCode.INVALID_ARGUMENT
            assert field in await call.details()


async def test_an_unknown_ticket_is_aborted() -> None:
    async with cluster() as nodes:
        request = sequence_request()
        call = nodes.open_prefill(request, node_pb2.Reserved(ticket="nobody's"))
        assert await status_of(call) is grpc.StatusCode.ABORTED
        await nodes.wait_for_release()


async def test_status_names_the_node() -> None:
    async with cluster() as nodes:
        for stub, role in ((nodes.prefill_stub, "prefill"), (nodes.decode_stub, "decode")):
            status = await stub.Status(node_pb2.StatusRequest())
            assert status.node.id == f"{role}-0"
            assert status.node.role == role
            assert status.bit_exact
            assert status.integrity == ""
            assert status.max_model_len == 512
            assert status.vocab_size == 1000
        assert nodes.prefill.shell.fingerprint_digest() == nodes.decode.shell.fingerprint_digest()
        assert nodes.prefill.shell.alive()
        assert nodes.decode.shell.alive()


async def test_load_is_told_while_the_engine_takes_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's thread puts a prompt in line before it counts it as held."""
    async with cluster() as nodes:
        engine, taken, told = nodes.prefill._engine, threading.Event(), threading.Event()
        add = engine._scheduler.add

        def slowly(job: Any) -> None:
            add(job)
            taken.set()
            assert told.wait(10.0)

        monkeypatch.setattr(engine._scheduler, "add", slowly)
        request, decode, reserved = await reserve(nodes)
        follower = asyncio.create_task(status_of(nodes.open_prefill(request, reserved)))
        await wait_until(taken.is_set, 5.0, "the prompt")
        load = nodes.prefill.shell.load()
        told.set()
        assert (load.running, load.waiting) == (0, 1)
        assert await follower is grpc.StatusCode.OK
        decode.cancel()
        await nodes.wait_for_release()
