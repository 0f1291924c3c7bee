"""One follower as a process: ``python -m paceline.ranks.process COMMANDS ROWS LANES [SUMS] PARENT``, which rank 0
starts.

The first are open sockets that it inherits, SUMS where parts cross on sockets; the last is the process that it must not
outlive.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
from pathlib import Path

import torch

from paceline.attention.select import attention_for
from paceline.errors import NodeUnavailable
from paceline.kvcache.layout import KvLayout
from paceline.layers.bits import layer_bits
from paceline.layers.build import set_threads
from paceline.layers.shared_weights import shared_weights
from paceline.logs import configure_logging
from paceline.long_lived import settle
from paceline.models.config import ModelSpec
from paceline.models.registry import DTYPES
from paceline.ranks.channel import Channel, Kind
from paceline.ranks.commands import MAX_ERROR_BYTES, read_text, text_fields
from paceline.ranks.devices import make_group, rank_device, take_device
from paceline.ranks.follower import Follower
from paceline.ranks.group import Group
from paceline.ranks.leader import RANK_TIMEOUT_S
from paceline.ranks.load import load_shard
from paceline.ranks.options import FollowerOptions
from paceline.ranks.pool import follower_pool
from paceline.ranks.shard import Shard

PR_SET_PDEATHSIG = 1


def main() -> int:
    """See the module docstring."""
    *ends, parent = map(int, sys.argv[1:])
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: rank 0 decides when the node ends
    channel, rows, lanes, *sums = (Channel(socket.socket(fileno=end)) for end in ends)
    try:
        options = FollowerOptions.read(read_text(channel.receive(RANK_TIMEOUT_S)))
        configure_logging(options.log_level, options.log_format, f"rank-{options.rank}")
        group = make_group(options, options.rank, sums, RANK_TIMEOUT_S)
        follower = load(options, group, channel, rows, lanes)
    except Exception as error:
        told(channel, error)
        return 1
    settle()
    channel.send(Kind.READY, 0, text_fields(f"{peak_mib()} MiB at most"))
    try:
        follower.run()
    except Exception:
        return 1  # rank 0 was told
    return 0


def die_with(parent: int) -> None:
    """End with the thread that started this process."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before
        os._exit(1)


def load(options: FollowerOptions, group: Group, commands: Channel, rows: Channel, lanes: Channel) -> Follower:
    """The follower of ``options`` with its part of the model."""
    torch.set_num_threads(options.threads)
    set_threads(options.threads)
    device, dtype = rank_device(options.device, options.rank), DTYPES[options.dtype]
    take_device(device)
    shard = Shard(ModelSpec.from_folder(Path(options.folder)), options.degree, options.rank, options.dealt)
    with shared_weights(options.weight_file), layer_bits(options.bits, device):
        model = load_shard(Path(options.folder), dtype, device, shard, group, options.quantize)
    spec = shard.local_spec
    layout = KvLayout.of(model.kv_layers, dtype, options.kv_dtype)
    pool = follower_pool(layout, options.num_pages, options.page_size, device, shard)
    geometry = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
    longest = options.longest or spec.max_model_len
    special = spec.special_attention(longest)
    attention = attention_for(device, *geometry, options.attention, special=special, longest=longest)
    return Follower(model, pool, attention, commands, rows, lanes, group)


def told(channel: Channel, error: Exception) -> None:
    """Rank 0 raises it."""
    try:
        channel.send(Kind.FAILED, 0, text_fields(f"{type(error).__name__}: {error}"[:MAX_ERROR_BYTES]))
    except NodeUnavailable:
        return


def peak_mib() -> int:
    """Most memory that this process has held so far. getrusage would tell of the process that started it, too."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) // 1024


if __name__ == "__main__":
    sys.exit(main())
