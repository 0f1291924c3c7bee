"""Processes of a private Ray, and those that its raylets have started, as the machine shows them."""

from __future__ import annotations

import socket
from collections.abc import Collection
from contextlib import suppress

import psutil

from cluster.nodes.private_ray import STAND_IN

AGENT_TIMEOUT_S = 2.0  # for Ray's helpers to end by themselves
RAYS = ("gcs_server", "raylet")  # what runs of a private one
RAYLET_PID = "RAY_RAYLET_PID"  # in the environment of what a raylet starts


def lives(process: psutil.Process) -> bool:
    """Whether it runs, or is stopped; one that nobody has waited for is dead."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def listens(path: str) -> bool:
    """Whether somebody listens at a Unix socket. One that is too busy to take connections does."""
    with socket.socket(socket.AF_UNIX) as asking:
        asking.setblocking(False)
        try:
            asking.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except BlockingIOError:
            pass
    return True


def resumed(process: psutil.Process) -> bool:
    """Let a process go on if somebody stopped it; whether that was so."""
    with suppress(psutil.NoSuchProcess):
        if process.status() == psutil.STATUS_STOPPED:
            process.resume()
            return True
    return False


def of_ray(process: psutil.Process) -> bool:
    """Whether a process that was started meanwhile is of Ray, and not of another part of this process."""
    with suppress(psutil.NoSuchProcess):
        return process.name() in RAYS
    return False


def name_of(process: psutil.Process) -> str:
    """For people."""
    with suppress(psutil.Error):
        return f"{process.name()} (process {process.pid})"
    return f"process {process.pid}"


def children_of(process: psutil.Process) -> list[psutil.Process]:
    """All below it; none below one that is gone."""
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def started_by(raylets: Collection[psutil.Process], keep: Collection[int]) -> list[psutil.Process]:
    """What raylets have started, without nodes that are kept and what these have started: a raylet that is gone takes
    its nodes along within seconds. Without the stand-ins of agents too: a raylet ends with its agents."""
    kept = {*keep, *(child.pid for pid in keep if psutil.pid_exists(pid) for child in children_of(psutil.Process(pid)))}
    known = {str(raylet.pid): raylet for raylet in raylets}
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            raylet = known.get(process.environ().get(RAYLET_PID, ""))
            if raylet is None or process.create_time() < raylet.create_time() or process.name() == STAND_IN:
                continue
            if process.pid not in kept or not lives(raylet):
                found.append(process)
    return found


def kill_all(processes: Collection[psutil.Process]) -> None:
    """Now, and wait for it."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=AGENT_TIMEOUT_S)
