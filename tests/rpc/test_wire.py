"""Messages to data and back, errors to status and back."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import (
    DeadlineExceeded,
    HandoffFailed,
    InvalidRequest,
    NodeUnavailable,
    Overloaded,
    PacelineError,
    PairingRefused,
    RequestCancelled,
    quoted,
)
from paceline.request import FinishReason, SamplingParams, SequenceRequest, SpeculationParams, TokenLogprobs
from paceline.rpc.calls import error_from_peer
from paceline.rpc.wire_errors import MAX_DETAILS_BYTES, error_from_rpc, error_from_status, metadata_for, status_for
from paceline.v1 import common_pb2, node_pb2
from paceline.wire import (
    finish_reason_from_proto,
    finish_reason_to_proto,
    logprobs_from_proto,
    logprobs_to_proto,
    sampling_from_proto,
    sampling_to_proto,
    sequence_from_proto,
    sequence_to_proto,
    speculation_from_proto,
)

INT32 = st.integers(0, 2**31 - 1)
FINITE = st.floats(allow_nan=False)
TEXT = st.text(st.characters(exclude_categories=["Cs"]))

PARAMS = st.builds(
    SamplingParams,
    temperature=FINITE,
    top_p=FINITE,
    top_k=INT32,
    min_p=FINITE,
    presence_penalty=FINITE,
    frequency_penalty=FINITE,
    repetition_penalty=FINITE,
    logit_bias=st.dictionaries(INT32, FINITE, max_size=3),
    seed=st.none() | st.integers(0, 2**64 - 1),
    stop=st.lists(TEXT, max_size=3).map(tuple),
    stop_token_ids=st.lists(INT32, max_size=3).map(tuple),
    max_tokens=INT32,
    min_tokens=INT32,
    ignore_eos=st.booleans(),
    top_logprobs=st.none() | INT32,
    n=INT32,
)
SEQUENCES = st.builds(
    SequenceRequest,
    request_id=TEXT,
    prompt_token_ids=st.lists(INT32).map(tuple),
    params=PARAMS,
    output_token_ids=st.lists(INT32).map(tuple),
    speculation=st.builds(SpeculationParams, st.none() | INT32, st.none() | st.integers(1, 9)),
    cache_salt=TEXT,
)


@given(SEQUENCES)
def test_a_sequence_survives_the_wire(sequence: SequenceRequest) -> None:
    data = sequence_to_proto(sequence).SerializeToString()
    assert sequence_from_proto(node_pb2.SequenceRequest.FromString(data)) == sequence


def test_unset_sampling_takes_the_defaults() -> None:
    assert sampling_from_proto(common_pb2.SamplingParams()) == SamplingParams()
    given_zero = sampling_from_proto(common_pb2.SamplingParams(temperature=0, max_tokens=0, top_logprobs=0))
    assert (given_zero.temperature, given_zero.max_tokens, given_zero.top_logprobs) == (0, 0, 0)
    assert not sampling_to_proto(SamplingParams()).HasField("seed")


@pytest.mark.parametrize("field", ["num_draft_tokens", "tree_width"])
def test_negative_speculation_is_refused_by_name(field: str) -> None:
    values: dict[str, Any] = {field: -1}
    with pytest.raises(InvalidRequest) as caught:
        speculation_from_proto(common_pb2.Speculation(**values))
    assert caught.value.field == f"speculation.{field}"


@pytest.mark.parametrize("reason", [None, *FinishReason])
def test_finish_reasons(reason: FinishReason | None) -> None:
    assert finish_reason_from_proto(finish_reason_to_proto(reason)) is reason


def test_logprobs() -> None:
    logprobs = TokenLogprobs(-0.5, (3, 4), (-0.5, -2.0))
    assert logprobs_from_proto(logprobs_to_proto(logprobs)) == logprobs


ERRORS: list[tuple[PacelineError, grpc.StatusCode]] = [
    (InvalidRequest("sampling.top_p", "must be: above 0"), grpc.StatusCode.INVALID_ARGUMENT),
    (Overloaded("no room", 2.5), grpc.StatusCode.RESOURCE_EXHAUSTED),
    (NodeUnavailable("gone"), grpc.StatusCode.UNAVAILABLE),
    (PairingRefused(["dtype"], "a", "b"), grpc.StatusCode.FAILED_PRECONDITION),
    (HandoffFailed("cut"), grpc.StatusCode.ABORTED),
    (RequestCancelled("left"), grpc.StatusCode.CANCELLED),
    (DeadlineExceeded("late"), grpc.StatusCode.DEADLINE_EXCEEDED),
]


@pytest.mark.parametrize(("error", "code"), ERRORS, ids=lambda value: type(value).__name__)
def test_errors_survive_the_wire(error: PacelineError, code: grpc.StatusCode) -> None:
    found, details = status_for(error)
    assert found is code
    back = error_from_status(found, details, metadata_for(error))
    assert type(back) is type(error)
    assert str(back) == str(error)
    if isinstance(error, InvalidRequest) and isinstance(back, InvalidRequest):
        assert (back.field, back.message) == (error.field, error.message)
    if isinstance(error, Overloaded) and isinstance(back, Overloaded):
        assert back.retry_after_s == error.retry_after_s


def test_what_is_not_ours() -> None:
    assert status_for(PacelineError("bug"))[0] is grpc.StatusCode.INTERNAL
    assert error_from_status(grpc.StatusCode.UNKNOWN, "bug") is None


def rpc_error(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)


def test_a_failed_call_names_its_peer_but_not_in_place_of_a_field() -> None:
    invalid = error_from_rpc(rpc_error(grpc.StatusCode.INVALID_ARGUMENT, "max_tokens: too many"), "decode-0")
    assert isinstance(invalid, InvalidRequest)
    assert (invalid.field, invalid.message) == ("max_tokens", "too many")
    gone = error_from_rpc(rpc_error(grpc.StatusCode.UNAVAILABLE, "refused"), "decode-0")
    assert isinstance(gone, NodeUnavailable)
    assert str(gone) == "decode-0: refused"
    bug = error_from_rpc(rpc_error(grpc.StatusCode.UNKNOWN, "boom"), "decode-0")
    assert type(bug) is PacelineError
    assert str(bug) == "decode-0: UNKNOWN: boom"


@pytest.mark.parametrize("code", [grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED])
def test_a_peer_that_does_not_answer_is_unavailable(code: grpc.StatusCode) -> None:
    """A call between two nodes has a deadline of its own; a request's deadline stays what it is."""
    silent = rpc_error(code, "no answer")
    error = error_from_peer(silent, "decode node at 10.0.0.2")
    assert type(error) is NodeUnavailable
    assert str(error) == "decode node at 10.0.0.2: no answer"
    assert type(error_from_rpc(silent)) in (DeadlineExceeded, RequestCancelled)


def test_a_message_too_large_is_the_callers_mistake() -> None:
    error = error_from_rpc(rpc_error(grpc.StatusCode.RESOURCE_EXHAUSTED, "Received message larger than max (9 vs. 4)"))
    assert isinstance(error, InvalidRequest)
    assert error.field == "request"


@pytest.mark.parametrize("text", ["x" * 50_000, "é" * 50_000, "%" * 50_000, "\n" * 50_000, "\U0001f600" * 50_000])
def test_details_fit_what_grpc_lets_through(text: str) -> None:
    _, details = status_for(NodeUnavailable(text))
    assert details.endswith("...")
    assert text.startswith(details.removesuffix("..."))
    travels = sum(1 if " " <= c <= "~" and c != "%" else 3 * len(c.encode()) for c in details)
    assert MAX_DETAILS_BYTES - 20 <= travels <= MAX_DETAILS_BYTES + 3
    assert status_for(NodeUnavailable("a fingerprint\n" * 100))[1] == "a fingerprint\n" * 100


def test_quoted_shows_which_it_was() -> None:
    assert quoted("it's\n") == repr("it's\n")
    assert quoted("x" * 10**6) == repr("x" * 100 + "...")
