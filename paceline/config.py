"""Options. ``ServeConfig`` is what an operator writes (CLI, PACELINE_* or YAML, the same names everywhere);
``NodeConfig`` is what one node needs of it. Frozen, validated once, unknown keys refused by name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, SecretStr, field_validator, model_validator

from paceline.engine_config import EngineConfig, Group, names_of
from paceline.option_values import ReasoningParser, ToolCallParser
from paceline.role_options import CAST, ROLES, Role, RoleOptions, kind_of

AUTO_HOST = "auto"
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s,]+")  # as browsers send it


def _apart(option: str, prefill: object, decode: object, why: str) -> str:
    return f"{option} is {prefill} for prefill nodes and {decode} for decode nodes: {why}"


class NodeConfig(EngineConfig):
    """One node, prefill or decode."""

    threads: int = Field(default=1, ge=1)
    """Cores that the node computes on, all its ranks together, where it does not share them."""

    cores_group: str = ""
    """Nodes of a host with the same group share its cores: those that work get equal parts. Empty: this one has
    `threads`."""

    cores_slot: int = Field(default=0, ge=0, le=255)
    """Number of this node in its group."""

    weight_file: str = ""
    """Memory file in which the nodes of a host keep their weights together. Empty: each node keeps its own."""

    host: str = "127.0.0.1"
    """Address that the node listens on and that its peers reach it at."""

    tls_dir: str = ""
    """Folder with the certificates of this deployment's parts. Empty: calls are not encrypted."""

    call_token: SecretStr = SecretStr("")
    """Comes with every call between parts. Empty: everyone may call."""

    ticket_key: SecretStr = SecretStr("")
    """Decode nodes check with it what prefill nodes may deliver. Empty: nothing is checked."""


class ServeConfig(EngineConfig):
    """A deployment."""

    prefill_nodes: Annotated[int, Group("Nodes and Ray")] = Field(default=1, ge=0, le=64)
    """Processes that compute prompts. 0 lets decode nodes compute them."""

    decode_nodes: int = Field(default=1, ge=1, le=64)
    """Processes that generate tokens."""

    threads_per_node: int = Field(default=0, ge=0)
    """Cores that each node computes on, all its ranks together. 0 divides this host's cores by the number of ranks, and
    lets a node of one rank use those of idle nodes."""

    prefill: RoleOptions = RoleOptions()
    """Options of prefill nodes that differ from the deployment's, which hold for both roles: memory, batches, device,
    ranks. In a file it is a section of options."""

    decode: RoleOptions = RoleOptions()
    """Options of decode nodes that differ from the deployment's, as `prefill` has them. The same text comes of all of
    them, but for `dtype`."""

    standby: bool = True
    """Keeps a process with everything imported, about 300 MB, ready to replace the only decode node within seconds."""

    share_weights: Literal["auto", "on", "off"] = "auto"
    """Keeps one copy of the weights for all CPU nodes of a private Ray. `off` keeps one in each node. `auto` does so
    where only memory of its own has huge pages, which decode faster, and copies fit."""

    ray_address: str = "local"
    """Ray cluster that runs the nodes, e.g. `auto` or HOST:PORT. `local` starts a private Ray on this machine. A router
    that joins and names it takes over when `serve` is lost."""

    leave_nodes: bool = False
    """Leaves the nodes running when this process ends in order, for a router that joined with `ray_address` to go on
    with. It needs a Ray and a Redis of yours."""

    node_host: str = AUTO_HOST
    """Address that nodes listen on and are reached at. `auto` takes each host's address in Ray, or 127.0.0.1 with a
    private Ray."""

    node_interface: str = ""
    """Network interface that gives the nodes' addresses, e.g. `eth1`; it has the same name on every host. Empty uses
    `node_host`."""

    prefill_resource: str = ""
    """Custom Ray resource that marks the hosts for prefill nodes; each node takes 1 of it. Empty allows every host."""

    decode_resource: str = ""
    """Custom Ray resource that marks the hosts for decode nodes; each node takes 1 of it. Empty allows every host."""

    grpc: Annotated[str, Group("Addresses")] = "127.0.0.1:50051"
    """HOST:PORT to serve gRPC at. Port 0 takes a free one; `0.0.0.0` as host listens on all interfaces."""

    http: str = "127.0.0.1:8000"
    """HOST:PORT to serve the OpenAI-style HTTP API and `/metrics` at. Port 0 takes a free one."""

    http_cors_origins: str = ""
    """Origins of web pages that may use the HTTP API, separated by commas, e.g. `https://chat.example.org`. `*` lets in
    every page. Empty lets in none."""

    served_model_name: str = ""
    """Names that requests may give the model, separated by commas. Answers have the first of them. Empty takes what
    `model` says."""

    vllm_metrics: bool = False
    """Shows the metrics that have an equal in vLLM under vLLM's names too, for dashboards that are there."""

    admin: str = ""
    """HOST:PORT of the operators' gRPC, for `paceline nodes`. With `tls_dir` it takes `admin` certificates, with
    `api_keys` an operator's key, and without either everybody. Empty does not serve it."""

    tls_dir: Annotated[str, Group("Security")] = ""
    """Folder that `paceline certs init` makes, at the same path on every host. Parts then talk over mTLS, and clients
    over TLS where `server.pem` is in it. Empty encrypts nothing."""

    secret_file: str = ""
    """File with a secret of at least 16 characters that proves to nodes that a caller belongs to this deployment. Empty
    makes a new one at every start."""

    api_keys: str = ""
    """YAML file of API keys, which `paceline keys` makes. It is read again when it changes. Empty lets everybody in."""

    open_metrics: bool = False
    """With `api_keys`, let everybody read `/metrics`. Otherwise it needs a key with the scope `metrics`."""

    audit_calls: bool = False
    """With `api_keys`, write a line of the audit for every call of a key, not for refused ones and operators' alone."""

    insecure: bool = False
    """Lets `grpc`, `http` and `admin` listen at an address that other hosts reach, without API keys. Everybody there
    may then use them."""

    tenant_share: float = Field(default=0.5, gt=0, le=1)
    """With `api_keys`, the part of `max_inflight` and of the nodes' KV tokens that one tenant may have while others ask
    too. 1 is all."""

    stream_interval_ms: float = Field(default=20.0, ge=0, le=1000)
    """Milliseconds from one piece of a stream to the next. Tokens that come faster are told together, the first and the
    last at once. Fewer pieces cost routers less. 0 tells each round by itself."""

    read_timeout_s: float = Field(default=15.0, gt=0)
    """Seconds that a client may keep a full queue of chunks waiting before its request ends; a fifth of it while other
    requests wait for the nodes. Reading four chunks a second is enough."""

    chat_template: Annotated[str, Group("Chats and tools")] = ""
    """File with a chat template (jinja) to use in place of the model's own. Empty takes the model's."""

    tool_call_parser: ToolCallParser = "auto"
    """How the model writes tool calls. `auto` takes what its chat template teaches, else tells of tools in the system
    turn and reads `hermes`. `none` refuses tools."""

    reasoning_parser: ReasoningParser = "auto"
    """How the model marks what it thinks, which is split from the text. `auto` takes what its chat template knows;
    `none` leaves it in the text."""

    max_inflight: Annotated[int, Group("Admission and limits")] = Field(default=256, ge=1)
    """Sequences that the router lets run at once; a request with n choices counts n times. Others wait for their
    turn."""

    max_queued: int = Field(default=512, ge=0)
    """Requests that may wait for their turn at the router. Further ones are refused with 429 or RESOURCE_EXHAUSTED."""

    queue_timeout_s: float = Field(default=30.0, gt=0)
    """Seconds that a request may wait for its turn, and then for a decode node where none is alive, before it is
    refused. `GET /health` is 503 meanwhile."""

    request_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds that a request may take from arrival to its last token; it then fails with a deadline error."""

    bypass_tokens: int = Field(default=0, ge=-1)
    """Decode nodes compute prompts with at most this many uncached tokens themselves. 0 never; -1 where that is
    measured to be faster."""

    redis: Annotated[str, Group("Registry and journal")] = ""
    """URL of the Redis that holds node leases and the journal, e.g. `redis://HOST:6379/0`. Empty starts an embedded
    server."""

    deployment: str = Field(default="default", pattern="^[A-Za-z0-9_-]{1,40}$")
    """Name of this deployment in Redis and Ray: letters, digits, `-` and `_`, at most 40. Each name is served by one
    process at a time; other names are not noticed."""

    lease_ttl_s: float = Field(default=2.0, gt=0)
    """Seconds without a heartbeat after which a node counts as lost. Raise it where hosts or Redis pause for longer."""

    journal_mode: Literal["redis", "off"] = "redis"
    """Where requests of gRPC streams, and tokens that HTTP streams told, are kept encrypted, so that another router can
    resume them. `off` keeps nothing: no prompt reaches Redis."""

    journal_ttl_s: float = Field(default=120.0, gt=0)
    """Seconds that a journal entry lives after the router that serves its stream last renewed it."""

    journal_entry_bytes: int = Field(default=256 * 1024, ge=1)
    """Largest entry of the journal, in bytes. The stream of a larger request resumes only from the client's own copy,
    and an HTTP stream that told more tokens makes them again."""

    journal_total_bytes: int = Field(default=16 * 1024 * 1024, ge=1)
    """Bytes of all journal entries of one router. The oldest entries give way, told tokens before requests."""

    drain_timeout_s: Annotated[float, Group("Shutdown")] = Field(default=10.0, ge=0)
    """Seconds that running requests get to finish when the deployment stops or a node changes its role."""

    @field_validator("http_cors_origins")
    @classmethod
    def _origins(cls, value: str) -> str:
        wrong = [name for name in names_of(value) if name != "*" and not ORIGIN.fullmatch(name)]
        if wrong:
            raise ValueError(f"{', '.join(wrong)}: an origin is http(s)://HOST or http(s)://HOST:PORT, or *")
        return value

    @field_validator(*ROLES)
    @classmethod
    def _in_range(cls, value: RoleOptions) -> RoleOptions:
        cls.model_validate(value.given())  # its error names the option; pydantic puts the section before it
        return value

    @model_validator(mode="after")
    def _roles_agree(self) -> Self:
        if self.prefill_nodes:
            self.check_roles_agree()
        return self

    def check_roles_agree(self) -> None:
        """Raise ValueError where prefill nodes with these options could not hand over to decode nodes."""
        prefill, decode = self.of_role("prefill"), self.of_role("decode")
        if kind_of(prefill.device) != kind_of(decode.device):
            raise ValueError(_apart("device", prefill.device, decode.device, "text would depend on who computed it"))
        if prefill.attention != decode.attention and kind_of(decode.device) == "cuda":
            told = "on GPUs their bits differ"
            raise ValueError(_apart("attention", prefill.attention, decode.attention, told))
        dtypes = prefill.dtype, decode.dtype
        if prefill.dtype != decode.dtype and not (self.handoff_dtype_cast and dtypes == CAST):
            told = "handoff_dtype_cast lets fp32 prefill nodes hand over to bf16 decode nodes, and no others"
            raise ValueError(_apart("dtype", *dtypes, told))

    def of_role(self, role: Role) -> ServeConfig:
        """The deployment's options as nodes of a role have them."""
        section: RoleOptions = getattr(self, role)
        return self.model_copy(update=section.given())

    @property
    def served_names(self) -> tuple[str, ...]:
        """Names that requests may give the model; answers have the first."""
        return tuple(names_of(self.served_model_name)) or (self.model,)

    @property
    def cors_origins(self) -> tuple[str, ...]:
        """Origins of web pages that may use the HTTP API."""
        return tuple(names_of(self.http_cors_origins))

    def node(self, threads: int, cores_group: str = "", weight_file: str = "") -> NodeConfig:
        """The part that one node needs."""
        shared = {name: getattr(self, name) for name in EngineConfig.model_fields}
        shared["prefill_chunk_tokens"] = self.chunk_tokens  # a node of an older build knows no 0
        return NodeConfig(
            **shared,
            threads=threads,
            cores_group=cores_group,
            weight_file=weight_file,
            host=self.host,
            tls_dir=str(Path(self.tls_dir).expanduser().absolute()) if self.tls_dir else "",
        )

    @property
    def host(self) -> str:
        """``node_host``; nodes of a private Ray are all on this machine."""
        return "127.0.0.1" if self.node_host == AUTO_HOST and self.ray_address == "local" else self.node_host
