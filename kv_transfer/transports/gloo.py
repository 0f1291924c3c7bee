"""Links over gloo, and the 2-rank gloo groups that they and the sentinels are made of.

Gloo does not tell a receive in the middle of a message that its peer died; it blocks until the message timeout. Hence
the sentinel, and hence messages that are small enough for a short timeout.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from kv_transfer.transports.base import MESSAGE_BYTES, Pending, Rank, TransportError, byte_view, message_slices
from kv_transfer.transports.rendezvous import torch_dist
from kv_transfer.transports.torch_dist import TorchDistTransport

TAG = 0
POISON_TAG = 1  # nothing is ever sent with it


def gloo_group(store: Any, prefix: str, rank: Rank, host: str, timeout_s: float) -> Any:
    """Join a 2-rank gloo group over a torch store of the link. TransportError when the peer does not come within
    ``timeout_s``.

    host: the address that the peer reaches this process at (the host name may resolve to 127.0.0.1).
    """
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


class GlooTransport(TorchDistTransport):
    """CPU tensors; the group's timeout is the message timeout, from the start of each wait."""

    takes_less = True

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
            for piece in pieces:
                works.append(getattr(group, verb)([piece], 1 - self._rank, TAG))

        def wait() -> None:
            try:
                while works:
                    works.pop(0).wait()
            finally:
                works.clear()  # gloo leaves the memory of a message alone once nobody holds its work

        self._guard(verb, num_bytes, post)
        return lambda: self._see_off(verb, num_bytes, wait)

    def _end_group(self, group: Any) -> None:
        """Threads and sockets go with the last reference."""

    def _abort_group(self, group: Any) -> None:
        poison(group)


def open_gloo(store: Any, link_id: str, rank: Rank, host: str, timeout_s: float, device: torch.device) -> GlooTransport:
    """See `registry.OpenTransport`. ``device`` is the host's memory, the only one that gloo moves."""
    prefix = f"{link_id}/data"
    return GlooTransport(gloo_group(store, prefix, rank, host, timeout_s), prefix, rank)
