"""The transports that a link can be opened over, by the name that the option ``transport`` has for them.

A new transport is one file and one record: a subclass of `Transport` with a function like `OpenTransport`, and its
record here. The option's type lists its name too (paceline/config.py, which must not import this package).

Both ends call `open_transport`, then make a `Sentinel`, in this order, under a link id that was never used before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch

from kv_transfer.transports.base import Rank, Transport
from kv_transfer.transports.rendezvous import Store
from paceline.errors import ConfigError

# (store, link id, rank, own address, timeout in seconds, device): opens one end of the data pipe of a link; blocks
# until the peer does the same. The timeout is that of joining, and of one message. ConfigError naming ``transport``
# when it cannot work here, TransportError when the peer does not come.
OpenTransport: TypeAlias = Callable[[Store, str, Rank, str, float, torch.device], Transport]


@dataclass(frozen=True)
class TransportRecord:
    """``needs_cuda``: it moves tensors of a CUDA device, not of the host. ``load`` imports it when it is asked for."""

    name: str
    needs_cuda: bool
    load: Callable[[], OpenTransport]

    def staging_device(self, pool_device: torch.device) -> torch.device:
        """Where rows of a pool are staged for it."""
        return pool_device if self.needs_cuda else torch.device("cpu")


def _gloo() -> OpenTransport:
    from kv_transfer.transports.gloo import open_gloo

    return open_gloo


def _nccl() -> OpenTransport:
    from kv_transfer.transports.nccl import open_nccl

    return open_nccl


RECORDS = (
    TransportRecord("gloo", needs_cuda=False, load=_gloo),
    TransportRecord("nccl", needs_cuda=True, load=_nccl),
)
TRANSPORTS = {record.name: record for record in RECORDS}


def transport_record(name: str) -> TransportRecord:
    """ConfigError naming ``transport`` when there is none of this name."""
    if (record := TRANSPORTS.get(name)) is None:
        raise ConfigError("transport", f"{name!r} is unknown; known are {', '.join(TRANSPORTS)}")
    return record


def open_transport(
    name: str,
    store: Store,
    link_id: str,
    rank: Rank,
    host: str,
    timeout_s: float,
    device: torch.device | str = "cpu",
) -> Transport:
    """One end of a link over the transport ``name``, which moves tensors of ``device``. Errors as `OpenTransport`."""
    return transport_record(name).load()(store, link_id, rank, host, timeout_s, torch.device(device))
