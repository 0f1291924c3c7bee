"""Links over torch.distributed: one 2-rank process group per (prefill, decode) pair, made and dropped in milliseconds.

Groups are built directly over a store of the link and never registered: there is no world to join, and a dead peer
harms nobody else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from kv_transfer.transports.base import Rank, Transport, TransportError


class TorchDistTransport(Transport):
    """One end of a link's pipe. A kind of group is a subclass."""

    def __init__(self, group: Any, prefix: str, rank: Rank) -> None:
        self._group: Any | None = group  # typed loosely: a build without NCCL has no such class
        self._prefix = prefix
        self._rank = rank
        self._dead: str | None = None

    def _send_message(self, data: Tensor) -> None:
        self._message("send", data)

    def _recv_message(self, data: Tensor) -> None:
        self._message("recv", data)

    def close(self) -> None:
        self._dead = self._dead or "closed"
        group, self._group = self._group, None
        if group is not None:
            self._end_group(group)

    def abort(self) -> None:
        self._dead = self._dead or "aborted"
        group, self._group = self._group, None
        if group is not None:
            self._abort_group(group)

    def _message(self, verb: str, data: Tensor) -> None:
        self._guard(verb, data.numel(), lambda group: self._exchange(group, verb, data))

    def _guard(self, verb: str, num_bytes: int, work: Callable[[Any], None]) -> None:
        """Do ``work`` with the group; the pipe is dead when that fails."""
        group = self._group
        if group is None:
            raise TransportError(f"link {self._prefix}: {self._dead}")
        try:
            work(group)
        except RuntimeError as error:
            reason = self._dead or f"{verb} of {num_bytes} bytes failed: {error}"
            self._dead = reason
            self.abort()
            raise TransportError(f"link {self._prefix}: {reason}") from error

    def _exchange(self, group: Any, verb: str, data: Tensor) -> None:
        """Send or receive one message, bounded by the message timeout. RuntimeError when it failed."""
        raise NotImplementedError

    def _end_group(self, group: Any) -> None:
        """Orderly end of the group."""
        raise NotImplementedError

    def _abort_group(self, group: Any) -> None:
        """End the group whatever it is doing."""
        raise NotImplementedError
