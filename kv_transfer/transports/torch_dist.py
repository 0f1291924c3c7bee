"""Links over torch.distributed: one 2-rank process group per (prefill, decode) pair, made and dropped in milliseconds.

Rank 0 is prefill and sends, rank 1 is decode and receives. Groups are built directly over a store and never registered:
there is no world to join, and a dead peer harms nobody else. Both ends call `open_transport`, then make a `Sentinel`
(kv_transfer/transports/sentinel.py), in this order, under a link id that was never used before.

Gloo does not tell a receive in the middle of a message that its peer died; it blocks until the message timeout. Hence
the sentinel, and hence messages that are small enough for a short timeout.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from kv_transfer.transports.base import MESSAGE_BYTES, Pending, Transport, TransportError, byte_view, message_slices
from kv_transfer.transports.gloo import TAG, Rank, forget_keys, gloo_group, poison
from kv_transfer.transports.rendezvous import Store, create_store, torch_dist
from kv_transfer.transports.sentinel import Sentinel
from paceline.errors import ConfigError

__all__ = ["Sentinel", "TorchDistTransport", "create_store", "open_transport"]

NCCL_MAX_CTAS = 4  # thread blocks that a link may take from the GPU
_POLL_S = 1e-4


class TorchDistTransport(Transport):
    """One link's pipe; made by `open_transport`."""

    def __init__(self, group: Any, store: Store, prefix: str, rank: Rank) -> None:
        self._group: Any | None = group  # typed loosely: a build without NCCL has no such class
        self._store = store
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
            forget_keys(self._store, self._prefix, self._rank)
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


class GlooTransport(TorchDistTransport):
    """CPU tensors; the group's timeout is the message timeout, from the start of each wait."""

    def start_send(self, tensor: Tensor) -> Pending:
        """See Transport. Posted at once: gloo asks the receiver whether it is there before a byte leaves."""
        return self._start("send", tensor)

    def start_recv(self, tensor: Tensor) -> Pending:
        """See Transport."""
        return self._start("recv", tensor)

    def _start(self, verb: str, tensor: Tensor) -> Pending:
        data = byte_view(tensor)
        num_bytes = data.numel()
        pieces = [data] if 0 < num_bytes <= MESSAGE_BYTES else [data[p] for p in message_slices(num_bytes)]
        works: list[Any] = []

        def post(group: Any) -> None:
            works.extend(getattr(group, verb)([piece], 1 - self._rank, TAG) for piece in pieces)

        def wait(_: Any) -> None:
            for work in works:
                work.wait()

        self._guard(verb, num_bytes, post)
        return lambda: self._guard(verb, num_bytes, wait)

    def _exchange(self, group: Any, verb: str, data: Tensor) -> None:
        getattr(group, verb)([data], 1 - self._rank, TAG).wait()

    def _end_group(self, group: Any) -> None:
        """Threads and sockets go with the last reference."""

    def _abort_group(self, group: Any) -> None:
        poison(group)


class NcclTransport(TorchDistTransport):
    """CUDA tensors, on a stream of its own. Communicators are aborted, never destroyed: destroying is collective and
    would wait for a dead peer."""

    def __init__(
        self, group: Any, store: Store, prefix: str, rank: Rank, device: torch.device, timeout_s: float
    ) -> None:
        super().__init__(group, store, prefix, rank)
        self._device = device
        self._timeout_s = timeout_s
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def _exchange(self, group: Any, verb: str, data: Tensor) -> None:
        """In order with the caller's current stream. The wait is a poll: a kernel that waits for a dead peer ends only
        by an abort."""
        if not data.is_cuda:
            raise ValueError("the nccl transport moves CUDA tensors only")
        deadline = time.monotonic() + self._timeout_s
        caller = torch.cuda.current_stream(self._device)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._stream.wait_stream(caller)
            getattr(group, verb)([data], 1 - self._rank, TAG).wait()  # orders streams; does not block this thread
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._stream)
        while not done.query():  # type: ignore[no-untyped-call]
            if time.monotonic() > deadline:
                raise RuntimeError(f"message timeout of {self._timeout_s:g} s")
            time.sleep(_POLL_S)
        if self._dead is not None:  # an aborted kernel completes too, with undefined data
            raise RuntimeError(self._dead)

    def _end_group(self, group: Any) -> None:
        group.abort()

    def _abort_group(self, group: Any) -> None:
        group.abort()


def open_transport(
    backend: Literal["gloo", "nccl"],
    store: Store,
    link_id: str,
    rank: Rank,
    host: str,
    timeout_s: float,
    device: torch.device | str = "cpu",
) -> TorchDistTransport:
    """Open the data pipe of a link; blocks until the peer does the same. ``timeout_s``: to join, and of one message.

    gloo moves CPU tensors; nccl moves tensors of ``device`` (the caller stages CPU tensors there). ConfigError naming
    ``transport`` when the backend cannot work here, TransportError when the peer does not come.
    """
    prefix = f"{link_id}/data"
    if backend == "gloo":
        return GlooTransport(gloo_group(store, prefix, rank, host, timeout_s), store, prefix, rank)
    if backend != "nccl":
        raise ConfigError("transport", f"{backend!r} is unknown; gloo and nccl are")
    if not dist.is_nccl_available():
        raise ConfigError("transport", "nccl is not in this build of torch; use gloo")
    target = torch.device(device)
    if target.type != "cuda" or not torch.cuda.is_available():
        raise ConfigError("transport", f"nccl needs a CUDA device, not {target}; use gloo")
    return _open_nccl(store, prefix, rank, timeout_s, target)


def _open_nccl(store: Store, prefix: str, rank: Rank, timeout_s: float, device: torch.device) -> TorchDistTransport:
    # Errors are ours to handle: torch's default tears the process down, and its clean-up would end a kernel early and
    # let it pass for a completed receive.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    os.environ.setdefault("TORCH_NCCL_RETHROW_CUDA_ERRORS", "0")
    options = torch_dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    options.config.max_ctas = NCCL_MAX_CTAS
    try:
        group = torch_dist.ProcessGroupNCCL(torch_dist.PrefixStore(prefix, store), rank, 2, options)
        transport = NcclTransport(group, store, prefix, rank, device, timeout_s)
    except RuntimeError as error:
        raise TransportError(f"link {prefix}: the peer did not join: {error}") from error
    hello = torch.zeros(1, dtype=torch.uint8, device=device)  # the communicator is built by the first message
    transport._send_message(hello) if rank == 0 else transport._recv_message(hello)
    return transport
