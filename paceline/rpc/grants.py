"""The router's word that one prefill node may deliver one ticket, which decode nodes check.

A grant is a deadline and a code over it, the ticket, both nodes and the cache salt. Routers and decode nodes have the
key, prefill nodes do not: a prefill node can deliver what a router gave to it, and nothing else.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
import time

MARGIN_S = 3600.0  # for clocks of hosts that differ; the decode node's own deadlines end a ticket much sooner
_DEADLINE = struct.Struct(">Q")  # Unix seconds


class Grants:
    """Makes and checks grants with one key, which no text of it shows."""

    def __init__(self, key: str) -> None:
        self._key = key.encode()

    def sign(self, ticket: str, prefill_id: str, decode_id: str, cache_salt: str, lasts_s: float) -> bytes:
        """A grant for ``lasts_s`` seconds and a margin."""
        deadline = _DEADLINE.pack(int(time.time() + lasts_s + MARGIN_S))
        return deadline + self._code(deadline, ticket, prefill_id, decode_id, cache_salt)

    def problem(self, grant: bytes, ticket: str, prefill_id: str, decode_id: str, cache_salt: str) -> str | None:
        """Why ``grant`` does not allow ``prefill_id`` to deliver ``ticket``, or None."""
        deadline, code = grant[: _DEADLINE.size], grant[_DEADLINE.size :]
        expected = self._code(deadline, ticket, prefill_id, decode_id, cache_salt)
        if len(deadline) < _DEADLINE.size or not hmac.compare_digest(code, expected):
            return f"no router gave ticket {ticket} to {prefill_id}"
        if _DEADLINE.unpack(deadline)[0] < time.time():
            return f"the router's grant of ticket {ticket} is over"
        return None

    def _code(self, deadline: bytes, *parts: str) -> bytes:
        code = hmac.new(self._key, deadline, hashlib.sha256)
        for part in parts:
            data = part.encode()
            code.update(struct.pack(">I", len(data)))  # so that no two lists of parts read alike
            code.update(data)
        return code.digest()
