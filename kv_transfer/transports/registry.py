"""From the name of a transport to one end of a link over it. The list of names is paceline/transports.py.

Both ends call `open_transport`, then make a `Sentinel`, in this order, under a link id that was never used before.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeAlias, cast

import torch

from kv_transfer.transports.base import MESSAGE_BYTES, Rank, Transport
from kv_transfer.transports.sealed import sealed_end
from paceline.errors import ConfigError
from paceline.transports import TRANSPORTS, TransportRecord

# (torch store of the link, link id, rank, own address, timeout in seconds, device): opens one end of the data pipe of a
# link; blocks until the peer does the same. The timeout is that of joining, and of one message. ConfigError naming
# ``transport`` when it cannot work here, TransportError when the peer does not come.
OpenTransport: TypeAlias = Callable[[Any, str, Rank, str, float, torch.device], Transport]


LARGE_LINKS = 8  # of a node that may have larger messages than others: staging takes 128 MiB of a GPU for each


def transport_record(name: str) -> TransportRecord:
    """ConfigError naming ``transport`` when there is none of this name."""
    if (record := TRANSPORTS.get(name)) is None:
        raise ConfigError("transport", f"{name!r} is unknown; known are {', '.join(TRANSPORTS)}")
    return record


def staging_device(name: str, pool_device: torch.device) -> torch.device:
    """Where rows of a pool are staged for the transport ``name``. ConfigError when there is none."""
    return pool_device if transport_record(name).needs_cuda else torch.device("cpu")


def offered_bytes(name: str, num_links: int) -> int:
    """What a message of one more link may have at this end, which has ``num_links`` already. ConfigError when there is
    no transport ``name``."""
    return transport_record(name).message_mib << 20 if num_links < LARGE_LINKS else MESSAGE_BYTES


def agreed_multiple(offered: int, told: int) -> int:
    """`Transport.multiple` of a link: the smaller of what both ends offered, in bytes. A peer of a build before larger
    messages tells 0, and takes those of `MESSAGE_BYTES`."""
    return max(1, min(offered, told) // MESSAGE_BYTES)


def open_transport(
    name: str,
    store: Any,
    link_id: str,
    rank: Rank,
    host: str,
    timeout_s: float,
    device: torch.device | str = "cpu",
    *,
    sealed: bool = False,
    multiple: int = 1,
) -> Transport:
    """One end of a link over the transport ``name``, which moves tensors of ``device``. Errors as `OpenTransport`.

    sealed: encrypt the rows with a key that crosses on the control stream, which is encrypted then; both ends say the
    same. Rows that never lie in host memory stay as they are.
    multiple: as both ends agreed.
    """
    record = transport_record(name)
    module, _, function = record.open.partition(":")
    opener = cast(OpenTransport, getattr(import_module(module), function))
    opened = opener(store, link_id, rank, host, timeout_s, torch.device(device))
    opened.multiple = multiple
    if not sealed or record.needs_cuda:
        return opened
    end = sealed_end(opened, store, link_id, rank)
    end.multiple = multiple
    return end
