"""The bounded queue between the engine and one client."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from typing import Any

import pytest

from decode_node import stream
from decode_node.stream import MAX_PENDING_EVENTS, EventQueue, told_together
from paceline.errors import HandoffFailed
from paceline.v1 import common_pb2, node_pb2

LONG_S = 1.0  # a test that waits for it takes noticeably longer, and none should


def tokens(first_index: int) -> node_pb2.DecodeEvent:
    return node_pb2.DecodeEvent(tokens=node_pb2.Tokens(first_index=first_index))


def round_of(first_index: int, *token_ids: int) -> node_pb2.DecodeEvent:
    made_by = common_pb2.Round(num_accepted=len(token_ids) - 1)
    logprobs = [common_pb2.TokenLogprobs(logprob=-token_id) for token_id in token_ids]
    told = node_pb2.Tokens(first_index=first_index, token_ids=token_ids, logprobs=logprobs, round=made_by)
    return node_pb2.DecodeEvent(tokens=told)


async def test_the_engine_is_woken_exactly_when_room_comes_back() -> None:
    woken: list[int] = []
    events = EventQueue(asyncio.get_running_loop(), lambda: woken.append(1))
    for index in range(MAX_PENDING_EVENTS):
        assert not events.full
        events.push(tokens(index))
    assert events.full
    assert (await events.take()).tokens.first_index == 0
    assert not events.full
    assert woken == [1]
    await events.take()
    assert woken == [1]


async def test_an_error_comes_after_what_was_said_before_it() -> None:
    events = EventQueue(asyncio.get_running_loop(), lambda: None)
    events.push(tokens(0))
    events.push(HandoffFailed("lost"))
    await events.take()
    with pytest.raises(HandoffFailed, match="lost"):
        await events.take()


async def test_events_of_a_round_wake_the_loop_once_and_are_told_though_the_round_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In their order for each stream. Mutants: every event wakes; a round that fails tells nothing."""
    loop, wakes = asyncio.get_running_loop(), list[int]()
    wake = loop.call_soon_threadsafe

    def counted(callback: object, *args: object) -> asyncio.Handle:
        wakes.append(1)
        return wake(callback, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
    streams = [EventQueue(loop, lambda: None) for _ in range(3)]

    def round_of_the_engine() -> None:
        with suppress(ZeroDivisionError), told_together():
            for stream in streams:
                stream.push(tokens(0))
                stream.push(tokens(1))
            raise ZeroDivisionError
        streams[0].push(tokens(2))

    thread = threading.Thread(target=round_of_the_engine)
    thread.start()
    thread.join()
    assert len(wakes) == 2
    assert [[(await stream.take()).tokens.first_index for _ in range(2)] for stream in streams] == [[0, 1]] * 3
    assert (await streams[0].take()).tokens.first_index == 2


async def test_rounds_that_wait_are_told_together() -> None:
    """Nothing else joins them: the first token of a prompt, which no round made, or the end. Mutants: logprobs are left
    out; ``round`` is set as well; tokens of the prompt are joined."""
    ends = node_pb2.DecodeEvent(finished=node_pb2.Finished())
    said = [tokens(0), round_of(1, 5), round_of(2, 6, 7), round_of(4, 8), ends]
    events = EventQueue(asyncio.get_running_loop(), lambda: None, LONG_S)
    for event in said:
        events.push(event)
    assert await events.take() == said[0]
    joined = (await events.take()).tokens
    assert (joined.first_index, list(joined.token_ids)) == (1, [5, 6, 7, 8])
    assert [entry.logprob for entry in joined.logprobs] == [-5, -6, -7, -8]
    assert [one.num_accepted for one in joined.rounds] == [0, 1, 0]
    assert not joined.HasField("round")
    assert await events.take() == ends
    apart = EventQueue(asyncio.get_running_loop(), lambda: None)
    for event in said:
        apart.push(event)
    assert [await apart.take() for _ in said] == said


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize(
    "last", [node_pb2.DecodeEvent(finished=node_pb2.Finished()), HandoffFailed("lost"), "a full queue"]
)
async def test_what_must_be_told_at_once_ends_the_gathering(
    last: node_pb2.DecodeEvent | HandoffFailed | str, before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it begins, and while it lasts. Mutants: it always takes its time; an end that came before is not seen."""
    monkeypatch.setattr("decode_node.stream.MAX_TELL_EVERY_S", 60.0)
    events = EventQueue(asyncio.get_running_loop(), lambda: None, 60.0)

    def say() -> None:
        events.push(round_of(1, 5))
        if isinstance(last, str):
            for index in range(2, MAX_PENDING_EVENTS + 1):
                events.push(round_of(index, 5))
        else:
            events.push(last)

    if before:
        say()
        await asyncio.sleep(0)  # the event loop was woken for it
        await events.gather()
    else:
        gathering = asyncio.create_task(events.gather())
        await asyncio.sleep(0)
        engine = threading.Thread(target=say)
        engine.start()
        await gathering
        engine.join()
    told = (await events.take()).tokens
    assert len(told.token_ids) == (MAX_PENDING_EVENTS if isinstance(last, str) else 1)


async def test_tokens_wake_nobody_who_gathers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor are they lost when the time is over. Mutant: every round wakes the event loop."""
    loop, wakes = asyncio.get_running_loop(), list[int]()
    events = EventQueue(loop, lambda: None, 0.05)
    events.push(tokens(0))
    await asyncio.sleep(0)
    await events.take()
    gathering = asyncio.create_task(events.gather())
    await asyncio.sleep(0)
    monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *_: wakes.append(1))
    events.push(round_of(1, 5))
    events.push(round_of(2, 6))
    monkeypatch.undo()
    await asyncio.sleep(0)
    assert not gathering.done()
    await gathering
    assert wakes == []
    assert list((await events.take()).tokens.token_ids) == [5, 6]
    taking = asyncio.create_task(events.take())
    await asyncio.sleep(0)
    events.push(round_of(3, 7))
    assert list((await asyncio.wait_for(taking, 60)).tokens.token_ids) == [7]


@pytest.mark.parametrize("asked", [float("nan"), -1.0, 0.0])
async def test_no_time_to_gather(asked: float) -> None:
    events = EventQueue(asyncio.get_running_loop(), lambda: None, asked)
    await asyncio.wait_for(events.gather(), 60)
    events.push(round_of(1, 5))
    events.push(round_of(2, 6))
    assert list((await events.take()).tokens.token_ids) == [5]


async def test_nobody_makes_a_node_wait_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: a caller's time has no bound."""
    monkeypatch.setattr("decode_node.stream.MAX_TELL_EVERY_S", 0.05)
    events = EventQueue(asyncio.get_running_loop(), lambda: None, 1e9)
    gathering = asyncio.create_task(events.gather())
    await asyncio.wait({gathering}, timeout=20)
    assert gathering.done()
    assert not gathering.cancelled()


async def test_an_engine_that_saw_a_full_queue_is_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    """It became full while the reader took others: mutant, only a queue that was full before wakes."""
    woken, seen = list[int](), list[bool]()
    events = EventQueue(asyncio.get_running_loop(), lambda: woken.append(1), 0.02)
    for i in range(MAX_PENDING_EVENTS - 1):
        events.push(round_of(i, i))
    made_by_round = stream._made_by_round

    def meanwhile(event: Any) -> bool:
        if not seen:
            events.push(round_of(MAX_PENDING_EVENTS - 1, 0))
            seen.append(events.full)  # as the engine sees it, which then leaves the stream out
        return made_by_round(event)

    monkeypatch.setattr(stream, "_made_by_round", meanwhile)
    await events.take()
    assert (seen, woken, events.full) == ([True], [1], False)
