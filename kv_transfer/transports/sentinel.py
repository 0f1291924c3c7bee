"""Tells within milliseconds that the process at the other end of a link died.

A second 2-rank gloo group on which each side always waits for one byte. A dead peer breaks the wait, in the middle of
data messages too. The byte itself means an orderly end: each side sends it once, on `close` or in answer to the peer's.
A stopped process or a cut cable breaks no wait: those are for message timeouts and leases.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch

from kv_transfer.transports.base import Rank
from kv_transfer.transports.gloo import TAG, gloo_group, poison

log = logging.getLogger(__name__)

_FOREVER = timedelta(days=365)  # a wait that runs out would close the group


class Sentinel:
    """One side of a link's sentinel; construction blocks until the peer makes its own.

    ``on_lost(reason)``: the peer died; once, and never after `close` or an orderly end by the peer.
    ``on_closed()``: the peer ended the link in order; never after `close`.
    Both run on the sentinel's thread. TransportError when the peer does not come within ``timeout_s``.
    """

    def __init__(
        self,
        store: Any,
        link_id: str,
        rank: Rank,
        host: str,
        timeout_s: float,
        on_lost: Callable[[str], None],
        on_closed: Callable[[], None] = lambda: None,
    ) -> None:
        self._prefix = f"{link_id}/sentinel"
        self._rank = rank
        self._on_lost = on_lost
        self._on_closed = on_closed
        self._lock = threading.Lock()
        self._said_goodbye = False
        self._closing = False
        self._group: Any | None = gloo_group(store, self._prefix, rank, host, timeout_s)
        self._thread = threading.Thread(target=self._run, args=(self._group,), name="link-sentinel", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float = 2.0) -> None:
        """Orderly end; waits at most about twice ``timeout_s`` for the peer, then cuts the connection."""
        self._closing = True
        group, self._group = self._group, None
        if group is None:
            return
        self._say_goodbye(group, timeout_s)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)
            if self._thread.is_alive():  # the peer is stopped or cut off
                poison(group)
                self._thread.join(timeout_s)

    def _run(self, group: Any) -> None:
        try:
            group.recv([torch.zeros(1, dtype=torch.uint8)], 1 - self._rank, TAG).wait(_FOREVER)
        except RuntimeError as error:
            reason = f"the peer of {self._prefix} is gone: {error}"
            self._tell(lambda: self._on_lost(reason))
        else:
            self._say_goodbye(group, 1.0)
            self._tell(self._on_closed)

    def _say_goodbye(self, group: Any, timeout_s: float) -> None:
        with self._lock:
            said, self._said_goodbye = self._said_goodbye, True
        if not said:
            with suppress(RuntimeError):
                group.send([torch.ones(1, dtype=torch.uint8)], 1 - self._rank, TAG).wait(timedelta(seconds=timeout_s))

    def _tell(self, callback: Callable[[], None]) -> None:
        if self._closing:
            return
        try:
            callback()
        except Exception:
            log.exception("sentinel callback failed")
