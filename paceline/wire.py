"""Messages to data and back. No torch here, since clients import it; no gRPC, since engines do (``wire_errors``)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from paceline.errors import InvalidRequest, PacelineError, quoted
from paceline.request import (
    FinishReason,
    Grammar,
    GrammarKind,
    SamplingParams,
    SequenceRequest,
    SpeculationParams,
    TokenLogprobs,
)
from paceline.results import RequestTrace, Round, ToolCall, ToolCallPart, TraceEvent
from paceline.speculation import TreeKind
from paceline.v1 import common_pb2, inference_pb2, node_pb2, trace_pb2

PROMPT_LOGPROBS_A_MESSAGE = 256  # at most 53 KB: an entry with 20 alternatives is up to 210 bytes

_FINISH: dict[FinishReason | None, common_pb2.FinishReason.ValueType] = {
    None: common_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: common_pb2.FINISH_REASON_ABORT,
    FinishReason.TOOL_CALLS: common_pb2.FINISH_REASON_TOOL_CALLS,
}
_FINISH_BACK = {value: reason for reason, value in _FINISH.items()}

_GRAMMARS: dict[GrammarKind, common_pb2.GrammarKind.ValueType] = {
    GrammarKind.JSON_SCHEMA: common_pb2.GRAMMAR_KIND_JSON_SCHEMA,
    GrammarKind.JSON_OBJECT: common_pb2.GRAMMAR_KIND_JSON_OBJECT,
    GrammarKind.REGEX: common_pb2.GRAMMAR_KIND_REGEX,
    GrammarKind.EBNF: common_pb2.GRAMMAR_KIND_EBNF,
    GrammarKind.CHOICE: common_pb2.GRAMMAR_KIND_CHOICE,
}
_GRAMMARS_BACK = {value: kind for kind, value in _GRAMMARS.items()}

_OPTIONAL = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "max_tokens",
    "min_tokens",
    "top_logprobs",
    "prompt_logprobs",
    "skip_special_tokens",
    "n",
)


def finish_reason_to_proto(reason: FinishReason | None) -> common_pb2.FinishReason.ValueType:
    """None is UNSPECIFIED: not finished."""
    return _FINISH[reason]


def finish_reason_from_proto(value: common_pb2.FinishReason.ValueType) -> FinishReason | None:
    """UNSPECIFIED is None: not finished. PacelineError for a value that is not known here."""
    if value not in _FINISH_BACK:
        raise PacelineError(f"finish reason {value} is not known here")
    return _FINISH_BACK[value]


def logprobs_to_proto(logprobs: TokenLogprobs) -> common_pb2.TokenLogprobs:
    """Log-probabilities of one token."""
    return common_pb2.TokenLogprobs(
        logprob=logprobs.logprob, top_ids=logprobs.top_ids, top_logprobs=logprobs.top_logprobs
    )


def logprobs_from_proto(message: common_pb2.TokenLogprobs) -> TokenLogprobs:
    """Log-probabilities of one token."""
    return TokenLogprobs(message.logprob, tuple(message.top_ids), tuple(message.top_logprobs))


def prompt_logprobs_to_proto(first_position: int, logprobs: Sequence[TokenLogprobs]) -> list[node_pb2.PromptLogprobs]:
    """Those of a prompt's tokens from ``first_position`` on, in as many messages as their bounded size takes."""
    starts = range(0, len(logprobs), PROMPT_LOGPROBS_A_MESSAGE)
    return [
        node_pb2.PromptLogprobs(
            first_position=first_position + start,
            logprobs=[logprobs_to_proto(entry) for entry in logprobs[start : start + PROMPT_LOGPROBS_A_MESSAGE]],
        )
        for start in starts
    ]


def grammar_to_proto(grammar: Grammar | None) -> common_pb2.Grammar | None:
    """None stays unset."""
    return None if grammar is None else common_pb2.Grammar(kind=_GRAMMARS[grammar.kind], source=grammar.source)


def grammar_from_proto(message: common_pb2.Grammar) -> Grammar:
    """InvalidRequest for a kind that is not known here."""
    if message.kind not in _GRAMMARS_BACK:
        raise InvalidRequest("grammar.kind", f"must be one of {', '.join(GrammarKind)}")
    return Grammar(_GRAMMARS_BACK[message.kind], message.source)


def sampling_from_proto(message: common_pb2.SamplingParams) -> SamplingParams:
    """Unset fields take the defaults of SamplingParams. Nothing is validated here but the kind of a grammar."""
    given = {name: getattr(message, name) for name in _OPTIONAL if message.HasField(name)}  # type: ignore[arg-type]
    return SamplingParams(
        **given,
        logit_bias=dict(message.logit_bias),
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        include_stop_str_in_output=message.include_stop_str_in_output,
        bad_words=tuple(message.bad_words),
        bad_token_ids=tuple(tuple(sequence.ids) for sequence in message.bad_token_ids),
        grammar=grammar_from_proto(message.grammar) if message.HasField("grammar") else None,
    )


def sampling_to_proto(params: SamplingParams) -> common_pb2.SamplingParams:
    """Every field that is not None is set."""
    given = {name: value for name in _OPTIONAL if (value := getattr(params, name)) is not None}
    return common_pb2.SamplingParams(
        **given,
        logit_bias=dict(params.logit_bias),
        stop=params.stop,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        include_stop_str_in_output=params.include_stop_str_in_output,
        bad_words=params.bad_words,
        bad_token_ids=[common_pb2.TokenSequence(ids=ids) for ids in params.bad_token_ids],
        grammar=grammar_to_proto(params.grammar),
    )


def speculation_from_proto(message: common_pb2.Speculation) -> SpeculationParams:
    """Unset fields keep the deployment's values. Raises InvalidRequest on negative ones."""
    depth = message.num_draft_tokens if message.HasField("num_draft_tokens") else None
    width = message.tree_width if message.HasField("tree_width") else None
    drafter = message.drafter if message.HasField("drafter") else None
    tree = message.tree if message.HasField("tree") else None
    if depth is not None and depth < 0:
        raise InvalidRequest("speculation.num_draft_tokens", f"must not be negative, got {depth}")
    if width is not None and width < 1:
        raise InvalidRequest("speculation.tree_width", f"must be at least 1, got {width}")
    if tree is not None and tree not in list(TreeKind):
        raise InvalidRequest("speculation.tree", f"must be one of {', '.join(TreeKind)}, got {quoted(tree)}")
    return SpeculationParams(depth, width, drafter, tree, message.prediction, tuple(message.prediction_token_ids))


def speculation_to_proto(params: SpeculationParams) -> common_pb2.Speculation:
    """None stays unset."""
    return common_pb2.Speculation(
        num_draft_tokens=params.num_draft_tokens,
        tree_width=params.tree_width,
        drafter=params.drafter,
        tree=params.tree,
        prediction=params.prediction,
        prediction_token_ids=params.prediction_token_ids,
    )


def round_to_proto(round_: Round) -> common_pb2.Round:
    """One round."""
    return common_pb2.Round(**vars(round_))


def round_from_proto(message: common_pb2.Round) -> Round:
    """One round."""
    return Round(
        message.num_draft_tokens,
        message.num_accepted,
        message.depth,
        message.drafter,
        message.draft_s,
        message.verify_s,
    )


def tool_call_to_proto(call: ToolCall) -> inference_pb2.ToolCall:
    """A whole call."""
    return inference_pb2.ToolCall(id=call.id, name=call.name, arguments=call.arguments)


def tool_call_from_proto(message: inference_pb2.ToolCall) -> ToolCall:
    """A whole call."""
    return ToolCall(message.id, message.name, message.arguments)


def tool_call_part_to_proto(part: ToolCallPart) -> inference_pb2.ToolCallPart:
    """A piece of a call."""
    return inference_pb2.ToolCallPart(index=part.index, id=part.id, name=part.name, arguments=part.arguments)


def tool_call_part_from_proto(message: inference_pb2.ToolCallPart) -> ToolCallPart:
    """A piece of a call."""
    return ToolCallPart(message.index, message.id, message.name, message.arguments)


def sequence_from_proto(message: node_pb2.SequenceRequest) -> SequenceRequest:
    """One sequence as a node sees it."""
    return SequenceRequest(
        request_id=message.request_id,
        prompt_token_ids=tuple(message.prompt_token_ids),
        params=sampling_from_proto(message.sampling),
        output_token_ids=tuple(message.output_token_ids),
        speculation=speculation_from_proto(message.speculation),
        cache_salt=message.cache_salt,
    )


def sequence_to_proto(request: SequenceRequest) -> node_pb2.SequenceRequest:
    """One sequence as a node sees it."""
    return node_pb2.SequenceRequest(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        output_token_ids=request.output_token_ids,
        sampling=sampling_to_proto(request.params),
        speculation=speculation_to_proto(request.speculation),
        cache_salt=request.cache_salt,
    )


def sequence_digest(message: node_pb2.SequenceRequest) -> bytes:
    """Names everything that the tokens of a sequence depend on, 32 bytes."""
    named = node_pb2.SequenceRequest()
    named.CopyFrom(message)
    named.ClearField("request_id")
    named.ClearField("output_token_ids")
    return hashlib.sha256(named.SerializeToString(deterministic=True)).digest()


def trace_to_proto(trace: RequestTrace) -> trace_pb2.TraceResponse:
    """What is kept of one request."""
    message = trace_pb2.TraceResponse(silent=trace.silent, dropped=trace.dropped)
    for event in trace.events:
        written = message.events.add(
            node=event.node,
            track=event.track,
            sequence=event.sequence,
            attempt=event.attempt,
            name=event.name,
            start_s=event.start_s,
            end_s=event.end_s,
        )
        numbers, texts = written.numbers, written.texts  # their own ``update`` takes four times as long
        for name, value in event.attributes.items():
            if isinstance(value, str):
                texts[name] = value
            else:
                numbers[name] = value
    return message


def trace_from_proto(request_id: str, message: trace_pb2.TraceResponse) -> RequestTrace:
    """What is kept of one request."""
    events = tuple(
        TraceEvent(
            node=event.node,
            track=event.track,
            sequence=event.sequence,
            attempt=event.attempt,
            name=event.name,
            start_s=event.start_s,
            end_s=event.end_s if event.HasField("end_s") else None,
            attributes={**event.numbers, **event.texts},
        )
        for event in message.events
    )
    return RequestTrace(request_id, events, tuple(message.silent), message.dropped)
