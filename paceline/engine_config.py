"""Options of a node's engine, and what all classes of options share. The options are the same on every node of a
deployment, unless its role has its own."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Literal, Self, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic.fields import FieldInfo

from paceline.errors import ConfigError
from paceline.option_values import DrafterName, DtypeName, KvDtypeName, LogFormat, LogLevel, QuantizeName, TransportName
from paceline.role_options import kind_of
from paceline.speculation import DRAFTERS, TreeKind, is_weightless
from paceline.transports import needs_cuda

DEFAULT_TREE_NODES = 16
CHUNK_TOKENS = {"cpu": 256, "cuda": 2048}  # a GPU computes so many in the time of a few steps


@dataclass(frozen=True)
class Group:
    """Marks the first option of a group; the options below it in its class belong to the group too."""

    title: str


class Frozen(BaseModel):
    """Immutable; a key it does not know is an error. The string under a field is its description."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class EngineConfig(Frozen):
    """What a node's engine is made of; the same on every node of a deployment.

    Ray carries it from the router's build to the node's, which may be another one during an upgrade. An option that
    the sender does not know has its default. One that the receiver does not know is left out where the sender has the
    default; ``check_known`` refuses others.
    """

    _unknown: tuple[str, ...] = ()  # options that the sender has chosen and this build does not have

    model: Annotated[str, Group("Model")] = "smollm2-135m-instruct"
    """Model to serve: a name that `paceline pull` knows, a folder with safetensors and config.json, a GGUF file, or a
    hub id, `owner/name@COMMIT` where it is not to change."""

    dtype: DtypeName = "bf16"
    """Number format of weights, activations and KV cache. `fp32` takes twice the memory."""

    quantize: QuantizeName = "none"
    """Rounds the weights of linear layers when they are loaded: `w8` to 8 bits, `w4` to 4. `a8` multiplies integers,
    `a16` numbers of `dtype`. `none` takes the checkpoint as it is."""

    kv_dtype: KvDtypeName = "auto"
    """Number format of the KV cache. `auto` keeps it in `dtype`; `int8` keeps codes with a scale per token and head,
    which takes about half of bf16's memory and hand-off. For CPUs."""

    device: str = Field(default="cpu", pattern=r"^(cpu|cuda(:\d{1,3})?)$")
    """Where nodes compute: `cpu`, `cuda` (each rank has a GPU of its own) or `cuda:N`, which nodes of a host share."""

    tp: int = Field(default=1, ge=1, le=64)
    """Ranks of one node: processes of one host that each hold a part of every layer. The text is the same for every
    number. Raise it where a model does not fit one device."""

    attention_dp: int = Field(default=1, ge=1, le=64)
    """Pools among which a node deals its sequences: 1, or one on each rank of `tp`, which then attends its own
    sequences. The node holds `tp` times the KV tokens. For latent attention (MLA), on CPUs."""

    rank_sums: Literal["auto", "sockets", "collective"] = "auto"
    """How ranks of a node put parts together: `sockets` through the host, `collective` by torch.distributed (NCCL on
    GPUs, gloo on CPUs). `auto` takes sockets on CPUs. No bit depends on it."""

    attention: Literal["auto", "flashinfer", "triton", "torch"] = "auto"
    """Attention kernels. `auto` takes FlashInfer on GPUs where it is installed, else Paceline's own: `triton` on GPUs,
    also for sliding windows and sinks. `torch` runs everywhere and is slow."""

    bits: Literal["fast", "exact"] = "fast"
    """On GPUs, `exact` takes products and attention whose bits do not depend on the batch: no draft, chunk or other
    request changes a logit. It decodes some percent slower. CPUs are always exact."""

    cuda_graphs: bool = True
    """On GPUs, capture decode rounds as CUDA graphs at start. Turn it off to start sooner or to save GPU memory."""

    graph_memory_mib: int = Field(default=4096, ge=0)
    """GPU memory that CUDA graphs may take, in MiB. Batch sizes whose graph does not fit run without one."""

    drafter: Annotated[DrafterName, Group("Speculation")] = "default"
    """Who proposes draft tokens. `default` is `auto` for a model with draft heads, else `ngram`. `auto` drafts what
    pays in each round: with heads, by copying, or not. `none` turns speculation off."""

    drafters: str = ""
    """Further drafters that a request may name, separated by commas: any of `none`, `ngram`, `suffix`, `trie`,
    `lookahead`. Empty adds none."""

    drafter_path: str = ""
    """Folder with draft heads, or with the draft model for drafter `draft_model`. Empty takes the heads that ship for
    the model."""

    mtp_modules: int = Field(default=1, ge=1, le=8)
    """MTP modules to draft with, unless `drafter_path` or the model brings its own. One is reused at every depth; more
    are chained, one per depth."""

    num_draft_tokens: int = Field(default=4, ge=0, le=64)
    """K, how many tokens ahead a round drafts at most. 0 decodes plainly. Raise it where most drafts are accepted.
    `auto` has 8 where none is given."""

    tree: TreeKind = TreeKind.CHAIN
    """Shape of a draft. `chain` has one candidate per position, `static` a fixed tree, `dynamic` grows where the draft
    is confident."""

    tree_width: int = Field(default=4, ge=1, le=16)
    """Candidates per expanded node of a static or dynamic tree. A chain ignores it."""

    tree_nodes: int = Field(default=0, ge=0, le=256)
    """Draft tokens of one tree at most. 0 chooses by depth and width, up to 16. Each costs one row of the target's
    forward."""

    expand_above: float = Field(default=0.0, ge=0.0, le=1.0)
    """For dynamic trees: expand every node whose path is at least this probable. 0 expands the `tree_width` best nodes
    of each level."""

    draft_sampling: Literal["coupled", "greedy", "sampled"] = "coupled"
    """How drafts are drawn when temperature > 0. `coupled` shares the target's random numbers, `greedy` takes the
    likeliest, `sampled` draws independently."""

    acceptance: Literal["sample", "rejection", "recursive", "typical"] = "sample"
    """When a draft token is accepted. `sample` keeps plain decoding's very tokens; `rejection` and `recursive` keep its
    distribution; `typical` is lossy."""

    adaptive: Literal["off", "window", "goodput"] = "off"
    """Adapts the draft length. `window` follows recent acceptance; `goodput` maximises measured tokens per second and
    may stop drafting; `off` keeps K."""

    min_confidence: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Ends a draft where its best candidate is less likely than this. 0 never ends one early."""

    head_check: bool = True
    """Measures at start, for at most 2 s, how often draft heads are right and what drafting takes. Warns when they
    do not fit the model, or slow this host down."""

    page_size: Annotated[int, Group("KV cache and scheduling")] = Field(default=16, ge=1, le=1024)
    """Tokens per page of the KV cache. The prefix cache keeps whole pages."""

    kv_cache_tokens: int = Field(default=32768, ge=64)
    """Tokens that the KV cache of one node holds, or of each of its ranks with `attention_dp`. Raise it when requests
    wait for pages; its memory is reserved at start."""

    max_model_len: int = Field(default=0, ge=0)
    """Longest prompt and output together, in tokens. 0 takes what the model was trained for."""

    prefill_chunk_tokens: int = Field(default=0, ge=0)
    """Prompt tokens computed in one step. Smaller chunks delay running streams less; larger ones prefill faster. 0
    takes 256 on CPUs and 2048 on GPUs."""

    max_running: int = Field(default=32, ge=1)
    """Sequences that one node works on together. More give a higher throughput and slower single streams."""

    max_waiting: int = Field(default=256, ge=1)
    """Sequences that may wait on one node for pages. When the line is full the node refuses, and the router tries
    another."""

    prefix_cache: bool = True
    """Keeps the KV of finished requests, at most half of the pages, so that prompts that begin alike are not computed
    again."""

    transport: Annotated[TransportName, Group("Hand-off")] = "gloo"
    """What carries KV from prefill to decode nodes: `gloo` for CPUs or any network, `nccl` between GPUs."""

    handoff: Literal["draft_kv", "hidden_states", "none"] = "draft_kv"
    """What crosses for the drafter besides the target's KV: its own KV, hidden rows for decode to compute that from, or
    nothing."""

    handoff_rows: Literal["fused", "raw"] = "fused"
    """With handoff `hidden_states` and drafter `eagle3`: `fused` rows are a third as large; with `raw` ones prefill
    nodes need no draft weights."""

    handoff_dtype_cast: bool = False
    """Lets an fp32 prefill node hand over to a bf16 decode node by rounding its KV. Set it on both sides."""

    handoff_checksum: bool = False
    """Sends a CRC-32 with every hand-off message, which decode checks before it uses the bytes. Needs transport
    `gloo`."""

    rank_links: Literal["auto", "direct", "through-0"] = "auto"
    """How rows of several ranks cross: `direct` from rank to rank, or `through-0`, by way of each node's first one.
    `auto` is direct where both sides' ranks share sequences on CPUs."""

    reserve_deadline_s: float = Field(default=120.0, gt=0)
    """Seconds that a request may wait on a node for pages, and a reserved one for the first byte of its KV."""

    handoff_deadline_s: float = Field(default=120.0, gt=0)
    """Seconds from the first to the last byte of one hand-off. A later one fails and the request is tried elsewhere."""

    transfer_timeout_s: float = Field(default=5.0, gt=0)
    """Seconds that one message between two nodes may take before their link is given up and opened anew."""

    log_level: Annotated[LogLevel, Group("Logs and traces")] = "warning"
    """Least severe messages to log, by the router and all nodes. `debug` adds a line for every draft-verify round."""

    log_format: LogFormat = "text"
    """`text` is for reading. `json` writes one object a line: time, level, logger, node, message, exception."""

    trace_requests: int = Field(default=256, ge=0, le=65536)
    """Latest sequences whose timeline each process keeps for `paceline trace`. 0 keeps none."""

    @field_validator("adaptive", "journal_mode", mode="before", check_fields=False)
    @classmethod
    def _yaml_off(cls, value: object) -> object:
        """YAML reads a bare ``off`` as false."""
        return "off" if value is False else value

    @field_validator("drafters")
    @classmethod
    def _known(cls, value: str) -> str:
        unknown = [name for name in names_of(value) if not is_weightless(name)]
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
        if self.kv_dtype == "int8":
            self._check_int8()
        if self.handoff_checksum and needs_cuda(self.transport):
            raise ValueError(
                f"handoff_checksum sums bytes in host memory, where transport {self.transport!r} never has them: set "
                "transport to gloo, or handoff_checksum to false"
            )
        if self.rank_links == "direct" and (self.device != "cpu" or self.attention_dp > 1):
            raise ValueError(
                "rank_links 'direct' is for CPUs whose ranks share their sequences, and device is "
                f"{self.device!r} and attention_dp {self.attention_dp}: set rank_links to auto"
            )
        if self.exact_on_gpu and self.attention in ("flashinfer", "torch"):
            raise ValueError(
                f"attention {self.attention!r} has bits that depend on the batch on a GPU: set attention to auto or "
                "triton, or bits to fast"
            )
        return self

    def _check_int8(self) -> None:
        if self.device != "cpu":
            raise ValueError(f"kv_dtype 'int8' is for CPUs: set device {self.device!r} to cpu, or kv_dtype to auto")
        if self.handoff_dtype_cast:
            raise ValueError("kv_dtype 'int8' cannot be cast: set handoff_dtype_cast to false, or kv_dtype to auto")

    @property
    def chosen(self) -> list[str]:
        """Options that have another value than this build's default."""
        fields = type(self).model_fields.items()
        return [name for name, field in fields if getattr(self, name) != _default_of(field)]

    def __getstate__(self) -> dict[Any, Any]:
        return super().__getstate__() | {"chosen": self.chosen}

    def __setstate__(self, state: dict[Any, Any]) -> None:
        fields, sent = type(self).model_fields, state["__dict__"]
        chosen = state.get("chosen", sent)  # a build that does not say which may have chosen all
        unknown = tuple(name for name in sent if name not in fields and name in chosen)
        options = {name: sent[name] if name in sent else _default_of(field) for name, field in fields.items()}
        super().__setstate__(state | {"__dict__": options, "__pydantic_private__": {"_unknown": unknown}})

    def check_known(self) -> None:
        """Raises ConfigError where the build that sent these options has chosen one that this build does not have."""
        if self._unknown:
            raise ConfigError(self._unknown[0], "the build of Paceline on this host does not know this option")

    @property
    def on_gpu(self) -> bool:
        """Whether it computes on one."""
        return self.device.startswith("cuda")

    @property
    def exact_on_gpu(self) -> bool:
        """Whether kernels are chosen for their bits; on a CPU there is no choice."""
        return self.bits == "exact" and self.on_gpu

    @property
    def chunk_tokens(self) -> int:
        """``prefill_chunk_tokens``, or the device's own."""
        return self.prefill_chunk_tokens or CHUNK_TOKENS[kind_of(self.device)]

    @property
    def attention_wanted(self) -> str:
        """``attention``, for ``attention_for``; with exact bits on a GPU the one backend that has them."""
        return "triton" if self.exact_on_gpu else self.attention

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
        return tuple(dict.fromkeys((self.drafter, *names_of(self.drafters))))


def _default_of(field: FieldInfo) -> Any:
    return field.get_default(call_default_factory=True)


def choices_of(field: FieldInfo) -> tuple[str, ...]:
    """The words that an option takes; empty where it takes more than some words."""
    kind, extra = field.annotation, field.json_schema_extra
    if get_origin(kind) is Literal:
        return get_args(kind)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return tuple(member.value for member in kind)
    words = extra.get("enum") if isinstance(extra, dict) else None
    return tuple(map(str, words)) if isinstance(words, list) else ()


def names_of(listed: str) -> list[str]:
    """The names in a text that separates them by commas."""
    return [name for item in listed.split(",") if (name := item.strip())]
