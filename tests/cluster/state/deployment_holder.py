"""A process that holds a deployment: ``deployment_holder.py URL DEPLOYMENT MODEL``. Says "held TOKEN"; later "lost to
WHO", and how an attempt to get a generation ends then."""

from __future__ import annotations

import sys

from cluster.state.holder import DeploymentLease, Holder
from paceline.errors import PacelineError


def main() -> None:
    url, deployment, model = sys.argv[1:]

    def lost(who: str) -> None:
        print(f"lost to {who}", flush=True)
        try:
            print(lease.issue("decode-0", 0), flush=True)
        except PacelineError as error:
            print(error, flush=True)

    lease = DeploymentLease(url, deployment, Holder(model), lost)
    lease.acquire()
    print(f"held {lease.token}", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
