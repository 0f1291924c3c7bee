"""Leaving a Ray that is lost, with waits that are only pretended: Ray's library crashes when it is left under one."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from cluster.nodes import ray_session, ray_watch
from cluster.nodes.ray_processes import lives
from cluster.nodes.ray_session import SESSION, RayLost, RaySession, get, start_ray, within
from cluster.nodes.ray_watch import RayWatch
from cluster.nodes.supervise import Supervisor
from paceline.errors import NodeUnavailable
from tests.fakes.supervised import until


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> RaySession:
    made = RaySession()
    monkeypatch.setattr(ray_session, "SESSION", made)
    monkeypatch.setattr(ray_watch, "SESSION", made)
    return made


def test_ray_is_left_only_when_nobody_waits_in_it(session: RaySession, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutants: ``get`` waits in one piece; ``close`` waits for nobody; a closed one is asked."""
    inside = threading.Event()

    def never(reference: Any, timeout: float) -> None:
        inside.set()
        time.sleep(timeout)
        inside.clear()
        raise ray.exceptions.GetTimeoutError

    monkeypatch.setattr(ray, "get", never)
    monkeypatch.setattr(ray_session, "SLICE_S", 0.05)
    raised: Future[None] = Future()

    def wait() -> None:
        try:
            get("reference", 30.0)
        except RayLost as error:
            raised.set_exception(error)

    threading.Thread(target=wait, daemon=True).start()
    assert inside.wait(5.0)
    session.close()
    assert not inside.is_set()
    with pytest.raises(RayLost):
        raised.result(5.0)
    with pytest.raises(RayLost):
        get("reference", 30.0)


def test_a_wait_that_does_not_end_keeps_ray(session: RaySession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_session, "QUIET_S", 0.05)
    with session.waiting(), pytest.raises(NodeUnavailable, match="a call into it does not end"):
        session.close()


def test_a_process_that_quits_leaves_ray_as_it_is(session: RaySession, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real process in place of its raylet. Mutants: Ray is shut down under a call; the end waits for the call; its
    processes live on; whoever waits in it waits on."""
    monkeypatch.setattr(ray, "shutdown", lambda: pytest.fail("a call is in it"))
    monkeypatch.setattr(session, "close", lambda: pytest.fail("it waits for the call"))
    session.quits = True
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        session._own = [raylet := psutil.Process(process.pid)]
        try:
            with session.waiting():
                session.stop()
                assert not lives(raylet)
        finally:
            process.kill()
    with pytest.raises(RayLost):
        get("reference", 30.0)


def test_a_call_is_given_up_when_this_process_ends(session: RaySession, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the end waits for the thread that waits. Mutant: it is waited for."""
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    threading.Timer(0.05, session.stop).start()
    with pytest.raises(RayLost, match="this process ends"):
        within(30.0, lambda: threading.Event().wait(2.0))


def test_a_call_that_waits_for_a_dead_gcs_is_given_up(session: RaySession) -> None:
    with pytest.raises(NodeUnavailable, match=r"did not answer within 0\.05 s"):
        within(0.05, threading.Event().wait)
    with pytest.raises(TimeoutError, match="its own"):
        within(5.0, _late)


def _late() -> None:
    raise TimeoutError("its own")


async def test_a_ray_that_somebody_stopped_is_let_go_on(
    session: RaySession, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A real process in place of its raylet. Mutant: whatever lives is well."""
    monkeypatch.setattr(ray_watch, "POLL_S", 0.001)
    session._address = "local"
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        raylet = psutil.Process(process.pid)
        session._own = [raylet]
        raylet.suspend()
        nobody: Any = None  # nothing is renewed
        try:
            await until(lambda: raylet.status() == psutil.STATUS_STOPPED)
            task = asyncio.create_task(RayWatch(Supervisor(nobody), nobody, nobody, nobody).run())
            told = f"(process {process.pid}) of this deployment's own Ray was stopped"
            await until(lambda: told in caplog.text)  # behind the thread that lets it go on
            assert raylet.status() != psutil.STATUS_STOPPED
            task.cancel()
        finally:
            process.kill()


def test_the_raylet_of_this_host_is_lost_for_good(
    session: RaySession, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its GCS answers on. Mutants: the GCS alone is asked; another raylet at the socket counts as the one before."""
    monkeypatch.setattr(ray_session, "check_listens", lambda address: None)
    monkeypatch.setattr(ray_session, "within", lambda timeout_s, call: None)
    session._address, session._raylet_socket = "head:6379", str(tmp_path / "raylet")
    for trouble in ("", ray_session.OWN_RAYLET):
        with socket.socket(socket.AF_UNIX) as raylet:
            raylet.bind(session._raylet_socket)
            raylet.listen(1)
            assert [session.trouble() for _ in range(4)] == [trouble] * 4  # though nobody accepts
        assert session.trouble() == ray_session.OWN_RAYLET
        (tmp_path / "raylet").unlink()


class Lost:
    """A Ray that is found lost; another one is there at the third try."""

    def __init__(self) -> None:
        self.tries = 0

    def renew(self) -> None:
        self.tries += 1
        if self.tries < 3:
            raise NodeUnavailable("no host has room")


async def test_another_ray_is_tried_for_until_it_has_the_nodes(
    session: RaySession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutants: one try; the registry is read later; a Ray without places counts as whole; nobody is told."""
    monkeypatch.setattr(ray_watch, "POLL_S", 0.001)
    monkeypatch.setattr(ray_watch, "AGAIN_S", 0.001)
    session._address = "local"
    troubles = ["raylet is gone"]
    monkeypatch.setattr(session, "trouble", lambda: troubles.pop() if troubles else "")
    supervisor, lost, told = Supervisor(lambda *node: pytest.fail("it starts nodes")), Lost(), list[str]()
    read: list[int] = []
    renewed = asyncio.Event()
    loop = asyncio.get_running_loop()
    nodes: Any = lost

    def on_renewed() -> None:
        loop.call_soon_threadsafe(renewed.set)

    async def refresh() -> None:
        read.append(lost.tries)

    watch = RayWatch(supervisor, nodes, refresh, on_renewed, told.append)
    task = asyncio.create_task(watch.run())
    async with asyncio.timeout(5.0):
        await renewed.wait()
        while supervisor.trouble:
            await asyncio.sleep(0.001)
    task.cancel()
    assert lost.tries == 3
    assert read == [0, 1, 2]
    assert told[0] == "raylet is gone"


def test_rays_token_is_its_owners(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Others on the host would run code with it. Mutants: it stays as Ray made it; Ray without a token is not told."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH", raising=False)
    token = tmp_path / ".ray" / "auth_token"
    monkeypatch.setattr(SESSION, "start", lambda address, cpus: token.write_text("made by Ray"))
    token.parent.mkdir()
    for mode, warned in (("token", 0), ("disabled", 1)):
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
        start_ray("local", 1)
        assert token.stat().st_mode & 0o777 == 0o600
        assert caplog.text.count("INSECURE") == warned


JOINS_A_DEAD_RAYLET = """
import ray

from cluster.nodes.ray_session import SESSION, start_ray, stop_ray
from paceline.errors import NodeUnavailable

theirs = ray._private.worker.connect


def connect(node, *arguments, **options):
    raylet = node.all_processes["raylet"][0].process
    raylet.kill()
    raylet.wait()
    ray._private.worker.connect = theirs
    theirs(node, *arguments, **options)


ray._private.worker.connect = connect
try:
    start_ray("local", 1)
except NodeUnavailable as error:
    print(error)
SESSION.renew(())
print(ray.get(ray.put("another")))
stop_ray()
"""


def test_a_raylet_that_ends_before_it_is_joined_ends_no_router() -> None:
    """Mutant: Ray's library joins it, and ends the process."""
    done = subprocess.run([sys.executable, "-c", JOINS_A_DEAD_RAYLET], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["Ray did not start: its raylet ended before it was joined", "another"]


LEAVES_A_DEAD_GCS = """
import time

import psutil
import ray

from cluster.nodes.private_ray import STAND_IN
from cluster.nodes.ray_session import SESSION, start_ray, stop_ray

start_ray("local", 2)
gcs, = [one for one in psutil.Process().children() if one.name() == "gcs_server"]
gcs.kill()
SESSION.close()
theirs, took_s = ray.shutdown, []


def shutdown():
    began = time.monotonic()
    theirs()
    took_s.append(time.monotonic() - began)


ray.shutdown = shutdown
SESSION.renew(())
ray.shutdown = theirs
raylet, = [one for one in psutil.Process().children() if one.name() == "raylet"]
print(took_s[0] < 4, [one.pid for one in raylet.children() if one.name() != STAND_IN])
stop_ray()
"""


def test_another_ray_is_there_without_a_wait() -> None:
    """Waits of Ray's library, in one of which no other thread of this process runs. Mutants: a GCS that is gone is told
    for 5 s what tasks did; workers that nobody needs are waited for."""
    done = subprocess.run([sys.executable, "-c", LEAVES_A_DEAD_GCS], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["True []"]), done.stdout + done.stderr
