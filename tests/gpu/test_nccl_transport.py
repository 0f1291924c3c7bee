"""The NCCL transport between two processes on one GPU.

NCCL refuses two ranks on one device of one host, so each process says that it is a host of its own (NCCL_HOSTID), which
leaves sockets over loopback as the path.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kv_transfer.transports.base import MESSAGE_BYTES
from kv_transfer.transports.rendezvous import torch_dist

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
HOST = "127.0.0.1"
SIZES = (0, 1, 1000, MESSAGE_BYTES // 2 + 3, MESSAGE_BYTES + 1)  # elements of two bytes
ENVIRONMENT = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_PROTO": "Simple",
    "NCCL_MAX_CTAS": "2",
}


def tensors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, generator=generator).to(torch.bfloat16) for size in SIZES]


def run_rank(rank: int, path: str, behaviour: str) -> None:
    """One process: exchange every tensor; or, as ``lonely`` receiver, see the message timeout."""
    from kv_transfer.transports.base import TransportError, byte_view
    from kv_transfer.transports.registry import open_transport

    store = torch_dist.FileStore(path)
    transport = open_transport("nccl", store, f"link-{behaviour}", 1 if rank else 0, HOST, 20.0, "cuda:0")
    if behaviour == "lonely":
        transport._timeout_s = 2.0  # type: ignore[attr-defined]
        if rank == 1:
            with pytest.raises(TransportError, match="timeout"):
                transport.recv(torch.zeros(8, device="cuda:0"))
            torch.zeros(1, device="cuda:0").add_(1).item()  # the device is of use afterwards
        store.set(f"done-{rank}", "yes")
        store.wait(["done-0", "done-1"])
        transport.abort()
        return
    for tensor in tensors():
        if rank == 0:
            transport.send(tensor.to("cuda:0"))
        else:
            got = torch.empty_like(tensor, device="cuda:0")
            transport.recv(got)
            assert torch.equal(byte_view(got.cpu()), byte_view(tensor))
    store.set(f"done-{rank}", "yes")
    store.wait(["done-0", "done-1"])
    transport.close()


@pytest.mark.parametrize("behaviour", ["exchange", "lonely"])
def test_two_processes(behaviour: str, tmp_path: Path) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, str(Path(__file__)), str(rank), str(tmp_path / "keys"), behaviour],
            env={**os.environ, **ENVIRONMENT, "NCCL_HOSTID": f"node{rank}"},
        )
        for rank in (0, 1)
    ]
    try:
        assert [process.wait(150) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
            process.wait(10)


if __name__ == "__main__":
    run_rank(int(sys.argv[1]), sys.argv[2], sys.argv[3])
