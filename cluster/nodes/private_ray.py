"""A Ray of this deployment's own, on this machine: the processes that place actors and watch them, and no others.

``ray.init`` also starts an autoscaler, a log monitor and an API server, each a Python process that imports Ray: seconds
of every start and 200 MB, for a dashboard that is switched off, logs that go to no driver and hosts that never come.
It has no option for any of them, so this module knows the class that starts them. A Ray that names its methods
otherwise starts the processes as before.
"""

from __future__ import annotations

import ray
import ray._private.node

OBJECT_STORE_BYTES = 80 * 1024 * 1024  # Ray's minimum: no tensor ever goes through it


class SmallNode(ray._private.node.Node):  # type: ignore[misc]  # Ray has no types here
    """Ray's processes of one host, those that nobody asks left out."""

    def start_monitor(self) -> None:
        """No autoscaler."""

    def start_log_monitor(self) -> None:
        """No log monitor: the router reads the nodes' logs itself."""

    def start_api_server(self, *, include_dashboard: bool | None, raise_on_failure: bool) -> None:
        """No dashboard."""


def start_private_ray(num_cpus: int) -> None:
    """num_cpus: what actors may be placed on; as many workers are started at once, ready for the first of them."""
    theirs, ray._private.node.Node = ray._private.node.Node, SmallNode
    try:
        ray.init(
            address="local",
            num_cpus=num_cpus,
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            log_to_driver=False,
            configure_logging=False,
        )
    finally:
        ray._private.node.Node = theirs
