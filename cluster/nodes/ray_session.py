"""Ray as this process uses it: joined, watched, left behind when it is lost, and joined anew.

Ray has one connection a process. Its library crashes when that is closed while another thread waits in it for an
answer, and it waits for ever for a GCS (Ray's table of the cluster) that is gone. So every use of Ray goes through
here: ``get`` waits in slices, and ``within`` gives up a call that may wait for the GCS. A process that ends for good
does not shut Ray's library down at all (``quits``): a call that was given up may still be in it.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from typing import Any, TypeVar

import psutil
import ray

from cluster.nodes.addresses import check_listens
from cluster.nodes.private_ray import start_private_ray
from cluster.nodes.ray_processes import (
    AGENT_TIMEOUT_S,
    children_of,
    kill_all,
    listens,
    lives,
    name_of,
    of_ray,
    resumed,
    started_by,
)
from cluster.nodes.ray_token import keep_private, warn_where_open
from paceline.errors import NodeUnavailable

log = logging.getLogger(__name__)

T = TypeVar("T")
NAMESPACE = "paceline"  # one for all, so that a supervisor finds the placement groups of the one before it
SLICE_S = 0.5  # that one wait for an answer may hold the connection
QUIET_S = 5.0  # for the waits under way to end
CALL_S = 15.0  # for a call that may wait for the GCS
RENEW_S = 20.0  # that the end of this process waits for a new Ray under way
GCS_S = 1.0  # for the GCS to say that it lives
OWN_RAYLET = "the raylet of this host is gone, and with it this process's part in Ray: start this process again"
WRONG_CLUSTER = "WrongClusterID"  # in what another GCS answers


class RayLost(NodeUnavailable):
    """There is no Ray now; another is looked for."""


class RaySession:
    """The one connection of this process. Methods may be called from any thread."""

    def __init__(self) -> None:
        self.epoch = 0  # grows whenever another Ray is joined
        self._address, self._cpus, self._gcs_address = "", 1, ""
        self._raylet_socket, self._raylet_lost = "", False  # of this host's raylet in a cluster
        self._own: list[psutil.Process] = []  # Ray's own processes of a private one
        self._raylets: list[psutil.Process] = []  # of all private ones that this process had
        self._state = threading.Condition()
        self._waits, self._closed, self._stopped = 0, False, False
        self.quits = False  # ``stop`` is followed by ``os._exit``
        self._renewing = threading.Lock()
        self._thread: _Thread | None = None

    def start(self, address: str, cpus: int) -> None:
        """Start a private one ("local") or join the cluster at ``address``. Raises NodeUnavailable."""
        self._address, self._cpus, self._stopped = address, cpus, False
        self._join(again=False)
        with self._state:
            self._closed = False

    def _join(self, *, again: bool) -> None:
        with _living_raylet():
            self._connect(again)
        self._gcs_address = str(ray.get_runtime_context().gcs_address)

    def _connect(self, again: bool) -> None:
        if self.private:
            before = set(psutil.Process().children())
            try:
                start_private_ray(self._cpus, again=again)
            except Exception as error:  # Ray raises these as they are, and leaves what it has started
                kill_all([child for child in psutil.Process().children() if child not in before and of_ray(child)])
                raise NodeUnavailable(f"Ray did not start: {error}") from error
            self._own = [child for child in psutil.Process().children() if child not in before and of_ray(child)]
            self._raylets += [process for process in self._own if process.name() == "raylet"]
        else:
            _join(self._address)
            self._raylet_socket = str(ray._private.worker.global_worker.node.raylet_socket_name)
            self._raylet_lost = False

    def trouble(self) -> str:
        """What is wrong with Ray, as far as it shows; empty where nothing is. Takes 2 s at most."""
        if self.private:
            lost = [process for process in self._own if not lives(process)]
            return f"{name_of(lost[0])} of this deployment's own Ray is gone" if lost else ""
        try:
            check_listens(self._gcs_address)
            within(GCS_S, lambda: ray._private.worker.global_worker.gcs_client.check_alive([], timeout=GCS_S))
        except Exception as error:  # Ray's own are of many kinds
            return f"Ray's head at {self._gcs_address} does not answer: {error}"
        self._raylet_lost = self._raylet_lost or not listens(self._raylet_socket)  # another one there is not joined
        return OWN_RAYLET if self._raylet_lost else ""

    def wake(self) -> list[str]:
        """Let those of a private Ray's processes go on that somebody stopped; returns which. They live, so that whoever
        asks them would wait."""
        return [name_of(process) for process in {*self._own, *self._raylets} if resumed(process)]

    def is_another(self, trouble: str) -> bool:
        """Whether the trouble is that a cluster's head is another one than this process has joined."""
        return WRONG_CLUSTER in trouble

    @property
    def private(self) -> bool:
        """Whether Ray is this process's own."""
        return self._address == "local"

    @property
    def lost(self) -> bool:
        """Whether there is no Ray to ask."""
        return self._closed

    @property
    def stopped(self) -> bool:
        """Whether the end has begun."""
        return self._stopped

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a short wait in Ray's library. Raises RayLost."""
        with self._state:
            if self._closed:
                raise RayLost("Ray is lost; another is looked for")
            self._waits += 1
        try:
            yield
        finally:
            with self._state:
                self._waits -= 1
                self._state.notify_all()

    def close(self) -> None:
        """Let nobody ask Ray any more, until ``renew``. Idempotent. Raises NodeUnavailable when somebody still does."""
        with self._state:
            self._closed = True
            if not self._state.wait_for(lambda: not self._waits, QUIET_S):
                raise NodeUnavailable("Ray cannot be left: a call into it does not end")

    def run(self, call: Callable[[], None]) -> Future[None]:
        """Call on the one thread that lives as long as this process: the kernel ends the processes of a private Ray
        with the thread that started them."""
        if self._thread is None:
            self._thread = _Thread()
        return self._thread.run(call)

    def renew(self, keep: Collection[int]) -> None:
        """Leave a Ray that is closed, and start or join another. keep: process ids of the nodes that live; all others
        that a private one started are ended. Raises NodeUnavailable; call it again then."""
        with self._renewing:
            if self._stopped:
                raise NodeUnavailable("this process ends, it needs no other Ray")
            if self.private:
                self._leave_private(keep)
            ray.shutdown()
            self._join(again=True)
            self.epoch += 1
            with self._state:
                self._closed = False

    def _leave_private(self, keep: Collection[int]) -> None:
        """End all but raylets that have nodes which live, and these."""
        kill_all([process for process in self._own if process not in self._raylets])
        ray._private.worker._global_node = None  # or ``shutdown`` would end the raylet
        self._own = []
        kill_all(started_by(self._raylets, keep))
        idle = [raylet for raylet in self._raylets if not started_by([raylet], ())]
        kill_all(idle)
        self._raylets = [raylet for raylet in self._raylets if raylet not in idle]

    def stop(self) -> None:
        """Leave the cluster; a private one ends with all its processes. Idempotent.

        Ray's own shutdown leaves agents behind for a while, or for good: they are waited for, then killed. It also sets
        the default handler of SIGTERM."""
        self._stopped = True
        renewed = self._renewing.acquire(timeout=RENEW_S)
        ours = [*self._own, *(child for parent in self._own for child in children_of(parent))]
        if any(not lives(raylet) for raylet in self._raylets) or len(self._raylets) > 1:
            ours += [*self._raylets, *started_by(self._raylets, ())]
        raylets, self._own, self._raylets = self._raylets, [], []
        if self.quits:
            self._closed = True
            kill_all(ours)
            kill_all(started_by(raylets, ()))  # by one that was not dead yet
        else:
            with suppress(NodeUnavailable):
                self.close()
                if renewed:
                    ray.shutdown()
            _, alive = psutil.wait_procs(ours, timeout=AGENT_TIMEOUT_S)
            kill_all(alive)
        if renewed:
            self._renewing.release()


SESSION = RaySession()


def start_ray(address: str, num_cpus: int | None = None) -> None:
    """Start a private Ray on this machine ("local") or join the cluster at ``address``.

    num_cpus: only for a private one, what it may place; all cores unless given. Raises NodeUnavailable. A cluster
    with token authentication, Ray's default, wants ``RAY_AUTH_MODE=token`` and the token on this host. Signals are
    handled as before: Ray would end this process at once, and print its stack.
    """
    warn_where_open()
    keep_private()
    ray._private.worker.print_to_stdstream = _to_the_log
    with same_signals():
        SESSION.start(address, num_cpus or os.cpu_count() or 1)
    keep_private()  # Ray may have made it


def _to_the_log(told: dict[str, Any], ignore_prefix: bool) -> None:
    """What Ray has to say of workers that died. It would go to stdout, where one line is expected of this process, and
    where a thread of Ray's would wait for a reader."""
    log.debug("Ray says: %s", " ".join(told["lines"]))


def stop_ray() -> None:
    """Leave the cluster; a private one ends with all its processes. Idempotent."""
    SESSION.stop()


@contextmanager
def same_signals() -> Iterator[None]:
    """Around what connects to Ray, on the main thread: SIGINT and SIGTERM keep their handlers. Ray would end the
    process with one of its own, and has another one, below Python's, that prints the stack."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    theirs, ray._private.utils.set_sigterm_handler = ray._private.utils.set_sigterm_handler, _no_handler
    try:
        yield
    finally:
        ray._private.utils.set_sigterm_handler = theirs
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)
                signal.siginterrupt(number, False)


@contextmanager
def _living_raylet() -> Iterator[None]:
    """Around what joins Ray, which raises RuntimeError where the raylet is gone again. Ray's library asks it for ten
    seconds, and then ends this process."""
    theirs: Any = ray._raylet.CoreWorker

    def core_worker(mode: int, object_store: str, raylet: str, *more: Any) -> Any:
        if not listens(raylet):
            raise RuntimeError("its raylet ended before it was joined")
        return theirs(mode, object_store, raylet, *more)

    ray._raylet.CoreWorker = core_worker
    try:
        yield
    finally:
        ray._raylet.CoreWorker = theirs


def _no_handler(handler: object) -> None:
    """In place of Ray's."""


def get(reference: Any, timeout_s: float) -> Any:
    """``ray.get``. Raises RayLost, and what that raises."""
    end = time.monotonic() + timeout_s
    while True:
        with SESSION.waiting():
            try:
                return ray.get(reference, timeout=min(SLICE_S, max(0.0, end - time.monotonic())))
            except ray.exceptions.GetTimeoutError:
                if time.monotonic() >= end:
                    raise


def within(timeout_s: float, call: Callable[[], T]) -> T:
    """What ``call`` returns or raises; NodeUnavailable when it takes longer, or a private Ray is lost meanwhile, for it
    may wait for ever, or this process ends."""
    done: Future[T] = Future()

    def answer() -> None:
        try:
            done.set_result(call())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=answer, name="ray-call", daemon=True).start()
    end = time.monotonic() + timeout_s
    while not wait([done], min(SLICE_S, max(0.0, end - time.monotonic()))).done:
        if SESSION.stopped:
            raise RayLost("Ray did not answer: this process ends")
        if SESSION.private and (trouble := SESSION.trouble()):
            raise NodeUnavailable(f"Ray did not answer: {trouble}")
        if time.monotonic() >= end:
            raise NodeUnavailable(f"Ray did not answer within {timeout_s:g} s")
    return done.result()


class _Thread:
    """Runs what it is given, one after the other, for as long as this process lives."""

    def __init__(self) -> None:
        self._work: SimpleQueue[tuple[Callable[[], None], Future[None]]] = SimpleQueue()
        threading.Thread(target=self._run, name="ray", daemon=True).start()

    def _run(self) -> None:
        while True:
            call, done = self._work.get()
            if not done.set_running_or_notify_cancel():
                continue
            try:
                call()
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(None)

    def run(self, call: Callable[[], None]) -> Future[None]:
        """Call there."""
        done: Future[None] = Future()
        self._work.put((call, done))
        return done


def _join(address: str) -> None:
    try:
        check_listens(address)
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False)
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:  # ConnectionError is an OSError
        mode = os.environ.get("RAY_AUTH_MODE", "unset")
        raise NodeUnavailable(
            f"cannot join the Ray cluster at {address} (RAY_AUTH_MODE is {mode}; a cluster with token authentication "
            f"needs RAY_AUTH_MODE=token here too): {error}"
        ) from error
