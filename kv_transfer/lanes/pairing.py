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

DIRECT = "direct"


def degrees(prefill: PairRequest, decode: PairResponse) -> tuple[int, int] | None:
    """Ranks of both nodes where these have lanes; None where all rows go over the link's own pipe. PairingRefused when
    the two nodes do not want the same, or sum bytes, which lanes do not."""
    ranks = max(1, prefill.ranks), max(1, decode.ranks)
    if ranks == (1, 1):
        return None
    wanted = prefill.rank_links == DIRECT, decode.rank_links == DIRECT
    if wanted[0] != wanted[1]:
        raise PairingRefused(["rank_links"], _said(prefill.rank_links, ranks[0]), _said(decode.rank_links, ranks[1]))
    if wanted[0] and prefill.fingerprint.checksum:
        raise PairingRefused(["rank_links"], "handoff_checksum does not cover lanes", f"rank_links={DIRECT!r}")
    return ranks if wanted[0] else None


def _said(rank_links: str, ranks: int) -> str:
    return f"rank_links={rank_links or 'through-0'!r} ranks={ranks}"


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
