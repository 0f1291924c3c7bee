"""A process that holds a lease: ``lease_holder.py URL ID GENERATION TTL_S``. Says "ready", and "fenced" when it is."""

from __future__ import annotations

import sys

from cluster.state.node_lease import LeaseKeeper
from cluster.state.registry_types import NodeRecord


def main() -> None:
    url, node_id, generation, ttl_s = sys.argv[1:]
    keeper = LeaseKeeper(
        url,
        NodeRecord(node_id, "decode", int(generation), "127.0.0.1:1"),
        float(ttl_s),
        alive=lambda: True,
        load=lambda: {"running": 0, "waiting": 0, "free_pages": 1, "total_pages": 1},
        on_fenced=lambda: print("fenced", flush=True),
    )
    keeper.start()
    print("ready", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
