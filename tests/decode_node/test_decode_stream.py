"""The bounded queue between the engine and one client."""

from __future__ import annotations

import asyncio

import pytest

from decode_node.stream import MAX_PENDING_EVENTS, EventQueue
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
