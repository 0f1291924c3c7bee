"""What comes back: plain frozen data that the router fills and the client SDK hands out. Fields are those of
inference.proto; no protobuf and no torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline.request import FinishReason, TokenLogprobs


@dataclass(frozen=True)
class Usage:
    """Tokens of one choice."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0  # tokens of the prompt that were found in a prefix cache


@dataclass(frozen=True)
class Round:
    """One draft-verify round: tokens committed are ``num_accepted`` plus one."""

    num_draft_tokens: int
    num_accepted: int
    depth: int = 0  # depth of the tree
    drafter: str = ""  # who drafted
    draft_s: float = 0.0  # seconds of the whole batch's round
    verify_s: float = 0.0


@dataclass(frozen=True)
class SpeculationStats:
    """What the rounds of one choice drafted and had accepted."""

    rounds: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    acceptance_length: float = 0.0  # tokens committed per round, the bonus counted; 0 before the first round
    accepted_per_position: tuple[int, ...] = ()
    drafted_per_position: tuple[int, ...] = ()
    accepted_per_round: tuple[int, ...] = ()
    rounds_by_drafter: Mapping[str, int] = field(default_factory=dict)
    draft_s: float = 0.0  # seconds of the rounds that this choice took part in
    verify_s: float = 0.0
    lossless: bool = True  # False: the deployment's acceptance rule is lossy (typical)


@dataclass(frozen=True)
class Timing:
    """Seconds, measured by the router."""

    ttft_s: float = 0.0  # arrival of the request to its first token
    e2e_s: float = 0.0
    decode_tokens_per_s: float = 0.0  # tokens after the first over the time they took


@dataclass(frozen=True)
class HandoffBytes:
    """Bytes that crossed from prefill to decode."""

    target_kv: int = 0
    draft_kv: int = 0
    hidden: int = 0
    meta: int = 0


@dataclass(frozen=True)
class ServedBy:
    """Ids of the last pair. ``prefill == decode``: the decode node computed the prompt itself."""

    prefill: str = ""
    decode: str = ""


@dataclass(frozen=True)
class Completion:
    """How one choice ended."""

    finish_reason: FinishReason
    usage: Usage = Usage()
    speculation: SpeculationStats = SpeculationStats()
    timing: Timing = Timing()
    nodes: ServedBy = ServedBy()
    handoff: HandoffBytes = HandoffBytes()
    seed: int = 0  # the choice's own: the same request with it and n=1 gives this choice again
    request_id: str = ""


@dataclass(frozen=True)
class Chunk:
    """What became known of one choice. ``completion`` is set on its last chunk, which may bring no token."""

    choice: int
    first_index: int  # index of token_ids[0] among the tokens of the choice
    token_ids: tuple[int, ...] = ()
    text: str = ""  # text that became certain; empty while a character or a stop string is incomplete
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token when asked for
    round: Round | None = None
    completion: Completion | None = None


@dataclass(frozen=True)
class Choice:
    """One complete choice."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    completion: Completion


@dataclass(frozen=True)
class Generation:
    """A complete answer; ``text``, ``token_ids`` and ``completion`` are those of the first choice."""

    request_id: str
    model: str
    choices: tuple[Choice, ...]

    @property
    def text(self) -> str:
        """Text of the first choice."""
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Tokens of the first choice."""
        return self.choices[0].token_ids

    @property
    def completion(self) -> Completion:
        """How the first choice ended."""
        return self.choices[0].completion


@dataclass(frozen=True)
class Tokenization:
    """Tokens of a text or a chat."""

    token_ids: tuple[int, ...]
    max_model_len: int


@dataclass(frozen=True)
class NodeInfo:
    """One node as the router sees it."""

    id: str
    role: str
    address: str
    running: int = 0
    waiting: int = 0
    free_pages: int = 0
    total_pages: int = 0


@dataclass(frozen=True)
class ModelInfo:
    """What is served and how."""

    model: str
    dtype: str
    max_model_len: int
    vocab_size: int
    drafter: str
    num_draft_tokens: int
    bit_exact: bool  # whether the start-up probe found the kernels bit-exact across batch, chunk and tree
    nodes: tuple[NodeInfo, ...] = field(default=())
    drafters: tuple[str, ...] = ()  # what a request may name as its drafter
    tree: str = "chain"
    acceptance: str = "sample"  # every rule but typical is lossless


@dataclass(frozen=True)
class TraceEvent:
    """Something that happened to a sequence on a node: a span, or a moment when it has no end. Times are Unix time."""

    node: str
    track: str  # which part of the node: request, choice, prefill, send, decode, receive
    sequence: str  # request id; with several choices, ``#`` and the choice's number follow
    attempt: int  # 1 for the first time that this node served the sequence
    name: str
    start_s: float
    end_s: float | None = None
    attributes: Mapping[str, str | float] = field(default_factory=dict)


@dataclass(frozen=True)
class RequestTrace:
    """Everything that is known of when what happened to a request."""

    request_id: str
    events: tuple[TraceEvent, ...] = ()  # by start
    silent: tuple[str, ...] = ()  # nodes that did not answer in time
    dropped: int = 0  # events beyond what a node keeps of one sequence
