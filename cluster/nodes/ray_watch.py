"""Watches the Ray of a process that supervises, or may do so later, and leaves one that is lost for another."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable

from cluster.nodes.launch import RayNodes
from cluster.nodes.ray_session import SESSION, same_signals
from cluster.nodes.supervise import Supervisor
from paceline.errors import NodeUnavailable

log = logging.getLogger(__name__)

POLL_S = 0.5  # of a private Ray, whose processes are looked at
ASK_S = 2.0  # of a cluster's head, which is asked
SEEN = 2  # times in a row that a head does not answer before it counts: it may be busy
AGAIN_S = 5.0  # after another Ray could not be had


class RayWatch:
    """Nodes serve on while Ray is lost, and none is started, ended or replaced. A private Ray is started anew at once.
    A cluster is joined anew when its head is another one than before; the same one that is back needs nothing."""

    def __init__(
        self,
        supervisor: Supervisor,
        nodes: RayNodes,
        refresh: Callable[[], Awaitable[None]],
        on_renewed: Callable[[], None],
        tell: Callable[[str], None] = lambda trouble: None,
    ) -> None:
        """refresh: reads the registry, which says what process each node is, as far as it answers. on_renewed: called
        in a thread once the nodes have their places in another Ray. tell: called with what is wrong now, or nothing.
        """
        self._supervisor, self._nodes, self._refresh = supervisor, nodes, refresh
        self._on_renewed, self._tell = on_renewed, tell
        self._seen, self._unplaced = 0, False

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(POLL_S if SESSION.private else ASK_S)
            try:
                await self._look()
                self._tell(self._supervisor.trouble)
            except Exception:  # a fault in here must not leave Ray unwatched
                log.exception("watching Ray failed")

    async def _look(self) -> None:
        for stopped in await asyncio.to_thread(SESSION.wake):
            log.error("%s of this deployment's own Ray was stopped; it was let go on", stopped)
        supervisor, trouble = self._supervisor, await asyncio.to_thread(SESSION.trouble)
        if not trouble and (SESSION.lost or self._unplaced):
            trouble = supervisor.trouble or "another Ray has no places for the nodes yet"
        self._seen = self._seen + 1 if trouble else 0
        if not trouble:
            if supervisor.trouble:
                log.warning("Ray answers again; nodes are looked after again")
            supervisor.trouble = ""
            return
        anew = SESSION.private or SESSION.lost or self._unplaced or SESSION.is_another(trouble)
        if not anew and self._seen < SEEN:
            return
        if not supervisor.trouble:
            log.error("%s; nodes that live serve on, none is started or replaced meanwhile", trouble)
        supervisor.trouble = trouble
        self._tell(trouble)
        if anew:
            await self._renew()

    async def _renew(self) -> None:
        began = time.monotonic()
        self._unplaced = True
        await self._refresh()
        try:
            with same_signals():
                await asyncio.wrap_future(SESSION.run(self._nodes.renew))
        except NodeUnavailable as error:
            log.error("there is no other Ray yet, next try in %g s: %s", AGAIN_S, error)
            await asyncio.sleep(AGAIN_S)
            return
        await asyncio.to_thread(self._on_renewed)
        self._unplaced, self._supervisor.trouble = False, ""
        log.warning("another Ray is there after %.1f s; nodes are looked after again", time.monotonic() - began)


class RayThere:
    """For a process that may supervise later: whether it could."""

    def __init__(self) -> None:
        self._asked_at, self._trouble = -math.inf, ""

    async def asked(self) -> bool:
        """Whether Ray answers, as of ASK_S ago. Another one at its address is joined."""
        if time.monotonic() - self._asked_at < ASK_S:
            return not self._trouble
        trouble = await asyncio.to_thread(SESSION.trouble)
        if SESSION.lost or SESSION.is_another(trouble):
            try:
                with same_signals():
                    await asyncio.wrap_future(SESSION.run(_rejoin))
                trouble = ""
            except NodeUnavailable as error:
                trouble = str(error)
        if bool(trouble) != bool(self._trouble):
            log.warning("%s", f"{trouble}; this router cannot take over" if trouble else "Ray is there again")
        self._trouble, self._asked_at = trouble, time.monotonic()
        return not trouble


def _rejoin() -> None:
    SESSION.close()
    SESSION.renew(())
