"""Links over NCCL, from the memory of one GPU into that of another."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kv_transfer.transports.base import Pending, Rank, StillInFlight, TransportError, byte_view, message_slices
from kv_transfer.transports.gloo import TAG
from kv_transfer.transports.rendezvous import torch_dist
from kv_transfer.transports.torch_dist import TorchDistTransport
from paceline.errors import ConfigError

NCCL_MAX_CTAS = 4  # thread blocks that a link may take from the GPU
JOIN_TIMEOUT_S = 60.0  # for the communicator: it starts with the first message, and is slow on a cold machine
_POLL_S = 1e-4
_kept: list[Tensor] = []  # memory that a kernel may use for good, since no abort ended it


class NcclTransport(TorchDistTransport):
    """CUDA tensors, on a stream of its own. Communicators are aborted, never destroyed: destroying is collective and
    would wait for a dead peer."""

    def __init__(self, group: Any, prefix: str, rank: Rank, device: torch.device, timeout_s: float) -> None:
        super().__init__(group, prefix, rank)
        self._device = device
        self._timeout_s = timeout_s
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def join(self) -> None:
        """Build the communicator, by the first message. TransportError when the peer does not come."""
        hello = torch.zeros(1, dtype=torch.uint8, device=self._device)
        verb = "send" if self._rank == 0 else "recv"
        self._start(verb, hello, JOIN_TIMEOUT_S)()

    def start_send(self, tensor: Tensor) -> Pending:
        """See Transport. The bytes leave behind what the caller's current stream holds; several messages are in flight,
        one behind the other, and the device goes on from one to the next without the host."""
        return self._start("send", tensor)

    def start_recv(self, tensor: Tensor) -> Pending:
        """See Transport. Nothing is written before what the caller's current stream holds is done: it may still read
        what was in ``tensor``."""
        return self._start("recv", tensor)

    def _start(self, verb: str, tensor: Tensor, timeout_s: float | None = None) -> Pending:
        data = byte_view(tensor)
        posted: list[torch.cuda.Event] = []

        def post(group: Any) -> None:
            for piece in message_slices(data.numel(), self.multiple):
                posted.append(self._post(group, verb, data[piece]))

        def wait() -> None:
            for event in posted:
                self._await(event, timeout_s or self._timeout_s)

        def see_off() -> None:
            try:
                self._see_off(verb, data.numel(), wait)
            except TransportError as error:
                self._settle(data, posted, error)
                raise

        try:
            self._guard(verb, data.numel(), post)
        except TransportError:
            if not posted:
                raise  # else the wait tells it, behind what was posted
        return see_off

    def _settle(self, data: Tensor, posted: list[torch.cuda.Event], error: TransportError) -> None:
        """Behind an abort, which ends kernels: wait until those of ``data`` have ended. StillInFlight when they go on
        all the same; ``data`` is then kept for good."""
        deadline = time.monotonic() + self._timeout_s
        while not all(_has_happened(event) for event in posted):
            if time.monotonic() > deadline:
                _kept.append(data)
                raise StillInFlight(f"{error}; the device does not end it") from error
            time.sleep(_POLL_S)

    def _post(self, group: Any, verb: str, data: Tensor) -> torch.cuda.Event:
        """Queue one message behind the caller's stream and the messages before it; the event is its end."""
        if not data.is_cuda:
            raise ValueError("the nccl transport moves CUDA tensors only")
        caller = torch.cuda.current_stream(self._device)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._stream.wait_stream(caller)
            getattr(group, verb)([data], 1 - self._rank, TAG).wait()  # orders streams; does not block this thread
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._stream)
        return done

    def _await(self, done: torch.cuda.Event, timeout_s: float) -> None:
        """The wait is a poll: a kernel that waits for a dead peer ends only by an abort."""
        deadline = time.monotonic() + timeout_s
        while not done.query():  # type: ignore[no-untyped-call]
            if time.monotonic() > deadline:
                raise RuntimeError(f"message timeout of {timeout_s:g} s")
            time.sleep(_POLL_S)
        if self._dead is not None:  # an aborted kernel completes too, with undefined data
            raise RuntimeError(self._dead)

    def _end_group(self, group: Any) -> None:
        group.abort()

    def _abort_group(self, group: Any) -> None:
        group.abort()


def _has_happened(event: torch.cuda.Event) -> bool:
    try:
        return event.query()  # type: ignore[no-untyped-call,no-any-return]
    except RuntimeError:
        return True  # the device is lost to this process: nothing runs there


def open_nccl(store: Any, link_id: str, rank: Rank, host: str, timeout_s: float, device: torch.device) -> NcclTransport:
    """See `registry.OpenTransport`. NCCL finds the peer by the store alone, whatever ``host`` is."""
    if not dist.is_nccl_available():
        raise ConfigError("transport", "nccl is not in this build of torch; use gloo")
    if device.type != "cuda" or not torch.cuda.is_available():
        raise ConfigError("transport", f"nccl needs a CUDA device, not {device}; use gloo")
    prefix = f"{link_id}/data"
    # Errors are ours to handle: torch's default tears the process down, and its clean-up would end a kernel early and
    # let it pass for a completed receive.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    os.environ.setdefault("TORCH_NCCL_RETHROW_CUDA_ERRORS", "0")
    os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")  # its watchdog would abort the process as well
    options = torch_dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    options.config.max_ctas = NCCL_MAX_CTAS
    # A peer that dies while the communicator is built would block this thread for good otherwise.
    options.config.blocking = 0
    os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", f"{JOIN_TIMEOUT_S:g}")
    try:
        group = torch_dist.ProcessGroupNCCL(torch_dist.PrefixStore(prefix, store), rank, 2, options)
        transport = NcclTransport(group, prefix, rank, device, timeout_s)
    except RuntimeError as error:
        raise TransportError(f"link {prefix}: the peer did not join: {error}") from error
    transport.join()
    return transport
