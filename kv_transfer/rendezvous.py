"""How two processes meet: a TCP store, and 2-rank gloo groups built directly over it, never registered globally."""

from __future__ import annotations

import socket
from contextlib import suppress
from datetime import timedelta
from typing import Any, Literal, Protocol, Self

import torch
import torch.distributed as dist

from kv_transfer.transport import TransportError

TAG = 0
POISON_TAG = 1  # nothing is ever sent with it

Rank = Literal[0, 1]
torch_dist: Any = dist  # torch's type stubs name neither the stores nor the options of a group


class Store(Protocol):
    """What links need of a torch.distributed store; a TCPStore has it."""

    @property
    def port(self) -> int: ...

    def clone(self) -> Self: ...

    def list_keys(self) -> list[str]: ...

    def delete_key(self, key: str) -> bool: ...


def create_store(host: str, port: int, is_master: bool, timeout_s: float) -> Store:
    """The rendezvous store of links. The master (the decode node) listens on ``host`` alone, with port 0 on a free port
    (``store.port`` says which). TransportError when it cannot be reached within ``timeout_s``."""
    timeout = timedelta(seconds=timeout_s)
    try:
        if not is_master:
            client: Store = torch_dist.TCPStore(host, port, None, False, timeout, wait_for_workers=False)
            return client
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, port), family=family) as server:
            port = server.getsockname()[1]
            fd = server.detach()  # the store closes it
        master: Store = torch_dist.TCPStore(
            host, port, None, True, timeout, wait_for_workers=False, master_listen_fd=fd
        )
        return master
    except (RuntimeError, OSError) as error:
        raise TransportError(f"rendezvous store at {host}:{port}: {error}") from error


def gloo_group(store: Store, prefix: str, rank: Rank, host: str, timeout_s: float) -> Any:
    """Join a 2-rank gloo group; ``host`` is the address that the peer reaches this process at (the host name may
    resolve to 127.0.0.1). TransportError when the peer does not come within ``timeout_s``."""
    options = torch_dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=timeout_s)
    options._threads = 1
    try:
        options._devices = [torch_dist.ProcessGroupGloo.create_device(hostname=host)]
        # A store client serves one caller at a time: several links may open at once, so each has its own.
        return torch_dist.ProcessGroupGloo(torch_dist.PrefixStore(prefix, store.clone()), rank, 2, options)
    except RuntimeError as error:
        raise TransportError(f"link {prefix}: the peer did not join: {error}") from error


def poison(group: Any) -> None:
    """Close the connection of a gloo group, so that waits blocked between messages return on both ends (abort and
    shutdown do not do that). A wait in the middle of a message still runs into its timeout."""
    with suppress(RuntimeError):
        group.recv([torch.zeros(1, dtype=torch.uint8)], 1 - group.rank(), POISON_TAG).wait(timedelta(milliseconds=1))


def forget_keys(store: Store, prefix: str, rank: Rank) -> None:
    """Delete a link's rendezvous keys; only the decode node does it, whose own process hosts the store."""
    if rank == 1:
        with suppress(RuntimeError):
            for key in store.list_keys():
                if key.startswith(f"{prefix}/"):
                    store.delete_key(key)
