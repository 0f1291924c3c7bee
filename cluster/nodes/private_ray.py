"""A Ray of this deployment's own, on this machine: the processes that place actors and watch them, and no others.

``ray.init`` also starts an autoscaler, a log monitor, an API server, and two agents for its dashboard and for runtime
environments. Each is a Python process that imports Ray: seconds of every start and 350 MB, for a dashboard that is
switched off, hosts that never come and environments that no actor asks for. It has no option for any of them, so this
module knows the class and the functions of Ray that start them, in the one version that Paceline installs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import ray
import ray._private.node
import ray._private.services as services
import ray._private.utils as utils

_raylet: Any = import_module("ray._raylet")  # compiled, without types
_console_popen: Any = services.ConsolePopen

OBJECT_STORE_BYTES = 80 * 1024 * 1024  # Ray's minimum: no tensor ever goes through it
AGENTS = ("dashboard_agent", "runtime_env_agent")
STAND_IN = "cat"  # the raylet ends with its agents, and they with the pipe to their stdin that it holds
AGENT_PORTS = (
    _raylet.METRICS_AGENT_PORT_NAME,
    _raylet.METRICS_EXPORT_PORT_NAME,
    _raylet.DASHBOARD_AGENT_LISTEN_PORT_NAME,
    _raylet.RUNTIME_ENV_AGENT_PORT_NAME,
)
# Ctrl-C is not theirs, and they end with the thread that has started them (PR_SET_PDEATHSIG, SIGKILL).
FATE_SHARED = (
    "import ctypes, os, signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT}); "
    "ctypes.CDLL(None).prctl(1, 9); os.execvp(sys.argv[1], sys.argv[1:])"
)
# Nobody asks what tasks did, there being no dashboard. A Ray that is lost would be told of them for 5 s.
NO_TASK_EVENTS = {"task_events_report_interval_ms": 0}
# Ray's library waits for the first workers while it holds Python's lock: a router in this process would answer nobody.
NO_WORKERS_FIRST = {"prestart_worker_first_driver": False}
NO_PORT = -1  # what agents of a Ray without dashboard announce


class SmallNode(ray._private.node.Node):  # type: ignore[misc]  # Ray has no types here
    """Ray's processes of one host, those that nobody asks left out."""

    def start_monitor(self) -> None:
        """No autoscaler."""

    def start_log_monitor(self) -> None:
        """No log monitor: the router reads the nodes' logs itself."""

    def start_api_server(self, *, include_dashboard: bool | None, raise_on_failure: bool) -> None:
        """No dashboard."""

    def start_raylet(self, *args: Any, **options: Any) -> None:
        """Start the raylet with stand-ins for its agents, whose ports the raylet would otherwise wait for. Ray does
        not try here what the agents would import."""
        for name in AGENT_PORTS:
            _raylet.persist_port(self._session_dir, self._node_id, name, NO_PORT)
        theirs, look = services.start_ray_process, utils.get_dashboard_dependency_error

        def start(command: list[str], *more: Any, **further: Any) -> Any:
            return theirs([_without_agent(word) for word in command], *more, **further)

        services.start_ray_process, utils.get_dashboard_dependency_error = start, lambda: None
        try:
            super().start_raylet(*args, **options)
        finally:
            services.start_ray_process, utils.get_dashboard_dependency_error = theirs, look


def _without_agent(word: str) -> str:
    """An argument of the raylet; an agent's command is replaced by its stand-in."""
    for agent in AGENTS:
        if word.startswith(f"--{agent}_command="):
            return f"--{agent}_command={STAND_IN}"
    return word


def _started_by_itself(command: list[str], *, preexec_fn: Callable[[], None], **options: Any) -> Any:
    """Ray's ConsolePopen without code of this process between fork and exec, where a gRPC that is at work crashes: the
    process does to itself what that code does."""
    return _console_popen([sys.executable, "-S", "-E", "-c", FATE_SHARED, *command], **options)


def start_private_ray(num_cpus: int, *, again: bool = False) -> None:
    """num_cpus: what actors may be placed on; as many workers are started at once, ready for the first of them. again:
    while this process serves; workers are started when they are needed."""
    theirs, ray._private.node.Node = ray._private.node.Node, SmallNode
    services.ConsolePopen = _started_by_itself if again else _console_popen
    try:
        ray.init(
            address="local",
            num_cpus=num_cpus,
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            log_to_driver=False,
            configure_logging=False,
            _system_config=NO_TASK_EVENTS | (NO_WORKERS_FIRST if again else {}),
        )
    finally:
        ray._private.node.Node, services.ConsolePopen = theirs, _console_popen
