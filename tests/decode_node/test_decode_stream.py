"""The bounded queue between the engine and one client."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress

import pytest

from decode_node.stream import MAX_PENDING_EVENTS, EventQueue, told_together
from paceline.errors import HandoffFailed
from paceline.v1 import node_pb2


def tokens(first_index: int) -> node_pb2.DecodeEvent:
    return node_pb2.DecodeEvent(tokens=node_pb2.Tokens(first_index=first_index))


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
