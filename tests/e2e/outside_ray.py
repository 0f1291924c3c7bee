"""A Ray that lives on when deployments end: ``outside_ray.py CPUS`` prints its address, and ends with its stdin."""

from __future__ import annotations

import sys

import ray

from cluster.nodes.ray_session import start_ray, stop_ray


def main() -> None:
    start_ray("local", int(sys.argv[1]))
    print(ray.get_runtime_context().gcs_address, flush=True)
    sys.stdin.read()
    stop_ray()


if __name__ == "__main__":
    main()
