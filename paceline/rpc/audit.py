"""One line for every refused caller and every act of an operator, in the log ``paceline.audit``. It never has a key.

Lines of refusals are bounded, for each caller and for all strangers together. Those that are left out are counted, and
told once a minute.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

import grpc.aio

log = logging.getLogger("paceline.audit")

LINES_PER_MINUTE = 30  # of one address, or of one key; as many may come at once
ALL_LINES_PER_MINUTE = 300  # of all addresses together
MAX_CALLERS = 1024  # that are remembered: of addresses, and of keys
TELL_S = 60.0
NETWORK_BITS = 64  # of an IPv6 address: the rest is its host's to choose


def peer_of(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """The address of a caller, without its port: gRPC writes ``ipv4:1.2.3.4:5`` and ``ipv6:%5B::1%5D:5``."""
    kind, _, address = unquote(context.peer()).partition(":")
    return address.rpartition(":")[0].strip("[]") if kind in ("ipv4", "ipv6") else context.peer()


@lru_cache(4096)
def network_of(address: str) -> str:
    """What limits of one address hold for: an IPv4 address, or the network of an IPv6 one."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address
    if found.version == 4 or found.ipv4_mapped is not None:
        return str(found if found.version == 4 else found.ipv4_mapped)
    return str(ipaddress.ip_network((int(found), NETWORK_BITS), strict=False))


class _Lines:
    """So many a minute, of which all may come at once."""

    def __init__(self, per_minute: float, now: float) -> None:
        self._per_minute, self._left, self._at = per_minute, per_minute, now

    def take(self, now: float) -> bool:
        """One more, if there is one."""
        self._left = min(self._per_minute, self._left + (now - self._at) * self._per_minute / 60)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


class _Callers:
    """Those that came last, each with lines of its own."""

    def __init__(self) -> None:
        self._lines: OrderedDict[str, _Lines] = OrderedDict()

    def take(self, name: str, now: float) -> bool:
        """One more of a caller, if there is one."""
        lines = self._lines.setdefault(name, _Lines(LINES_PER_MINUTE, now))
        self._lines.move_to_end(name)
        if len(self._lines) > MAX_CALLERS:
            self._lines.popitem(last=False)
        return lines.take(now)


def _later(seconds: float, act: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_later(seconds, act)


class Audit:
    """Writes lines. Belongs to the event loop."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        later: Callable[[float, Callable[[], None]], None] = _later,
    ) -> None:
        """clock: seconds, monotonic. later: calls after so many seconds."""
        self._clock, self._later = clock, later
        self._addresses, self._keys = _Callers(), _Callers()
        self._all = _Lines(ALL_LINES_PER_MINUTE, clock())
        self._left_out: Counter[str] = Counter()  # since it was last told, by address or key

    def refused(self, peer: str, key_id: str, act: str, why: str) -> None:
        """Somebody was refused. peer: an address without its port. key_id: empty where no known key was sent. act: the
        route or the RPC. Who has a key takes no lines of strangers, and strangers none of theirs."""
        now, network = self._clock(), network_of(peer)
        is_told = self._keys.take(key_id, now) if key_id else self._addresses.take(network, now) and self._all.take(now)
        if is_told:
            self._write(logging.WARNING, peer, key_id, act, f"refused: {why}")
            return
        if not self._left_out:
            self._later(TELL_S, self.tell)
        name = f"key {key_id}" if key_id else network
        self._left_out[name if name in self._left_out or len(self._left_out) < MAX_CALLERS else "others"] += 1

    def done(self, peer: str, key_id: str, act: str, outcome: str) -> None:
        """An act is over. These lines are not bounded: they are of operators, and of keys where that is asked for."""
        self._write(logging.WARNING, peer, key_id, act, outcome)

    def tell(self) -> None:
        """Say how many lines were left out since it was last said, if any were."""
        if not self._left_out:
            return
        left_out, self._left_out = self._left_out, Counter()
        ((name, most),) = left_out.most_common(1)
        told = f"{left_out.total()} lines are left out, {most} of them of {name or 'unknown addresses'}"
        self._write(logging.WARNING, "", "", "audit", told)

    def _write(self, level: int, peer: str, key_id: str, act: str, outcome: str) -> None:
        text = f"peer={peer or '-'} key={key_id or '-'} act={act!r} outcome={outcome!r}"
        log.log(level, "%s", text.encode("ascii", "backslashreplace").decode())
