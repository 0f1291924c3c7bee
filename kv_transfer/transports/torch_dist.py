"""Links over torch.distributed: one 2-rank process group per (prefill, decode) pair, made and dropped in milliseconds.

Groups are built directly over a store of the link and never registered: there is no world to join, and a dead peer
harms nobody else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from kv_transfer.transports.base import Pending, Rank, Transport, TransportError


class TorchDistTransport(Transport):
    """One end of a link's pipe. A kind of group is a subclass, which starts messages."""

    def __init__(self, group: Any, prefix: str, rank: Rank) -> None:
        self._group: Any | None = group  # typed loosely: a build without NCCL has no such class
        self._prefix = prefix
        self._rank = rank
        self._dead: str | None = None

    def _send_message(self, data: Tensor) -> None:
        self._start("send", data)()

    def _recv_message(self, data: Tensor) -> None:
        self._start("recv", data)()

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

    def _guard(self, verb: str, num_bytes: int, work: Callable[[Any], None]) -> None:
        """Do ``work`` with the group; the pipe is dead when that fails."""
        group = self._group
        if group is None:
            raise TransportError(f"link {self._prefix}: {self._dead}")
        try:
            work(group)
        except RuntimeError as error:
            raise self._died(verb, num_bytes, error) from error

    def _see_off(self, verb: str, num_bytes: int, wait: Callable[[], None]) -> None:
        """``wait`` for what was started, on a dead pipe too: it may still use its memory."""
        try:
            wait()
        except RuntimeError as error:
            raise self._died(verb, num_bytes, error) from error
        if self._dead is not None:
            raise TransportError(f"link {self._prefix}: {self._dead}")

    def _died(self, verb: str, num_bytes: int, error: RuntimeError) -> TransportError:
        """The pipe is dead, of ``error`` unless it was before: what to tell."""
        reason = self._dead = self._dead or f"{verb} of {num_bytes} bytes failed: {error}"
        self.abort()
        return TransportError(f"link {self._prefix}: {reason}")

    def _start(self, verb: str, tensor: Tensor) -> Pending:
        """Post the messages of ``tensor``, to ``send`` or to ``recv`` them. As `Transport.start_send`."""
        raise NotImplementedError

    def _end_group(self, group: Any) -> None:
        """Orderly end of the group."""
        raise NotImplementedError

    def _abort_group(self, group: Any) -> None:
        """End the group whatever it is doing."""
        raise NotImplementedError
