"""The other end of a link, in a process that tests kill: ``python peer_process.py STORE LINK_ID RANK BEHAVIOUR BYTES``.

Says "ready" in the store when it is about to join. Behaviours: ``idle`` joins and waits; ``whole`` exchanges one tensor
and ends in order; ``freeze`` exchanges one message (not cut), slowly when it sends; when it receives, it stops
itself in its middle.
"""

from __future__ import annotations

import os
import signal
import socket
import stat
import sys
import threading
import time
from contextlib import suppress

import torch

from kv_transfer.transports.registry import open_transport
from kv_transfer.transports.rendezvous import torch_dist
from kv_transfer.transports.sentinel import Sentinel

HOST = "127.0.0.1"
SLOW = 16 * 1024 * 1024  # bytes a second: a message of 128 MiB has a middle of seconds
SO_MAX_PACING_RATE = 47  # of Linux; socket has no name for it


def send_slowly() -> None:
    """Limit what the connections of this process send from now on."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the list's own is gone
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as connection:
                    connection.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, SLOW)


def stop_midway(buffer: torch.Tensor) -> None:
    """SIGSTOP this process once the first byte of ``buffer`` has arrived; it must be 0 before, 1 after."""
    while buffer[0] == 0:
        time.sleep(0.0005)
    os.kill(os.getpid(), signal.SIGSTOP)


def main(path: str, link_id: str, rank_text: str, behaviour: str, num_bytes: str) -> None:
    torch.set_num_threads(1)
    store = torch_dist.FileStore(path)
    rank = 1 if rank_text == "1" else 0
    data = (torch.ones if rank == 0 else torch.zeros)(int(num_bytes), dtype=torch.uint8)
    store.set(f"{link_id}.ready", "yes")
    transport = open_transport("gloo", store, link_id, 1 if rank else 0, HOST, 30)
    sentinel = Sentinel(store, link_id, 1 if rank else 0, HOST, 30, on_lost=lambda reason: None)
    if behaviour == "idle":
        threading.Event().wait(60)
    elif behaviour == "freeze":
        if rank == 1:
            threading.Thread(target=stop_midway, args=(data,), daemon=True).start()
        else:
            send_slowly()
        transport._send_message(data) if rank == 0 else transport._recv_message(data)
        threading.Event().wait(60)
    else:
        transport.send(data) if rank == 0 else transport.recv(data)
        sentinel.close()
        transport.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
