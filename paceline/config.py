"""Options. ``ServeConfig`` is what an operator writes (CLI, PACELINE_* or YAML, the same names everywhere);
``NodeConfig`` is what one node needs of it. Frozen, validated once, unknown keys refused by name."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Literal, Self, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic.fields import FieldInfo

from paceline.speculation import DRAFTERS, TreeKind, drafter_choices, is_weightless


def _known_drafter(value: str) -> str:
    if value not in drafter_choices():
        raise ValueError(f"must be one of {', '.join(drafter_choices())}")
    return value


DrafterName = Annotated[str, AfterValidator(_known_drafter), Field(json_schema_extra={"enum": list(drafter_choices())})]
DtypeName = Literal["bf16", "fp32"]
DEFAULT_TREE_NODES = 16
AUTO_HOST = "auto"


class Frozen(BaseModel):
    """Immutable; a key it does not know is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class EngineConfig(Frozen):
    """What a node's engine is made of; the same on every node of a deployment."""

    model: str = "smollm2-135m-instruct"  # a name `paceline pull` knows, a folder, or a hub id
    dtype: DtypeName = "bf16"
    device: str = "cpu"
    attention: Literal["auto", "flashinfer", "torch"] = "auto"  # auto: FlashInfer on GPUs that have it
    cuda_graphs: bool = True  # capture decode rounds on GPUs
    graph_memory_mib: int = Field(default=4096, ge=0)  # what captures may take; the rest runs eagerly
    drafter: DrafterName = "default"  # default: EAGLE-3 where heads for the model ship with Paceline, else ngram
    drafters: str = ""  # further weightless drafters that a request may choose, separated by commas
    drafter_path: str = ""  # folder of draft heads or of the draft model; empty: the heads that ship for the model
    mtp_modules: int = Field(default=1, ge=1, le=8)  # with untrained heads only; 1 is reused, more are chained
    num_draft_tokens: int = Field(default=4, ge=0, le=64)  # K: depth of the draft
    tree: TreeKind = TreeKind.CHAIN
    tree_width: int = Field(default=4, ge=1, le=16)  # candidates per expanded node; a chain has 1
    tree_nodes: int = Field(default=0, ge=0, le=256)  # draft tokens of a tree; 0: at most 16
    expand_above: float = Field(default=0.0, ge=0.0, le=1.0)  # of dynamic trees: nodes so probable; 0: the best
    draft_sampling: Literal["coupled", "greedy", "sampled"] = "coupled"
    acceptance: Literal["sample", "rejection", "recursive", "typical"] = "sample"
    adaptive: Literal["off", "window", "goodput"] = "off"
    min_confidence: float = Field(default=0.0, ge=0.0, lt=1.0)  # stop drafting below this probability; 0 never
    head_check: bool = True  # measure the heads' first-position acceptance at start, and warn where it is too low
    page_size: int = Field(default=16, ge=1, le=1024)
    kv_cache_tokens: int = Field(default=32768, ge=64)  # capacity of the pool
    max_model_len: int = Field(default=0, ge=0)  # 0: the model's own
    prefill_chunk_tokens: int = Field(default=256, ge=1)
    max_running: int = Field(default=32, ge=1)  # sequences decoded together
    max_waiting: int = Field(default=256, ge=1)  # bounded queue in front of them
    prefix_cache: bool = True
    handoff_deadline_s: float = Field(default=120.0, gt=0)  # from the first byte to the last
    reserve_deadline_s: float = Field(default=120.0, gt=0)  # from reservation to the first byte
    transfer_timeout_s: float = Field(default=5.0, gt=0)  # one message on the data link
    trace_requests: int = Field(default=256, ge=0, le=65536)  # kept for `paceline trace`, in each process; 0: none
    transport: Literal["gloo", "nccl"] = "gloo"
    handoff: Literal["draft_kv", "hidden_states", "none"] = "draft_kv"  # what crosses besides target KV
    handoff_rows: Literal["fused", "raw"] = "fused"  # hidden_states of EAGLE-3: fused on prefill, or as they are
    handoff_dtype_cast: bool = False  # let fp32 prefill nodes round their KV for bf16 decode nodes
    handoff_checksum: bool = Field(
        default=False,
        description="Send a CRC-32 with the bytes of a hand-off; decode nodes check it before they use any of them. "
        "Made on the host: needs transport gloo.",
    )

    @field_validator("adaptive", "journal_mode", mode="before", check_fields=False)
    @classmethod
    def _yaml_off(cls, value: object) -> object:
        """YAML reads a bare ``off`` as false."""
        return "off" if value is False else value

    @field_validator("drafters")
    @classmethod
    def _known(cls, value: str) -> str:
        unknown = [name for name in _names(value) if not is_weightless(name)]
        if unknown:
            raise ValueError(f"{', '.join(unknown)}: only {', '.join(filter(is_weightless, DRAFTERS))} can be added")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.acceptance == "rejection" and self.tree is not TreeKind.CHAIN:
            raise ValueError("acceptance 'rejection' verifies chains: set tree to chain, or acceptance to recursive")
        if self.draft_sampling == "sampled" and self.tree is TreeKind.DYNAMIC:
            raise ValueError("draft_sampling 'sampled' cannot be pruned by score: set tree to chain or static")
        if self.expand_above and self.tree is not TreeKind.DYNAMIC:
            raise ValueError("expand_above says which nodes of dynamic trees grow: set tree to dynamic")
        if self.draft_sampling == "sampled" and self.acceptance == "typical":
            raise ValueError("draft_sampling 'sampled' needs acceptance sample, rejection or recursive")
        if self.handoff_checksum and self.transport == "nccl":
            raise ValueError(
                "handoff_checksum sums bytes in host memory, where transport 'nccl' never has them: set transport to "
                "gloo, or handoff_checksum to false"
            )
        return self

    @property
    def nodes_budget(self) -> int:
        """Draft tokens of the largest tree."""
        if self.tree is TreeKind.CHAIN or self.tree_width == 1:
            return self.num_draft_tokens
        widest = self.num_draft_tokens * self.tree_width
        return self.tree_nodes or min(widest, max(DEFAULT_TREE_NODES, self.num_draft_tokens))

    @property
    def selectable(self) -> tuple[str, ...]:
        """Drafters a request may name, the deployment's own first."""
        return tuple(dict.fromkeys((self.drafter, *_names(self.drafters))))


def choices_of(field: FieldInfo) -> tuple[str, ...]:
    """The words that an option takes; empty where it takes more than some words."""
    kind, extra = field.annotation, field.json_schema_extra
    if get_origin(kind) is Literal:
        return get_args(kind)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return tuple(member.value for member in kind)
    words = extra.get("enum") if isinstance(extra, dict) else None
    return tuple(map(str, words)) if isinstance(words, list) else ()


def _names(listed: str) -> list[str]:
    return [name for item in listed.split(",") if (name := item.strip())]


class NodeConfig(EngineConfig):
    """One node, prefill or decode."""

    threads: int = Field(default=1, ge=1)
    host: str = "127.0.0.1"  # address that peers reach this node at


class ServeConfig(EngineConfig):
    """A deployment."""

    prefill_nodes: int = Field(default=1, ge=0, le=64)
    decode_nodes: int = Field(default=1, ge=1, le=64)
    threads_per_node: int = Field(default=0, ge=0)  # 0: cores / nodes, at least 1
    grpc: str = "127.0.0.1:50051"
    http: str = "127.0.0.1:8000"
    redis: str = ""  # URL; empty: an embedded server
    ray_address: str = "local"
    node_host: str = AUTO_HOST  # address that nodes listen and are reached at; auto: each host's own in the cluster
    node_interface: str = ""  # network interface that gives it instead, e.g. eth1, the same name on every host
    prefill_resource: str = ""  # Ray resource of the hosts that prefill nodes may run on; each takes 1
    decode_resource: str = ""
    request_timeout_s: float = Field(default=600.0, gt=0)
    max_inflight: int = Field(default=256, ge=1)  # sequences that the router lets run at once
    max_queued: int = Field(default=512, ge=0)  # requests that wait for their turn; more are refused
    bypass_tokens: int = Field(default=0, ge=-1)  # prompts that decode computes itself; -1: where measured to be faster
    queue_timeout_s: float = Field(default=30.0, gt=0)  # longest wait for the turn
    lease_ttl_s: float = Field(default=2.0, gt=0)
    standby: bool = True  # a process that has imported everything waits to take the place of the only decode node
    journal_mode: Literal["redis", "off"] = "redis"  # where the requests of gRPC streams are kept, for other routers
    journal_ttl_s: float = Field(default=120.0, gt=0)  # after the last word of the router that serves the stream
    journal_entry_bytes: int = Field(default=256 * 1024, ge=1)  # a larger request is not kept
    journal_total_bytes: int = Field(default=16 * 1024 * 1024, ge=1)  # of one router; the oldest give way
    admin: str = ""  # HOST:PORT of the operator's gRPC; empty: there is none
    drain_timeout_s: float = Field(default=10.0, ge=0)

    def node(self, threads: int) -> NodeConfig:
        """The part that one node needs."""
        shared = {name: getattr(self, name) for name in EngineConfig.model_fields}
        return NodeConfig(**shared, threads=threads, host=self.host)

    @property
    def host(self) -> str:
        """``node_host``; nodes of a private Ray are all on this machine."""
        return "127.0.0.1" if self.node_host == AUTO_HOST and self.ray_address == "local" else self.node_host
