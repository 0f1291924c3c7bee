"""One line for every refused caller and every act of an operator, in the log ``paceline.audit``. It never has a key."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import grpc.aio

log = logging.getLogger("paceline.audit")

LINES_PER_MINUTE = 30  # of one address; as many may come at once
MAX_ADDRESSES = 1024


def peer_of(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """The address of a caller, without its port: gRPC writes ``ipv4:1.2.3.4:5`` and ``ipv6:%5B::1%5D:5``."""
    kind, _, address = unquote(context.peer()).partition(":")
    return address.rpartition(":")[0].strip("[]") if kind in ("ipv4", "ipv6") else context.peer()


@dataclass
class _Address:
    lines: float
    at: float
    left_out: int = 0


class Audit:
    """Writes lines, so many a minute for each address; a later line counts those that were left out."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._addresses: OrderedDict[str, _Address] = OrderedDict()

    def refused(self, peer: str, key_id: str, act: str, why: str) -> None:
        """Somebody was refused. peer: an address without its port. key_id: empty where no known key was sent. act: the
        route or the RPC."""
        left_out = self._left_out(peer)
        if left_out is not None:
            self._write(logging.WARNING, peer, key_id, act, f"refused: {why}", left_out)

    def done(self, peer: str, key_id: str, act: str, outcome: str) -> None:
        """An operator's act is over. These lines are not bounded: only operators cause them."""
        self._write(logging.WARNING, peer, key_id, act, outcome, 0)

    def _write(self, level: int, peer: str, key_id: str, act: str, outcome: str, left_out: int) -> None:
        also = f" left_out={left_out}" if left_out else ""
        text = f"peer={peer or '-'} key={key_id or '-'} act={act!r} outcome={outcome!r}{also}"
        log.log(level, "%s", text.encode("ascii", "backslashreplace").decode())

    def _left_out(self, peer: str) -> int | None:
        """Lines of the address that were left out since the last one; None when this one is left out too."""
        now = self._clock()
        known = self._addresses.pop(peer, None) or _Address(LINES_PER_MINUTE, now)
        self._addresses[peer] = known
        if len(self._addresses) > MAX_ADDRESSES:
            self._addresses.popitem(last=False)
        known.lines = min(LINES_PER_MINUTE, known.lines + (now - known.at) * LINES_PER_MINUTE / 60)
        known.at = now
        if known.lines < 1:
            known.left_out += 1
            return None
        known.lines -= 1
        left_out, known.left_out = known.left_out, 0
        return left_out
