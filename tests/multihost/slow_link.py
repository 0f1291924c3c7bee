"""A link with delay, a rate and losses: ``slow_link.py [--delay-ms D] [--mbit-s R] [--loss P] NEAR FAR``.

Carries Ethernet frames between two TAP devices that it makes, until it is killed. It does what ``tc netem`` does, on
kernels that have none: each way, a frame leaves once the ones before it have (rate), arrives D later (delay), or never
(loss, or a full queue).
"""

from __future__ import annotations

import argparse
import fcntl
import heapq
import os
import random
import selectors
import struct
import time
from contextlib import suppress
from dataclasses import dataclass, field

TUNSETIFF = 0x400454CA
IFF_TAP, IFF_NO_PI = 0x0002, 0x1000
MAX_QUEUE_S = 0.25  # of a frame behind the others; more is dropped, as a router's buffer would
FRAME_BYTES = 65536


def open_tap(name: str) -> int:
    """A TAP device of this network namespace; it goes with the process."""
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
    return tap


@dataclass
class Way:
    """One direction."""

    out: int
    delay_s: float
    bytes_per_s: float  # 0: no limit
    loss: float
    free_at: float = 0.0  # when the last frame will have left
    under_way: list[tuple[float, int, bytes]] = field(default_factory=list)  # heap by arrival
    count: int = 0

    def take(self, frame: bytes, now: float, rng: random.Random) -> None:
        """Let a frame go, or lose it."""
        start = max(now, self.free_at)
        if rng.random() < self.loss or start - now > MAX_QUEUE_S:
            return
        self.free_at = start + (len(frame) / self.bytes_per_s if self.bytes_per_s else 0.0)
        self.count += 1
        heapq.heappush(self.under_way, (self.free_at + self.delay_s, self.count, frame))

    def deliver(self, now: float) -> float:
        """Write what has arrived; seconds until the next one, at most 1."""
        while self.under_way and self.under_way[0][0] <= now:
            with suppress(OSError):  # the device is down, or its queue full
                os.write(self.out, heapq.heappop(self.under_way)[2])
        return min(1.0, self.under_way[0][0] - now) if self.under_way else 1.0


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--delay-ms", "--mbit-s", "--loss"):
        parser.add_argument(name, type=float, default=0.0)
    parser.add_argument("near")
    parser.add_argument("far")
    options = parser.parse_args()
    near, far = open_tap(options.near), open_tap(options.far)
    settings = (options.delay_ms / 1000, options.mbit_s * 1e6 / 8, options.loss)
    ways = {near: Way(far, *settings), far: Way(near, *settings)}
    rng = random.Random(0)
    with selectors.DefaultSelector() as selector:
        for tap in ways:
            selector.register(tap, selectors.EVENT_READ)
        wait_s = 1.0
        while True:
            for key, _ in selector.select(wait_s):
                try:
                    ways[key.fd].take(os.read(key.fd, FRAME_BYTES), time.monotonic(), rng)
                except OSError:  # the device is not up yet
                    time.sleep(0.01)
            wait_s = max(0.0, min(way.deliver(time.monotonic()) for way in ways.values()))


if __name__ == "__main__":
    main()
