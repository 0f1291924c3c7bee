"""Options. ``ServeConfig`` is what an operator writes (CLI, PACELINE_* or YAML, the same names everywhere);
``NodeConfig`` is what one node needs of it. Frozen, validated once, unknown keys refused by name."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

DrafterName = Literal["none", "ngram", "mtp"]
DtypeName = Literal["bf16", "fp32"]


class Frozen(BaseModel):
    """Immutable; a key it does not know is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class NodeConfig(Frozen):
    """One node, prefill or decode."""

    model: str  # a name `paceline pull` knows, a folder, or a hub id
    dtype: DtypeName = "bf16"
    device: str = "cpu"
    drafter: DrafterName = "ngram"
    drafter_path: str = ""  # folder of draft heads; empty with mtp: untrained heads from a fixed seed
    mtp_modules: int = Field(default=1, ge=1, le=8)  # only when drafter_path is empty; 1 is reused, more are chained
    num_draft_tokens: int = Field(default=4, ge=0, le=64)
    tree_width: int = Field(default=1, ge=1, le=16)
    page_size: int = Field(default=16, ge=1, le=1024)
    kv_cache_tokens: int = Field(default=32768, ge=64)  # capacity of the pool
    max_model_len: int = Field(default=0, ge=0)  # 0: the model's own
    prefill_chunk_tokens: int = Field(default=256, ge=1)
    max_running: int = Field(default=32, ge=1)  # sequences decoded together
    max_waiting: int = Field(default=256, ge=1)  # bounded queue in front of them
    prefix_cache: bool = True
    threads: int = Field(default=1, ge=1)
    handoff_deadline_s: float = Field(default=120.0, gt=0)  # from the first byte to the last
    reserve_deadline_s: float = Field(default=120.0, gt=0)  # from reservation to the first byte
    transfer_timeout_s: float = Field(default=5.0, gt=0)  # one message on the data link
    transport: Literal["gloo", "nccl"] = "gloo"
    host: str = "127.0.0.1"  # address that peers reach this node at


class ServeConfig(Frozen):
    """A deployment."""

    model: str = "smollm2-135m-instruct"
    dtype: DtypeName = "bf16"
    device: str = "cpu"
    drafter: DrafterName = "ngram"
    drafter_path: str = ""
    mtp_modules: int = Field(default=1, ge=1, le=8)
    num_draft_tokens: int = Field(default=4, ge=0, le=64)
    tree_width: int = Field(default=1, ge=1, le=16)
    page_size: int = Field(default=16, ge=1, le=1024)
    kv_cache_tokens: int = Field(default=32768, ge=64)
    max_model_len: int = Field(default=0, ge=0)
    prefill_chunk_tokens: int = Field(default=256, ge=1)
    max_running: int = Field(default=32, ge=1)
    max_waiting: int = Field(default=256, ge=1)
    prefix_cache: bool = True
    handoff_deadline_s: float = Field(default=120.0, gt=0)
    reserve_deadline_s: float = Field(default=120.0, gt=0)
    transfer_timeout_s: float = Field(default=5.0, gt=0)
    transport: Literal["gloo", "nccl"] = "gloo"

    prefill_nodes: int = Field(default=1, ge=0, le=64)
    decode_nodes: int = Field(default=1, ge=1, le=64)
    threads_per_node: int = Field(default=0, ge=0)  # 0: cores / nodes, at least 1
    grpc: str = "127.0.0.1:50051"
    http: str = "127.0.0.1:8000"
    redis: str = ""  # URL; empty: an embedded server
    ray_address: str = "local"
    node_host: str = "127.0.0.1"
    request_timeout_s: float = Field(default=600.0, gt=0)
    max_inflight: int = Field(default=256, ge=1)  # requests admitted by the router at once
    lease_ttl_s: float = Field(default=2.0, gt=0)
    drain_timeout_s: float = Field(default=10.0, ge=0)

    def node(self, threads: int) -> NodeConfig:
        """The part that one node needs."""
        shared = {name: getattr(self, name) for name in NodeConfig.model_fields if name in ServeConfig.model_fields}
        return NodeConfig(**shared, threads=threads, host=self.node_host)
