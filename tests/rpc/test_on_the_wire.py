"""What somebody who reads the network sees: packets of the loopback, while a request is served by two real nodes."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.fakes.nodes import sequence_request
from tests.fakes.runner import expected_output
from tests.support.certificates import make_folder, secured

ALL_PROTOCOLS = 0x0003
KEPT_BYTES = 64 * 2**20
ROW_ELEMS = 16  # of a layer of the fake runner: keys and values of 2 heads of 4
SALT = "the salt of a tenant that nobody else may read"


class Captured:
    """Packets, of everybody on this machine."""

    def __init__(self) -> None:
        self._data = bytearray()

    def run(self, packets: socket.socket) -> None:
        """Until the socket is closed."""
        while len(self._data) < KEPT_BYTES:
            try:
                self._data += packets.recv(1 << 16)
            except TimeoutError:
                continue
            except OSError:
                return

    def has(self, what: bytes) -> bool:
        """Whether a packet held it."""
        return what in self._data


@contextmanager
def captured() -> Iterator[Captured]:
    """What crosses the loopback meanwhile."""
    try:
        packets = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.ntohs(ALL_PROTOCOLS))
        packets.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 24)
        packets.bind(("lo", 0))
    except (OSError, AttributeError) as error:
        pytest.skip(f"needs leave to read packets: {error}")
    packets.settimeout(0.1)
    found = Captured()
    reading = threading.Thread(target=found.run, args=(packets,))
    reading.start()
    try:
        yield found
    finally:
        threading.Event().wait(0.2)  # for the last packets
        packets.close()
        reading.join()


def packed(token_ids: tuple[int, ...]) -> bytes:
    """As protobuf has them."""
    return b"".join(bytes((i,)) if i < 128 else bytes((i % 128 + 128, i // 128)) for i in token_ids)


def rows(prompt: tuple[int, ...]) -> bytes:
    """KV rows of the fake runner's first layer, as they lie in memory: one number a token."""
    values = (torch.tensor(prompt) * 31 + torch.arange(len(prompt)) * 7) % 8191
    return values[:, None].expand(-1, ROW_ELEMS).reshape(-1).float().numpy().tobytes()


@pytest.mark.parametrize("encrypted", [False, True])
async def test_prompt_salt_and_rows_cross_encrypted(encrypted: bool, tmp_path: Path) -> None:
    """Mutants: a channel between parts without TLS; a pipe that is not sealed."""
    prompt = tuple(int(i) for i in torch.randint(0, 997, (48,)))
    request = sequence_request(prompt=prompt, cache_salt=SALT)
    with captured() as wire:
        async with secured(make_folder(tmp_path / "a") if encrypted else None) as nodes, asyncio.timeout(30):
            assert (await nodes.generate(request)).output == expected_output(request)
            await nodes.wait_for_release()
    known = {"prompt": packed(prompt), "salt": SALT.encode()}
    seen = {name for name, what in (known | {"kv": rows(prompt[:5])}).items() if wire.has(what)}
    assert seen == (set() if encrypted else {"prompt", "salt", "kv"})
