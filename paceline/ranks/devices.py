"""Which device each rank of a node has, and how the ranks put their parts together there."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import torch

from paceline.config import NodeConfig
from paceline.errors import ConfigError
from paceline.ranks.channel import Channel
from paceline.ranks.collective import CollectiveGroup, file_store
from paceline.ranks.communicators import has_communicator
from paceline.ranks.group import Group
from paceline.ranks.sockets import SocketGroup
from paceline.transports import needs_cuda

if TYPE_CHECKING:
    from paceline.ranks.options import FollowerOptions

log = logging.getLogger(__name__)

SOCKETS, COLLECTIVE = "sockets", "collective"
NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"


def rank_device(device: str, rank: int) -> torch.device:
    """The device of a rank. device: the node's option; ``cuda`` begins with the first GPU that the node sees,
    ``cuda:N`` with that one."""
    first = torch.device(device)
    return first if first.type == "cpu" else torch.device(first.type, (first.index or 0) + rank)


def take_device(device: torch.device) -> None:
    """Make it the one of the calling thread."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def sums_of(config: NodeConfig) -> str:
    """How the ranks of a node put their parts together."""
    if config.rank_sums != "auto":
        return config.rank_sums
    return SOCKETS if config.device == "cpu" else COLLECTIVE


def check_devices(config: NodeConfig) -> None:
    """Raise ConfigError with the numbers where this host has fewer devices than ranks, or nothing that puts their parts
    together."""
    first = rank_device(config.device, 0)
    if first.type == "cuda":
        seen = torch.cuda.device_count()
        if (there := max(0, seen - (first.index or 0))) < config.tp:
            raise ConfigError(
                "tp",
                f"{config.tp} ranks are asked for, but from {first} on there are {there} GPUs of {seen} that this node "
                "sees: each rank needs one of its own",
            )
    if sums_of(config) == COLLECTIVE and not has_communicator(first):
        name = "NCCL" if first.type == "cuda" else "gloo"
        raise ConfigError(
            "rank_sums", f"{config.tp} ranks are asked for, but {name} is not in this build of torch; use sockets"
        )


@contextmanager
def meeting(config: NodeConfig) -> Iterator[str]:
    """A path of a file where the ranks of a node meet, in a folder that only this user can enter and that goes at the
    end; empty where they need none."""
    if sums_of(config) == SOCKETS:
        yield ""
        return
    if config.device != "cpu" and not needs_cuda(config.transport):
        os.environ[NCCL_INTERFACE] = "=lo"  # NCCL carries nothing else in this process, and ranks are on one host
    with TemporaryDirectory(prefix="paceline-ranks-") as folder:
        yield os.path.join(folder, "store")


def channels_of(options: FollowerOptions) -> int:
    """Channels to each follower: commands, rows, lanes, and parts where no collective carries them."""
    return 3 if options.meeting else 4


def make_group(options: FollowerOptions, rank: int, channels: Sequence[Channel], timeout_s: float) -> Group:
    """The group of a node as ``rank`` sees it. options: of any follower; channels: see SocketGroup."""
    if not options.meeting:
        return SocketGroup(rank, options.degree, channels, timeout_s)
    device = rank_device(options.device, rank)
    return CollectiveGroup(rank, options.degree, device, lambda: file_store(options.meeting, options.degree), timeout_s)
