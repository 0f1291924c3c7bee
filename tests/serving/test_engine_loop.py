"""The engine thread: work is done between steps, errors do not end it."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from paceline.serving.loop import EngineLoop, every
from tests.fakes.wait import wait_for


def idle() -> bool:
    return False


def broken_work() -> None:
    raise ZeroDivisionError("division by zero")


async def test_call_runs_on_the_engine_thread_and_returns() -> None:
    loop = EngineLoop("engine-test", idle)
    loop.start()
    try:
        assert await loop.call(lambda: threading.current_thread().name) == "engine-test"
        with pytest.raises(KeyError):
            await loop.call(lambda: dict[str, int]()["missing"])
    finally:
        assert loop.stop(5.0)
    assert not loop.alive()


async def test_posted_work_waits_for_the_end_of_the_step() -> None:
    order: list[str] = []
    started, finish = threading.Event(), threading.Event()

    def step() -> bool:
        if not started.is_set():
            started.set()
            finish.wait(5.0)
            order.append("step")
        return False

    loop = EngineLoop("engine-test", step)
    loop.start()
    await asyncio.to_thread(started.wait, 5.0)
    done = asyncio.create_task(loop.call(lambda: order.append("posted")))
    await asyncio.sleep(0.02)
    assert order == []
    finish.set()
    await done
    assert order == ["step", "posted"]
    assert loop.stop(5.0)


async def test_errors_end_neither_the_thread_nor_other_work(caplog: pytest.LogCaptureFixture) -> None:
    failures = 3

    def step() -> bool:
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise RuntimeError("broken step")
        return False

    loop = EngineLoop("engine-test", step)
    loop.start()
    loop.post(broken_work)
    assert await loop.call(lambda: 7) == 7
    assert loop.alive()
    assert loop.stop(5.0)
    assert "broken step" in caplog.text
    assert "division by zero" in caplog.text


def test_work_posted_last_is_still_done() -> None:
    done = []
    loop = EngineLoop("engine-test", idle)
    loop.start()
    loop.post(lambda: time.sleep(0.05))
    loop.post(lambda: done.append(1))
    assert loop.stop(5.0)
    assert done == [1]


def test_wake_is_faster_than_the_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.serving.loop.IDLE_TICK_S", 30.0)
    steps = threading.Semaphore(0)

    def step() -> bool:
        steps.release()
        return False

    loop = EngineLoop("engine-test", step)
    loop.start()
    assert steps.acquire(timeout=5.0)
    loop.wake()
    assert steps.acquire(timeout=5.0)
    assert loop.stop(5.0)


def test_a_stuck_step_is_not_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.serving.loop.STALL_S", 0.05)
    entered, release = threading.Event(), threading.Event()

    def step() -> bool:
        entered.set()
        return not release.wait(30.0)

    loop = EngineLoop("engine-test", step)
    loop.start()
    assert entered.wait(5.0)
    wait_for(lambda: not loop.alive())
    release.set()
    assert loop.stop(5.0)


async def test_a_timer_goes_on_after_an_error() -> None:
    ticks = []

    def tick() -> None:
        ticks.append(1)
        if len(ticks) == 1:
            raise RuntimeError("first tick")

    timer = asyncio.create_task(every(0.005, tick))
    async with asyncio.timeout(5.0):
        while len(ticks) < 3:
            await asyncio.sleep(0.005)
    assert not timer.done()
    timer.cancel()
