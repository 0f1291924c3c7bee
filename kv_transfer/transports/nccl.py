"""Links over NCCL, from the memory of one GPU into that of another."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kv_transfer.transports.base import Pending, Rank, TransportError, byte_view, message_slices
from kv_transfer.transports.gloo import TAG
from kv_transfer.transports.rendezvous import torch_dist
from kv_transfer.transports.torch_dist import TorchDistTransport
from paceline.errors import ConfigError

NCCL_MAX_CTAS = 4  # thread blocks that a link may take from the GPU
JOIN_TIMEOUT_S = 60.0  # for the communicator: it starts with the first message, and is slow on a cold machine
_POLL_S = 1e-4


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
        self._guard(verb, hello.numel(), lambda group: self._exchange_within(JOIN_TIMEOUT_S, group, verb, hello))

    def start_send(self, tensor: Tensor) -> Pending:
        """See Transport. The bytes leave behind what the caller's current stream holds; several messages are in flight,
        one behind the other, and the device goes on from one to the next without the host."""
        return self._start("send", tensor)

    def start_recv(self, tensor: Tensor) -> Pending:
        """See Transport. Nothing is written before what the caller's current stream holds is done: it may still read
        what was in ``tensor``."""
        return self._start("recv", tensor)

    def _start(self, verb: str, tensor: Tensor) -> Pending:
        data = byte_view(tensor)
        done: list[torch.cuda.Event] = []

        def post(group: Any) -> None:
            done.extend(self._post(group, verb, data[piece]) for piece in message_slices(data.numel()))

        def wait(_: Any) -> None:
            for event in done:
                self._await(event, self._timeout_s)

        self._guard(verb, data.numel(), post)
        return lambda: self._guard(verb, data.numel(), wait)

    def _exchange(self, group: Any, verb: str, data: Tensor) -> None:
        """Send or receive in order with the caller's current stream."""
        self._exchange_within(self._timeout_s, group, verb, data)

    def _exchange_within(self, timeout_s: float, group: Any, verb: str, data: Tensor) -> None:
        self._await(self._post(group, verb, data), timeout_s)

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
