"""Cores are shared by the nodes that work, and nothing is left behind."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from paceline.layers import build
from paceline.serving import cores
from paceline.serving.cores import FIRST_PAUSE_S, LONGEST_PAUSE_S, CoreShare, Crowd
from paceline.serving.loop import EngineLoop
from tests.fakes.wait import wait_for

CORES = 5


@pytest.fixture(autouse=True)
def _own_threads_again() -> Iterator[None]:
    if build.load_kernels() is None:
        pytest.skip("the CPU kernels cannot be built here (no C++ compiler)")
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


def test_a_node_whose_steps_wait_works_alone_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "num_cores", lambda: CORES)
    monkeypatch.setattr(cores, "FIRST_PAUSE_S", 0.0)
    share = CoreShare("test", 0, tmp_path)
    share._crowd._pause_s = 0.0
    with share.step():
        for _ in range(40):
            time.sleep(0.001)
    assert build.current_threads() == 1
    with share.step():  # its pause is over: the next one is a try
        time.sleep(0.002)
    assert build.current_threads() == CORES
    with share.step():  # one long wait, as for a lock
        time.sleep(0.05)
    assert build.current_threads() == CORES
    share.close()


def test_tries_in_vain_come_less_and_less_often() -> None:
    crowd, now = Crowd(), 0.0
    pauses: list[float] = []
    for _ in range(8):
        crowd.stepped(now, 0.1, 0.08, 300)
        assert crowd.alone
        began = now
        while crowd.alone:
            now += 0.01
            crowd.stepped(now, 0.01, 0.009, 300)  # what it waits on one thread tells nothing
        pauses.append(round(now - began, 1))
    assert pauses[0] == pytest.approx(FIRST_PAUSE_S, abs=0.06)
    assert pauses[:3] == sorted(set(pauses[:3]))
    assert pauses[-1] == pytest.approx(LONGEST_PAUSE_S, abs=0.1)
    for _ in range(8):
        crowd.stepped(now, 0.1, 0.01, 300)
    assert not crowd.alone
    crowd.stepped(now, 0.1, 0.08, 300)
    crowd.stepped(now + FIRST_PAUSE_S + 0.01, 0.1, 0.08, 300)
    assert not crowd.alone  # a free time has made them short again


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
