"""What comes back: plain frozen data that the router fills and the client SDK hands out. Fields are those of
inference.proto; no protobuf and no torch here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, TypeVar

from paceline.errors import IncompleteAnswer
from paceline.request import FinishReason, TokenLogprobs


@dataclass(frozen=True)
class Usage:
    """Tokens of one choice."""

    prompt_tokens: int = 0  # tokens of the prompt
    completion_tokens: int = 0  # tokens that were generated
    cached_tokens: int = 0  # tokens of the prompt that were found in a prefix cache
    reasoning_tokens: int = 0  # of the generated ones: those of the reasoning, its markers counted


@dataclass(frozen=True)
class Round:
    """One draft-verify round: tokens committed are ``num_accepted`` plus one."""

    num_draft_tokens: int  # nodes drafted, root not counted
    num_accepted: int  # length of the accepted path
    depth: int = 0  # depth of the tree
    drafter: str = ""  # who drafted
    draft_s: float = 0.0  # seconds of the whole batch's round that went to drafting
    verify_s: float = 0.0  # seconds of the target's forward and the acceptance


@dataclass(frozen=True)
class SpeculationStats:
    """What the rounds of one choice drafted and had accepted."""

    rounds: int = 0  # draft-verify rounds
    draft_tokens: int = 0  # tokens drafted, over all rounds
    accepted_tokens: int = 0  # draft tokens accepted, over all rounds
    acceptance_length: float = 0.0  # tokens committed per round, the bonus counted; 0 before the first round
    accepted_per_position: tuple[int, ...] = ()  # rounds that accepted the draft token at this depth, by depth
    drafted_per_position: tuple[int, ...] = ()  # rounds that drafted a token at this depth, by depth
    accepted_per_round: tuple[int, ...] = ()  # accepted path length of every round, in order
    rounds_by_drafter: Mapping[str, int] = field(default_factory=dict)  # rounds by who drafted
    draft_s: float = 0.0  # seconds of drafting in the rounds that this choice took part in
    verify_s: float = 0.0  # seconds of verification by the target in those rounds
    lossless: bool = True  # False: the deployment's acceptance rule is lossy (typical)
    predicted_tokens: int = 0  # of draft_tokens: those of the request's prediction
    accepted_predicted_tokens: int = 0  # of accepted_tokens: those of the request's prediction


@dataclass(frozen=True)
class Timing:
    """Seconds, measured by the router."""

    ttft_s: float = 0.0  # from the arrival of the request to its first token
    e2e_s: float = 0.0  # from the arrival of the request to the end
    decode_tokens_per_s: float = 0.0  # tokens after the first over the time they took


@dataclass(frozen=True)
class HandoffBytes:
    """Bytes that crossed from prefill to decode."""

    target_kv: int = 0  # KV of the target model
    draft_kv: int = 0  # KV of the drafter
    hidden: int = 0  # hidden rows that the drafter reads
    meta: int = 0  # everything else


@dataclass(frozen=True)
class ServedBy:
    """Ids of the last pair. ``prefill == decode``: the decode node computed the prompt itself. No ``decode``: nothing
    was left to decode."""

    prefill: str = ""  # id of the prefill node
    decode: str = ""  # id of the decode node


@dataclass(frozen=True)
class Completion:
    """How one choice ended."""

    finish_reason: FinishReason  # why it ended
    usage: Usage = Usage()  # its tokens
    speculation: SpeculationStats = SpeculationStats()  # what was drafted and accepted
    timing: Timing = Timing()  # how long it took
    nodes: ServedBy = ServedBy()  # who served it
    handoff: HandoffBytes = HandoffBytes()  # what crossed between them
    seed: int = 0  # the choice's own: the same request with it and n=1 gives this choice again
    request_id: str = ""  # the request's id, for logs and traces
    stop_string: str = ""  # the stop string that ended it; empty when something else did


class JsonModel(Protocol):
    """A pydantic model (version 2), or any class with these two of its methods."""

    @classmethod
    def model_json_schema(cls) -> dict[str, Any]:
        """The JSON Schema of its JSON."""

    @classmethod
    def model_validate_json(cls, json_data: str, /) -> Self:
        """The object that ``json_data`` describes."""


Model = TypeVar("Model", bound=JsonModel)


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool, made by the model."""

    id: str  # names the call, for the turn that answers it
    name: str  # the tool
    arguments: str  # its arguments, a JSON object as text


@dataclass(frozen=True)
class ToolCallPart:
    """A part of a tool call. The first one of a call has id and name; all arguments together are the call's."""

    index: int  # which call of the choice
    id: str = ""  # the call's id; empty after the first part
    name: str = ""  # the tool; empty after the first part
    arguments: str = ""  # the next piece of the arguments


def joined(parts: Iterable[ToolCallPart]) -> tuple[ToolCall, ...]:
    """The calls that ``parts`` of a choice make, in the order of their index."""
    pieces: dict[int, list[ToolCallPart]] = {}
    for part in parts:
        pieces.setdefault(part.index, []).append(part)
    return tuple(
        ToolCall(some[0].id, some[0].name, "".join(part.arguments for part in some))
        for _, some in sorted(pieces.items())
    )


@dataclass(frozen=True)
class Chunk:
    """What became known of one choice. ``completion`` is set on its last chunk, which may bring no token."""

    choice: int  # which of the n choices
    first_index: int  # index of token_ids[0] among the tokens of the choice
    token_ids: tuple[int, ...] = ()  # new tokens, in order
    text: str = ""  # text that became certain; empty while a character or a stop string is incomplete
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token when asked for
    round: Round | None = None  # that brought the tokens; None for the first token, and for several rounds at once
    completion: Completion | None = None  # how the choice ended; None before its last chunk
    reasoning: str = ""  # what the model thought, as far as it became certain; it is not part of text
    tool_calls: tuple[ToolCallPart, ...] = ()  # parts of tool calls that became certain; they are not part of text
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # the prompt's next ones, from its second token on, when asked for
    retold: bool = False  # the client of a stream that was resumed has it already; no SDK gives such a chunk
    in_order: tuple[Chunk, ...] = ()  # this one cut where its text and calls take turns; no SDK gives it


@dataclass(frozen=True)
class Choice:
    """One complete choice."""

    index: int  # which of the n choices
    text: str  # the whole text, without the stop text that ended it
    token_ids: tuple[int, ...]  # all tokens, stop token included
    logprobs: tuple[TokenLogprobs, ...]  # one per token when asked for
    completion: Completion  # how it ended
    reasoning: str = ""  # what the model thought; it is not part of text
    tool_calls: tuple[ToolCall, ...] = ()  # the tools that it called; they are not part of text
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of the prompt, from its second token on, when asked for

    @property
    def message(self) -> dict[str, Any]:
        """The choice as a turn of the chat, to be put behind the messages that it answers."""
        turn: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.tool_calls:
            turn["tool_calls"] = list(self.tool_calls)
        if self.reasoning:
            turn["reasoning"] = self.reasoning
        return turn

    def parsed(self, model: type[Model]) -> Model:
        """The object that the text describes, where ``response_format`` was this model.

        model: a pydantic model. Raises IncompleteAnswer when the choice did not end by itself, and what the model
        raises for a text that it refuses (pydantic's ``ValidationError``).
        """
        reason = self.completion.finish_reason
        if reason is not FinishReason.STOP:
            raise IncompleteAnswer(self.text, reason)
        return model.model_validate_json(self.text)


def choices_of(chunks: Iterable[Chunk]) -> tuple[Choice, ...]:
    """The choices that all chunks of a stream make, by index. ValueError when one of them has no end."""
    by_index: dict[int, list[Chunk]] = {}
    for chunk in chunks:
        by_index.setdefault(chunk.choice, []).append(chunk)
    return tuple(_choice_of(index, by_index[index]) for index in sorted(by_index))


def _choice_of(index: int, chunks: list[Chunk]) -> Choice:
    completion = chunks[-1].completion
    if completion is None:
        raise ValueError(f"choice {index} has not ended: its last chunk is missing")
    return Choice(
        index,
        "".join(chunk.text for chunk in chunks),
        tuple(token_id for chunk in chunks for token_id in chunk.token_ids),
        tuple(entry for chunk in chunks for entry in chunk.logprobs),
        completion,
        "".join(chunk.reasoning for chunk in chunks),
        joined(part for chunk in chunks for part in chunk.tool_calls),
        tuple(entry for chunk in chunks for entry in chunk.prompt_logprobs),
    )


@dataclass(frozen=True)
class Generation:
    """A complete answer. What it says of itself besides ``choices`` is that of the first choice."""

    request_id: str  # the request's id, for logs and traces
    model: str  # the model that is served
    choices: tuple[Choice, ...]  # all n choices, by index

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

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The tools that the first choice called."""
        return self.choices[0].tool_calls

    @property
    def message(self) -> dict[str, Any]:
        """The first choice as a turn of the chat, to be put behind the messages that it answers."""
        return self.choices[0].message

    def parsed(self, model: type[Model]) -> Model:
        """The object that the first choice describes, as Choice.parsed gives it.

        model: the pydantic model that was the ``response_format``.
        """
        return self.choices[0].parsed(model)


@dataclass(frozen=True)
class Tokenization:
    """Tokens of a text or a chat."""

    token_ids: tuple[int, ...]  # as a prompt has them, special tokens included
    max_model_len: int  # tokens of prompt and output that the model takes together


@dataclass(frozen=True)
class NodeInfo:
    """One node as the router sees it."""

    id: str  # its name, e.g. decode-0
    role: str  # the role, prefill or decode
    address: str  # HOST:PORT of its gRPC
    running: int = 0  # sequences that it works on
    waiting: int = 0  # sequences that wait there
    free_pages: int = 0  # KV pages that are free
    total_pages: int = 0  # KV pages that it has


@dataclass(frozen=True)
class TextSource:
    """What the text depends on besides the request."""

    bit_exact: bool = False  # whether the start-up probe found the kernels bit-exact across batch, chunk and tree
    fingerprint: str = ""  # names all of it: model, weights, number format, kernels, acceptance rule
    weights: str = ""  # digest of the model's weights
    kernels: str = ""  # kernel set and instruction set


@dataclass(frozen=True)
class ModelInfo:
    """What is served and how."""

    model: str  # the model's name in answers, which requests may give
    dtype: str  # number format of weights and KV, bf16 or fp32
    max_model_len: int  # tokens of prompt and output that the model takes together
    vocab_size: int  # token ids are below it
    drafter: str  # the deployment's own drafter
    num_draft_tokens: int  # draft tokens on a path (K); a request may ask for fewer
    bit_exact: bool  # whether the start-up probe found the kernels bit-exact across batch, chunk and tree
    nodes: tuple[NodeInfo, ...] = field(default=())  # the nodes that are alive
    drafters: tuple[str, ...] = ()  # what a request may name as its drafter
    tree: str = "chain"  # shape of its drafts: chain, static or dynamic
    acceptance: str = "sample"  # every rule but typical is lossless
    system_fingerprint: str = ""  # names all that the text depends on besides the request
    weights: str = ""  # digest of the model's weights; empty: the nodes did not tell
    kernels: str = ""  # kernel set and instruction set: bits depend on it
    aliases: tuple[str, ...] = ()  # further names that requests may give the model

    @property
    def names(self) -> tuple[str, ...]:
        """Every name that requests may give the model, that of answers first."""
        return (self.model, *self.aliases)


@dataclass(frozen=True)
class TraceEvent:
    """Something that happened to a sequence on a node: a span, or a moment when it has no end. Times are Unix time."""

    node: str  # id of the node, or router
    track: str  # which part of the node: request, choice, prefill, send, decode, receive
    sequence: str  # request id; with several choices, ``#`` and the choice's number follow
    attempt: int  # 1 for the first time that this node served the sequence
    name: str  # what happened, e.g. chunk or first token
    start_s: float  # when it began
    end_s: float | None = None  # when it ended; None for a moment
    attributes: Mapping[str, str | float] = field(default_factory=dict)  # details by name


@dataclass(frozen=True)
class RequestTrace:
    """Everything that is known of when what happened to a request."""

    request_id: str  # the one that was asked about
    events: tuple[TraceEvent, ...] = ()  # ordered by their start
    silent: tuple[str, ...] = ()  # nodes that did not answer in time
    dropped: int = 0  # events beyond what a node keeps of one sequence
