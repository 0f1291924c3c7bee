"""The transports that carry a hand-off, by the name that the option ``transport`` has for them.

A new transport is a module with a `Transport` (kv_transfer/transports/base.py) and a function that opens one, and a
record here. The list imports nothing, so that a command line or a router can read it without torch; a transport's
module is imported when a node opens a link.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TransportRecord:
    """One transport. ``open`` names a function (kv_transfer/transports/registry.py: OpenTransport) as
    "module:function"."""

    name: str
    open: str
    needs_cuda: bool = False  # it moves tensors of a CUDA device, not of the host
    message_mib: int = 4  # of a message, at most; a multiple of 4


_RECORDS = (
    TransportRecord("gloo", "kv_transfer.transports.gloo:open_gloo"),
    TransportRecord("nccl", "kv_transfer.transports.nccl:open_nccl", needs_cuda=True, message_mib=32),
)
TRANSPORTS: dict[str, TransportRecord] = {record.name: record for record in _RECORDS}


def needs_cuda(transport: str) -> bool:
    """Whether the rows that ``transport`` moves never lie in host memory."""
    return transport in TRANSPORTS and TRANSPORTS[transport].needs_cuda
