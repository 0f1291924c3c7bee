"""Messages to data and back, errors to gRPC status and back. No torch here: clients import it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import grpc

from paceline.errors import (
    ConfigError,
    DeadlineExceeded,
    HandoffFailed,
    InvalidRequest,
    NodeUnavailable,
    NotFound,
    Overloaded,
    PacelineError,
    PairingRefused,
    RequestCancelled,
    quoted,
)
from paceline.request import TREES, FinishReason, SamplingParams, SequenceRequest, SpeculationParams, TokenLogprobs
from paceline.results import RequestTrace, Round, TraceEvent
from paceline.v1 import common_pb2, node_pb2, trace_pb2

Metadata = tuple[tuple[str, str], ...]

FIELD_KEY = "paceline-field"
RETRY_AFTER_KEY = "retry-after-ms"
MAX_DETAILS_BYTES = 6 * 1024  # as they travel; gRPC drops a call whose trailing metadata is above 8 to 16 KiB

_FINISH: dict[FinishReason | None, common_pb2.FinishReason.ValueType] = {
    None: common_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: common_pb2.FINISH_REASON_ABORT,
}
_FINISH_BACK = {value: reason for reason, value in _FINISH.items()}

_STATUS: tuple[tuple[type[PacelineError], grpc.StatusCode], ...] = (
    (InvalidRequest, grpc.StatusCode.INVALID_ARGUMENT),
    (ConfigError, grpc.StatusCode.FAILED_PRECONDITION),
    (Overloaded, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (NodeUnavailable, grpc.StatusCode.UNAVAILABLE),
    (PairingRefused, grpc.StatusCode.FAILED_PRECONDITION),
    (NotFound, grpc.StatusCode.NOT_FOUND),
    (HandoffFailed, grpc.StatusCode.ABORTED),
    (RequestCancelled, grpc.StatusCode.CANCELLED),
    (DeadlineExceeded, grpc.StatusCode.DEADLINE_EXCEEDED),
)

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
    "n",
)


def finish_reason_to_proto(reason: FinishReason | None) -> common_pb2.FinishReason.ValueType:
    """None is UNSPECIFIED: not finished."""
    return _FINISH[reason]


def finish_reason_from_proto(value: common_pb2.FinishReason.ValueType) -> FinishReason | None:
    """UNSPECIFIED is None: not finished."""
    return _FINISH_BACK[value]


def logprobs_to_proto(logprobs: TokenLogprobs) -> common_pb2.TokenLogprobs:
    """Log-probabilities of one token."""
    return common_pb2.TokenLogprobs(
        logprob=logprobs.logprob, top_ids=logprobs.top_ids, top_logprobs=logprobs.top_logprobs
    )


def logprobs_from_proto(message: common_pb2.TokenLogprobs) -> TokenLogprobs:
    """Log-probabilities of one token."""
    return TokenLogprobs(message.logprob, tuple(message.top_ids), tuple(message.top_logprobs))


def sampling_from_proto(message: common_pb2.SamplingParams) -> SamplingParams:
    """Unset fields take the defaults of SamplingParams. Nothing is validated here."""
    given = {name: getattr(message, name) for name in _OPTIONAL if message.HasField(name)}  # type: ignore[arg-type]
    return SamplingParams(
        **given,
        logit_bias=dict(message.logit_bias),
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
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
    if tree is not None and tree not in TREES:
        raise InvalidRequest("speculation.tree", f"must be one of {', '.join(TREES)}, got {quoted(tree)}")
    return SpeculationParams(depth, width, drafter, tree)


def speculation_to_proto(params: SpeculationParams) -> common_pb2.Speculation:
    """None stays unset."""
    return common_pb2.Speculation(
        num_draft_tokens=params.num_draft_tokens,
        tree_width=params.tree_width,
        drafter=params.drafter,
        tree=params.tree,
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


def trace_to_proto(trace: RequestTrace) -> trace_pb2.TraceResponse:
    """What is kept of one request."""
    return trace_pb2.TraceResponse(
        events=[_trace_event_to_proto(event) for event in trace.events], silent=trace.silent, dropped=trace.dropped
    )


def _trace_event_to_proto(event: TraceEvent) -> trace_pb2.TraceEvent:
    given = event.attributes
    return trace_pb2.TraceEvent(
        node=event.node,
        track=event.track,
        sequence=event.sequence,
        attempt=event.attempt,
        name=event.name,
        start_s=event.start_s,
        end_s=event.end_s,
        numbers={name: value for name, value in given.items() if not isinstance(value, str)},
        texts={name: value for name, value in given.items() if isinstance(value, str)},
    )


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


def status_for(error: PacelineError) -> tuple[grpc.StatusCode, str]:
    """Status and details that stand for ``error`` on the wire."""
    for kind, code in _STATUS:
        if isinstance(error, kind):
            return code, _clipped(str(error))
    return grpc.StatusCode.INTERNAL, _clipped(str(error))


def _clipped(details: str) -> str:
    """``details`` as far as they fit: every byte but printable ASCII travels as three (``%E2``)."""
    room = MAX_DETAILS_BYTES
    for i, character in enumerate(details):
        room -= 1 if " " <= character <= "~" and character != "%" else 3 * len(character.encode("utf-8", "replace"))
        if room < 0:
            return f"{details[:i]}..."
    return details


def metadata_for(error: PacelineError) -> Metadata:
    """Trailing metadata: the wrong field's name, or when to come back."""
    if isinstance(error, InvalidRequest):
        return ((FIELD_KEY, error.field),)
    if isinstance(error, Overloaded):
        return ((RETRY_AFTER_KEY, str(int(error.retry_after_s * 1000))),)
    return ()


def error_from_status(code: grpc.StatusCode, details: str, metadata: Iterable[Any] = ()) -> PacelineError | None:
    """The error that a status stands for; None when it is none of Paceline's (the connection's own, a bug)."""
    found = {key: value for key, value in metadata if isinstance(value, str)}
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        field = found.get(FIELD_KEY) or details.partition(":")[0]
        return InvalidRequest(field, details.removeprefix(f"{field}: "))
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return Overloaded(details, int(found.get(RETRY_AFTER_KEY, "1000")) / 1000)
    if code is grpc.StatusCode.FAILED_PRECONDITION:
        return PairingRefused.from_text(details)
    simple: dict[grpc.StatusCode, type[PacelineError]] = {
        grpc.StatusCode.UNAVAILABLE: NodeUnavailable,
        grpc.StatusCode.NOT_FOUND: NotFound,
        grpc.StatusCode.ABORTED: HandoffFailed,
        grpc.StatusCode.CANCELLED: RequestCancelled,
        grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    }
    return simple[code](details) if code in simple else None


def error_from_rpc(error: grpc.RpcError, peer: str = "") -> PacelineError:
    """The error that a failed call stands for; ``peer`` is put in front of what a reader could not place otherwise."""
    details = error.details() or error.code().name
    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in details:  # gRPC's own words
        return InvalidRequest("request", f"the message is too large ({details})")
    known = error_from_status(error.code(), details, error.trailing_metadata() or ())
    if isinstance(known, InvalidRequest) or (known is not None and not peer):
        return known
    prefix = f"{peer}: " if peer else ""
    if known is None:
        return PacelineError(f"{prefix}{error.code().name}: {details}")
    return error_from_status(error.code(), prefix + details, error.trailing_metadata() or ()) or known
