"""Cores are shared by the nodes that work, and nothing is left behind."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from paceline.layers import build
from paceline.layers.linear import Linear
from paceline.serving import cores
from paceline.serving.cores import FIRST_PAUSE_S, JUDGED_S, LONGEST_PAUSE_S, CoreShare, Crowd
from paceline.serving.loop import EngineLoop
from tests.fakes.wait import wait_for
from tests.support.needs import needs_kernels

pytestmark = needs_kernels

CORES = 5


@pytest.fixture(autouse=True)
def _own_threads_again() -> Iterator[None]:
    yield
    build.set_threads(1)


def _node(folder: Path, slot: int, pipe: Connection) -> None:
    """Another node's process: does what it is told and says how many threads it would use."""
    cores.num_cores = lambda: CORES
    share = CoreShare("test", slot, folder)
    for word in iter(pipe.recv, "close"):
        share.busy = word == "busy"
        pipe.send(build.current_threads())
    share.close()
    pipe.send(0)


def test_what_works_alone_has_all_cores_and_two_have_equal_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores, "num_cores", lambda: CORES)
    here, there = multiprocessing.Pipe()
    other = multiprocessing.get_context("spawn").Process(target=_node, args=(tmp_path, 0, there))
    other.start()
    share = CoreShare("test", 1, tmp_path)
    told = []
    for word in ("idle", "busy", "idle"):
        here.send(word)
        told.append((here.recv(), build.current_threads()))
    assert told[0] == told[2] == (5, 5)
    assert told[1][1] == 2
    share.busy = True
    here.send("busy")
    assert (here.recv(), build.current_threads()) == (3, 2)  # what is left over goes to the first
    here.send("close")
    here.recv()
    other.join(10)
    assert build.current_threads() == 5
    assert len(list(tmp_path.iterdir())) == 1
    share.close()
    share.close()
    assert list(tmp_path.iterdir()) == []


def test_a_successor_clears_what_a_killed_node_left(tmp_path: Path) -> None:
    first, second = CoreShare("test", 0, tmp_path), CoreShare("test", 1, tmp_path)
    first.busy = True
    os.close(first._file)  # as the system does for a process that is killed
    assert second._map[0] == 1
    successor = CoreShare("test", 0, tmp_path)
    assert second._map[0] == 0
    successor.close()
    second.close()
    assert list(tmp_path.iterdir()) == []


def test_files_of_a_crash_go_and_those_in_use_stay(tmp_path: Path) -> None:
    crashed = CoreShare("crashed", 0, tmp_path)
    os.close(crashed._file)
    alive = CoreShare("alive", 0, tmp_path)
    other = CoreShare("other", 0, tmp_path)
    assert {path.name.rsplit("-", 1)[1] for path in tmp_path.iterdir()} == {"alive", "other"}
    alive.close()
    other.close()


def test_a_link_in_place_of_the_file_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text("x")
    folder = tmp_path / "shm"
    folder.mkdir()
    (folder / f"{cores.PREFIX}{os.getuid()}-test").symlink_to(target)
    with pytest.raises(OSError, match="test"):
        CoreShare("test", 0, folder)
    assert target.read_text() == "x"


def _linear_of(rows: int) -> Callable[[], None]:
    """A product that takes some 10 milliseconds of parallel regions."""
    layer, x = Linear(torch.randn(2048, 1024)), torch.randn(rows, 1024)

    def work() -> None:
        for _ in range(20):
            layer(x)

    return work


def test_a_node_whose_threads_miss_much_works_on_fewer_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads that may run on one core alone miss half of their time."""
    monkeypatch.setattr(cores, "num_cores", lambda: 2)
    share, work = CoreShare("test", 0, tmp_path), _linear_of(64)
    found: list[int] = []

    def steps() -> None:  # on a thread of its own: its helpers run where it may
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        deadline = time.monotonic() + 20
        while len(found) < 2 and time.monotonic() < deadline:
            with share.step():
                work()
            if build.current_threads() != (2 if len(found) % 2 == 0 else 1):
                found.append(build.current_threads())

    thread = threading.Thread(target=steps)
    thread.start()
    thread.join(30)
    assert found == [1, 2]  # and it tries again
    counts = share.counts()
    assert 0.4 * counts["shared_ms"] < counts["missed_ms"] <= counts["shared_ms"]
    share.close()


def test_a_step_that_is_crowded_goes_on_with_fewer_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt is one long step. Mutants: it has all threads until it ends; what it decided stays when it has ended."""
    monkeypatch.setattr(cores, "num_cores", lambda: 2)
    share, work = CoreShare("test", 0, tmp_path), _linear_of(64)
    monkeypatch.setattr(cores, "JUDGED_S", 1e9)  # so that the next step is judged anew
    found: list[int] = []

    def step() -> None:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        deadline = time.monotonic() + 20
        with share.step():
            while build.current_threads() > 1 and time.monotonic() < deadline:
                work()
            found.append(build.current_threads())
        found.append(build.current_threads())

    thread = threading.Thread(target=step)
    thread.start()
    thread.join(30)
    assert found == [1, 2]
    share.close()


def test_time_outside_of_kernels_is_no_crowd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "num_cores", lambda: CORES)
    share = CoreShare("test", 0, tmp_path)
    with share.step():  # as for a lock
        time.sleep(0.1)
    assert build.current_threads() == CORES
    share.close()


def _stepped(crowd: Crowd, now: float, missed: float, threads: int) -> None:
    crowd.stepped(now, JUDGED_S, missed * JUDGED_S, threads)


def test_tries_in_vain_come_less_and_less_often() -> None:
    crowd, now = Crowd(), 0.0
    pauses: list[float] = []
    for _ in range(8):
        _stepped(crowd, now, 0.5, 2)
        assert crowd.most == 1
        began = now
        while crowd.most:
            now += 0.01
            crowd.stepped(now, 0.0, 0.0, 1)  # one thread has no regions to wait for
        pauses.append(round(now - began, 1))
    assert pauses[0] == pytest.approx(FIRST_PAUSE_S, abs=0.06)
    assert pauses[:3] == sorted(set(pauses[:3]))
    assert pauses[-1] == pytest.approx(LONGEST_PAUSE_S, abs=0.1)
    for _ in range(8):
        _stepped(crowd, now, 0.1, 2)
    assert not crowd.most
    _stepped(crowd, now, 0.5, 2)
    crowd.stepped(now + FIRST_PAUSE_S + 0.01, 0.0, 0.0, 1)
    assert not crowd.most  # a free time has made them short again


def test_threads_that_still_miss_much_become_fewer_still() -> None:
    crowd, seen = Crowd(), []
    threads = 16
    for _ in range(12):
        _stepped(crowd, 0.0, 0.5 if threads > 5 else 0.1, threads)
        threads = crowd.most
        seen.append(threads)
    assert seen[:5] == [12, 9, 6, 4, 4]
    assert set(seen[5:]) == {4}


def test_one_burst_is_no_crowd() -> None:
    """What a router takes for its messages at once is a part of what is judged together."""
    crowd = Crowd()
    crowd.stepped(0.0, 0.2 * JUDGED_S, 0.15 * JUDGED_S, 2)
    crowd.stepped(0.0, 0.9 * JUDGED_S, 0.0, 2)
    assert not crowd.most


def test_an_engine_says_when_it_works(tmp_path: Path) -> None:
    share = CoreShare("test", 0, tmp_path)
    seen: list[bool] = []
    slept, work = threading.Event(), iter([True, True, False])

    def step() -> bool:
        seen.append(share.busy)
        if next(work, False):
            return True
        slept.set()
        return False

    loop = EngineLoop("engine-test", step, share)
    loop.start()
    assert slept.wait(10)
    wait_for(lambda: not share.busy)
    assert loop.stop(10)
    assert all(seen)
    share.close()
