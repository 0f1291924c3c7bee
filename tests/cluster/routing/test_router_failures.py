"""The router against scripted nodes: everything that may go wrong in the life of a request."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace

import grpc
import pytest

from paceline.errors import (
    DeadlineExceeded,
    HandoffFailed,
    InvalidRequest,
    NodeUnavailable,
    Overloaded,
    PacelineError,
)
from paceline.results import HandoffBytes, Usage
from paceline.v1 import node_pb2
from tests.support.router_asks import TEXT, answer, ask, check_indexes, chunks
from tests.support.scripted_nodes import Script, fleet, letters


async def test_closing_the_stream_cancels_both_calls() -> None:
    async with fleet() as made:
        decode = made.nodes["decode-0"]
        for node in (decode, made.nodes["prefill-0"]):
            node.script.gate = asyncio.Event()
            cancelled, decodes = node.cancelled, decode.cancelled
            async with aclosing(made.router.generate(ask(n=2))) as stream:
                task = asyncio.ensure_future(anext(stream))
                while node.active < 2:
                    await asyncio.sleep(0.005)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            await made.idle()
            assert node.cancelled == cancelled + 2
            assert decode.cancelled == decodes + 2
            node.script.gate = None
        assert (await answer(made, ask())).text == TEXT[:10]


async def test_a_slow_reader_holds_its_nodes_back() -> None:
    async with fleet() as made:
        made.nodes["decode-0"].script.round_size = 1
        async with aclosing(made.router.generate(ask(100))) as stream:
            await anext(stream)
            await asyncio.sleep(0.1)
            text = [chunk.text async for chunk in stream]
        assert "".join(text) == TEXT[1:64] + letters(5, 5, 100)[64:]


async def test_repeated_tokens_are_sent_once() -> None:
    async with fleet() as made:
        made.nodes["decode-0"].script.repeat = True
        got = await chunks(made, ask())
        check_indexes(got)
        assert "".join(chunk.text for chunk in got) == TEXT[:10]
        assert got[-1].completion is not None
        assert got[-1].completion.speculation.rounds == 3


async def test_a_gap_is_refused_and_the_sequence_resumed() -> None:
    async with fleet() as made:
        made.nodes["decode-0"].script.skip_at = 4
        got = await chunks(made, ask())
        check_indexes(got)
        assert "".join(chunk.text for chunk in got) == TEXT[:10]
        assert len(made.nodes["decode-0"].sequences[1].output_token_ids) == 4


@pytest.mark.parametrize("death", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.ABORTED, grpc.StatusCode.INTERNAL])
async def test_decode_that_dies_mid_stream_is_replaced_exactly_once(death: grpc.StatusCode) -> None:
    async with fleet(decode=2) as made:
        for i in range(2):
            made.nodes[f"decode-{i}"].script = Script(die_after=6, death=death)
        made.nodes["decode-1"].script.die_after = None
        made.nodes["decode-0"].record = made.registry.records["decode-0"]
        made.registry.records["decode-1"] = replace(made.registry.records["decode-1"], running=5)
        got = await chunks(made, ask(20, top_logprobs=0))
        check_indexes(got)
        assert "".join(chunk.text for chunk in got) == TEXT[:20]
        assert sum(len(chunk.logprobs) for chunk in got) == 20
        (first,), (second,) = made.nodes["decode-0"].sequences, made.nodes["decode-1"].sequences
        assert first.output_token_ids == ()
        assert second.output_token_ids == tuple(TEXT[:7].encode())
        assert [s.output_token_ids for s in made.nodes["prefill-0"].sequences] == [(), second.output_token_ids]
        assert len(set(made.nodes["prefill-0"].tickets)) == 2
        done = got[-1].completion
        assert done is not None
        assert (done.usage, done.nodes.decode) == (Usage(5, 20, 0), "decode-1")
        await made.idle()


async def test_the_only_decode_node_comes_back_as_its_next_generation() -> None:
    async with fleet(lease_ttl_s=1.0) as made:
        made.nodes["decode-0"].script.round_pause_s = 0.05
        task = asyncio.create_task(chunks(made, ask(20)))
        while not made.nodes["decode-0"].sequences:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.12)
        await made.kill("decode-0")
        await asyncio.sleep(0.3)
        await made.start("decode-0", generation=2)
        got = await asyncio.wait_for(task, 10)
        check_indexes(got)
        assert "".join(chunk.text for chunk in got) == TEXT[:20]


async def test_a_dead_node_still_registered_is_not_tried_again() -> None:
    async with fleet(decode=2, lease_ttl_s=30.0) as made:
        await made.kill("decode-0", unregister=False)
        for _ in range(4):
            assert (await answer(made, ask())).text == TEXT[:10]
        rendered = made.router.metrics.render().decode()
        assert 'paceline_retries_total{error="NodeUnavailable"} 1.0' in rendered


@pytest.mark.parametrize("die_after", [0, 1])
@pytest.mark.parametrize("death", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.ABORTED])
async def test_prefill_that_dies_is_replaced_by_another(die_after: int, death: grpc.StatusCode) -> None:
    async with fleet(prefill=2) as made:
        for i in range(2):
            made.nodes[f"prefill-{i}"].script = Script(die_after=die_after, death=death)
        first = await chunks(made, ask())
        check_indexes(first)
        assert "".join(chunk.text for chunk in first) == TEXT[:10]
        assert len(made.nodes["decode-0"].sequences) >= 2
        assert len(made.nodes["decode-0"].sequences[1].output_token_ids) == die_after
        await made.idle()


@pytest.mark.parametrize("only", [None, node_pb2.PrefillEvent(handed_off=node_pb2.HandedOff())])
async def test_a_prefill_stream_that_begins_without_a_token_is_tried_again(only: node_pb2.PrefillEvent | None) -> None:
    """An empty one is no fault of the router, and token 0 is not taken from one that begins otherwise."""
    async with fleet() as made:
        made.nodes["prefill-0"].script.begins = [only]
        assert (await answer(made, ask())).text == TEXT[:10]
        assert not made.nodes["prefill-0"].script.begins
        await made.idle()


async def test_without_prefill_decode_prefills_for_itself() -> None:
    async with fleet() as made:
        made.nodes["decode-0"].script.cached_tokens = 2
        await made.kill("prefill-0", unregister=False)
        for _ in range(2):  # it failed; it is suspected
            done = (await answer(made, ask())).completion
            assert (done.nodes.prefill, done.nodes.decode) == ("decode-0", "decode-0")
            assert (done.usage, done.handoff) == (Usage(5, 10, 2), HandoffBytes())
        assert made.nodes["decode-0"].local == [False, True, True]
        made.set_state("prefill-0", "draining")
        assert (await answer(made, ask(1))).text == TEXT[0]


async def test_a_pair_that_cannot_hand_over_falls_back() -> None:
    async with fleet() as made:
        made.nodes["prefill-0"].script.errors = [HandoffFailed("the link broke")]
        assert (await answer(made, ask())).text == TEXT[:10]
        assert made.nodes["decode-0"].local == [False, True]
        assert (await answer(made, ask())).completion.nodes.prefill == "prefill-0"  # for that request alone


async def test_full_nodes_are_passed_over_then_reported() -> None:
    async with fleet(prefill=2, decode=2) as made:
        made.nodes["decode-0"].script.errors = [Overloaded("full", 3.0)]
        made.nodes["decode-1"].script.errors = []
        assert (await answer(made, ask())).text == TEXT[:10]
        for role in ("decode", "prefill"):
            for i in range(2):
                made.nodes[f"{role}-{i}"].script.errors = [Overloaded("full", 3.0)]
            with pytest.raises(Overloaded) as caught:
                await answer(made, ask())
            assert caught.value.retry_after_s == 3.0
        await made.idle()
        assert (await answer(made, ask())).text == TEXT[:10]


async def test_a_running_stream_outlasts_a_full_node() -> None:
    async with fleet() as made:
        made.nodes["decode-0"].script = Script(die_after=3)
        async with aclosing(made.router.generate(ask())) as stream:
            await anext(stream)
            made.nodes["decode-0"].script.errors = [Overloaded("full", 0.05)]
            assert "".join([chunk.text async for chunk in stream]) == TEXT[1:10]


async def test_admission() -> None:
    async with fleet(max_inflight=2, max_queued=0) as made:
        gate = made.nodes["decode-0"].script.gate = asyncio.Event()
        running = [asyncio.create_task(answer(made, ask())) for _ in range(2)]
        while made.router.inflight < 2:
            await asyncio.sleep(0.005)
        with pytest.raises(Overloaded) as caught:
            await answer(made, ask())
        assert caught.value.retry_after_s > 0
        gate.set()
        assert [result.text for result in await asyncio.gather(*running)] == [TEXT[:10]] * 2
        assert (await answer(made, ask())).text == TEXT[:10]


async def test_no_decode_node() -> None:
    async with fleet(decode=0, queue_timeout_s=0.1) as made:
        assert not made.router.ready()
        with pytest.raises(NodeUnavailable):
            await answer(made, ask())
        await made.start("decode-0")
        assert made.router.ready()
        assert (await answer(made, ask())).text == TEXT[:10]


async def test_attempts_are_bounded() -> None:
    async with fleet() as made:
        made.nodes["decode-0"].script.errors = [PacelineError("broken") for _ in range(10)]
        with pytest.raises(PacelineError, match="broken"):
            await answer(made, ask())
        assert len(made.nodes["decode-0"].script.errors) == 7
        made.nodes["decode-0"].script.errors = [InvalidRequest("max_tokens", "needs more pages than there are")]
        with pytest.raises(InvalidRequest) as caught:
            await answer(made, ask())
        assert caught.value.field == "max_tokens"


async def test_prefill_nodes_that_fail_do_not_end_a_request() -> None:
    """Two failures of decode and then some of prefill are not three of either; after three, decode prefills."""
    async with fleet(prefill=4) as made:
        prefills = [made.nodes[f"prefill-{i}"] for i in range(4)]
        for node in prefills:
            node.script.errors = [HandoffFailed("the link broke")]
        made.nodes["decode-0"].script.errors = [PacelineError("broken") for _ in range(2)]
        assert (await answer(made, ask())).text == TEXT[:10]
        assert sum(len(node.script.errors) for node in prefills) == 1
        assert made.nodes["decode-0"].local == [False, False, False, True]


async def test_the_deadline_of_a_request() -> None:
    async with fleet(request_timeout_s=0.3) as made:
        made.nodes["decode-0"].script.gate = asyncio.Event()
        with pytest.raises(DeadlineExceeded):
            await answer(made, ask())
        await made.idle()


async def test_a_silent_node_without_a_lease_is_given_up() -> None:
    async with fleet(decode=2) as made:
        made.registry.records["decode-1"] = replace(made.registry.records["decode-1"], running=5)
        made.nodes["decode-0"].script.gate = asyncio.Event()  # as a process that was stopped
        task = asyncio.create_task(answer(made, ask()))
        while not made.nodes["decode-0"].sequences:
            await asyncio.sleep(0.01)
        del made.registry.records["decode-0"]
        result = await asyncio.wait_for(task, 5)
        assert (result.text, result.completion.nodes.decode) == (TEXT[:10], "decode-1")


@pytest.mark.parametrize(("lease_s", "interval_ms", "pause_s", "tokens"), [(1.5, 0, 0.1, 1), (0.6, 1000, 1.0, 9)])
async def test_a_node_that_talks_needs_no_registry(
    lease_s: float, interval_ms: int, pause_s: float, tokens: int
) -> None:
    """A lease is longer than its event loop may pause, shorter than the answer takes. A node that tells tokens together
    is heard less often. Mutant: that is not granted."""
    async with fleet(lease_ttl_s=lease_s, stream_interval_ms=interval_ms) as made:
        made.nodes["decode-0"].script = Script(round_size=tokens, round_pause_s=pause_s)
        task = asyncio.create_task(answer(made, ask(25)))
        while not made.nodes["decode-0"].sequences:
            await asyncio.sleep(0.01)
        made.registry.records.clear()
        assert (await asyncio.wait_for(task, 10)).text == TEXT[:25]
        assert len(made.nodes["decode-0"].sequences) == 1


async def test_closing_the_router_ends_what_runs() -> None:
    async with fleet() as made:
        made.nodes["decode-0"].script.gate = asyncio.Event()
        task = asyncio.create_task(answer(made, ask()))
        while not made.nodes["decode-0"].active:
            await asyncio.sleep(0.005)
        await made.router.close()
        with pytest.raises(NodeUnavailable):
            await task


async def test_a_node_that_answers_and_fails_is_left_out() -> None:
    async with fleet(decode=2) as made:
        made.nodes["decode-0"].script.errors = [PacelineError("broken") for _ in range(20)]
        made.registry.records["decode-1"] = replace(made.registry.records["decode-1"], running=5)
        for _ in range(8):
            assert (await answer(made, ask())).text == TEXT[:10]
        assert len(made.nodes["decode-0"].script.errors) == 15  # five failures open the breaker
        rendered = made.router.metrics.render().decode()
        assert 'paceline_node_breaker{node="decode-0"} 1.0' in rendered
        assert 'paceline_node_breaker{node="decode-1"} 0.0' in rendered
        await made.kill("decode-1")
        made.nodes["decode-0"].script.errors = []
        assert (await answer(made, ask())).completion.nodes.decode == "decode-0"  # rather than refuse


async def test_requests_at_fault_and_full_nodes_open_no_breaker() -> None:
    async with fleet() as made:
        for error in (InvalidRequest("max_tokens", "no"), Overloaded("full")):
            for _ in range(6):
                made.nodes["decode-0"].script.errors = [error]
                with pytest.raises(type(error)):
                    await answer(made, ask())
        assert 'paceline_node_breaker{node="decode-0"} 0.0' in made.router.metrics.render().decode()


async def test_without_a_prefill_node_that_works_decode_prefills() -> None:
    async with fleet() as made:
        made.nodes["prefill-0"].script.errors = [PacelineError("broken") for _ in range(20)]
        for _ in range(7):
            assert (await answer(made, ask())).text == TEXT[:10]
        assert len(made.nodes["prefill-0"].script.errors) == 15
        assert made.nodes["decode-0"].local[-2:] == [True, True]
