"""2-rank gloo groups, built directly over a store and never registered globally."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import Any, Literal

import torch

from kv_transfer.transports.base import TransportError
from kv_transfer.transports.rendezvous import Store, torch_dist

TAG = 0
POISON_TAG = 1  # nothing is ever sent with it

Rank = Literal[0, 1]


def gloo_group(store: Store, prefix: str, rank: Rank, host: str, timeout_s: float) -> Any:
    """Join a 2-rank gloo group; ``host`` is the address that the peer reaches this process at (the host name may
    resolve to 127.0.0.1). TransportError when the peer does not come within ``timeout_s``."""
    options = torch_dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=timeout_s)
    options._threads = 1
    try:
        options._devices = [torch_dist.ProcessGroupGloo.create_device(hostname=host)]
        return torch_dist.ProcessGroupGloo(torch_dist.PrefixStore(prefix, store), rank, 2, options)
    except RuntimeError as error:
        raise TransportError(f"link {prefix}: the peer did not join: {error}") from error


def poison(group: Any) -> None:
    """Close the connection of a gloo group, so that waits blocked between messages return on both ends (abort and
    shutdown do not do that). A wait in the middle of a message still runs into its timeout."""
    with suppress(RuntimeError):
        group.recv([torch.zeros(1, dtype=torch.uint8)], 1 - group.rank(), POISON_TAG).wait(timedelta(milliseconds=1))


def forget_keys(store: Store, prefix: str, rank: Rank) -> None:
    """Delete a link's rendezvous keys; the decode node does it, whose own process hosts the store."""
    if rank == 1:
        with suppress(RuntimeError):
            store.delete_prefix(f"{prefix}/")
