"""Whether the ranks of two paired nodes have lanes, and their making."""

from __future__ import annotations

from collections.abc import Callable

from kv_transfer.lanes.leader import LanedTransport, Lanes
from kv_transfer.lanes.options import LaneOptions
from kv_transfer.transports.base import Transport
from kv_transfer.transports.rendezvous import LinkStore
from paceline.config import NodeConfig
from paceline.errors import PairingRefused
from paceline.kvcache.layout import KvLayout
from paceline.kvcache.pool import KvPool
from paceline.v1.handoff_pb2 import PairRequest, PairResponse

DIRECT, THROUGH_0 = "direct", "through-0"


def wanted_by(config: NodeConfig) -> str:
    """What a node says of its lanes when it pairs. No GPU has them, nor a node that deals its sequences to its ranks:
    there each rank has rows of its own."""
    return config.rank_links if config.device == "cpu" and config.attention_dp == 1 else THROUGH_0


def degrees(prefill: PairRequest, decode: PairResponse) -> tuple[int, int] | None:
    """Ranks of both nodes where these have lanes; None where all rows go over the link's own pipe. PairingRefused when
    one node insists on lanes and the other has none."""
    ranks = max(1, prefill.ranks), max(1, decode.ranks)
    if ranks == (1, 1):
        return None
    wanted = prefill.rank_links or THROUGH_0, decode.rank_links or THROUGH_0
    if THROUGH_0 not in wanted:
        return ranks
    if DIRECT in wanted:
        prefill_says, decode_says = (f"rank_links={want!r} ranks={n}" for want, n in zip(wanted, ranks, strict=True))
        raise PairingRefused(["rank_links"], prefill_says, decode_says)
    return None


def make_lanes(
    link_id: str,
    ranks: tuple[int, int] | None,
    layouts: tuple[KvLayout, KvLayout],
    pool: KvPool,
    store: LinkStore,
    config: NodeConfig,
    *,
    sends: bool,
) -> Lanes | None:
    """The lanes of a link, which followers begin to open. layouts: of what both nodes' pools hold of all that may
    cross; ranks: of `degrees`."""
    if ranks is None:
        return None
    options = LaneOptions.of(
        link_id,
        ranks,
        layouts,
        sends=sends,
        transport=config.transport,
        host=config.host,
        timeout_s=config.transfer_timeout_s,
        sealed=bool(config.tls_dir),
        checksums=config.handoff_checksum,
    )
    return Lanes(options, pool, store)


def open_with(lanes: Lanes | None, open_own: Callable[[], Transport]) -> Transport:
    """Open the link's own pipe, then its lanes; blocks until the peer does the same. All of it or nothing is open."""
    if lanes is None:
        return open_own()
    try:
        transport = LanedTransport(open_own(), lanes)
    except BaseException:
        lanes.abort()
        raise
    try:
        lanes.open()
    except BaseException:
        transport.abort()
        transport.close()
        raise
    return transport
