"""A Ray that lives on when deployments end: ``outside_ray.py CPUS [PORT]`` prints its address, and ends with its stdin.

PORT: of its GCS; a free one where none is given.
"""

from __future__ import annotations

import sys
from typing import Any

import ray
from ray._private.parameter import RayParams

from cluster.nodes.ray_session import start_ray, stop_ray


def main() -> None:
    if len(sys.argv) > 2:
        RayParams.__init__ = _at_port(RayParams.__init__, int(sys.argv[2]))
    start_ray("local", int(sys.argv[1]))
    print(ray.get_runtime_context().gcs_address, flush=True)
    sys.stdin.read()
    stop_ray()


def _at_port(make: Any, port: int) -> Any:
    """A private Ray has no option for it."""

    def made(self: Any, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        self.gcs_server_port = port

    return made


if __name__ == "__main__":
    main()
