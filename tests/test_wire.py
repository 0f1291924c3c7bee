"""Messages and errors survive the wire."""

from __future__ import annotations

import subprocess
import sys

import grpc
import pytest

from paceline.errors import (
    ConfigError,
    DeadlineExceeded,
    HandoffFailed,
    InvalidRequest,
    NodeUnavailable,
    Overloaded,
    PacelineError,
    PairingRefused,
    RequestCancelled,
)
from paceline.request import UINT64_MAX, FinishReason, SamplingParams, SequenceRequest, SpeculationParams, TokenLogprobs
from paceline.v1 import common_pb2, node_pb2
from paceline.wire import (
    error_from_rpc,
    error_from_status,
    finish_reason_from_proto,
    finish_reason_to_proto,
    logprobs_from_proto,
    logprobs_to_proto,
    metadata_for,
    sampling_from_proto,
    sampling_to_proto,
    sequence_from_proto,
    sequence_to_proto,
    speculation_from_proto,
    speculation_to_proto,
    status_for,
)

FULL = SamplingParams(
    temperature=0.1,
    top_p=0.9,
    top_k=40,
    min_p=0.05,
    presence_penalty=-0.3,
    frequency_penalty=0.7,
    repetition_penalty=1.1,
    logit_bias={5: -1.25, 0: 100.0},
    seed=UINT64_MAX,
    stop=("\n\n", "é🚴"),
    stop_token_ids=(2, 0),
    max_tokens=7,
    min_tokens=3,
    ignore_eos=True,
    top_logprobs=0,
    n=4,
)


class FakeRpcError(grpc.RpcError):
    """What grpc raises, as far as wire reads it."""

    def __init__(
        self, code: grpc.StatusCode, details: str | None, metadata: tuple[tuple[str, str], ...] | None
    ) -> None:
        super().__init__()
        self._code, self._details, self._metadata = code, details, metadata

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str | None:
        return self._details

    def trailing_metadata(self) -> tuple[tuple[str, str], ...] | None:
        return self._metadata


def over_the_wire(error: PacelineError, peer: str = "") -> PacelineError:
    code, details = status_for(error)
    return error_from_rpc(FakeRpcError(code, details, metadata_for(error)), peer)


@pytest.mark.parametrize("params", [FULL, SamplingParams()])
def test_sampling_survives_bytes_exactly(params: SamplingParams) -> None:
    data = sampling_to_proto(params).SerializeToString()
    assert sampling_from_proto(common_pb2.SamplingParams.FromString(data)) == params


def test_unset_sampling_takes_the_defaults_and_zero_is_not_unset() -> None:
    assert sampling_from_proto(common_pb2.SamplingParams()) == SamplingParams()
    zeros = sampling_from_proto(common_pb2.SamplingParams(temperature=0.0, top_p=0.0, seed=0, max_tokens=0, n=0))
    assert (zeros.temperature, zeros.top_p, zeros.seed, zeros.max_tokens, zeros.n) == (0.0, 0.0, 0, 0, 0)


def test_logprobs_none_and_zero_differ() -> None:
    assert not sampling_to_proto(SamplingParams()).HasField("top_logprobs")
    assert sampling_to_proto(SamplingParams(top_logprobs=0)).HasField("top_logprobs")


@pytest.mark.parametrize("params", [SpeculationParams(), SpeculationParams(0, 1), SpeculationParams(8, None)])
def test_speculation_survives(params: SpeculationParams) -> None:
    data = speculation_to_proto(params).SerializeToString()
    assert speculation_from_proto(common_pb2.Speculation.FromString(data)) == params


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (common_pb2.Speculation(num_draft_tokens=-1), "speculation.num_draft_tokens"),
        (common_pb2.Speculation(tree_width=0), "speculation.tree_width"),
    ],
)
def test_wrong_speculation_names_its_field(message: common_pb2.Speculation, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        speculation_from_proto(message)
    assert caught.value.field == field


def test_sequence_survives_bytes_exactly() -> None:
    request = SequenceRequest("r#1", (1, 2, 3), FULL, (9, 8), SpeculationParams(3, 2), "tenant")
    data = sequence_to_proto(request).SerializeToString()
    assert sequence_from_proto(node_pb2.SequenceRequest.FromString(data)) == request


def test_finish_reasons_and_logprobs_survive() -> None:
    for reason in (None, *FinishReason):
        assert finish_reason_from_proto(finish_reason_to_proto(reason)) is reason
    assert len({finish_reason_to_proto(reason) for reason in (None, *FinishReason)}) == 4
    logprobs = TokenLogprobs(-0.5, (4, 2), (-0.5, -1.25))  # floats that single precision holds
    assert logprobs_from_proto(logprobs_to_proto(logprobs)) == logprobs


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidRequest("top_p", "too large: 2"), grpc.StatusCode.INVALID_ARGUMENT),
        (Overloaded("full", 2.5), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (NodeUnavailable("gone"), grpc.StatusCode.UNAVAILABLE),
        (PairingRefused(["dtype"], "p", "d"), grpc.StatusCode.FAILED_PRECONDITION),
        (HandoffFailed("cut"), grpc.StatusCode.ABORTED),
        (RequestCancelled("left"), grpc.StatusCode.CANCELLED),
        (DeadlineExceeded("late"), grpc.StatusCode.DEADLINE_EXCEEDED),
    ],
)
def test_errors_come_back_as_they_were(error: PacelineError, code: grpc.StatusCode) -> None:
    assert status_for(error)[0] is code
    back = over_the_wire(error)
    assert type(back) is type(error)
    assert str(back) == str(error)
    named = over_the_wire(error, "decode-0")
    assert type(named) is type(error)
    assert str(error) in str(named)


def test_fields_and_waits_survive() -> None:
    invalid = over_the_wire(InvalidRequest("messages[0].content", "is wrong: x"), "decode-0")
    assert isinstance(invalid, InvalidRequest)
    assert (invalid.field, invalid.message) == ("messages[0].content", "is wrong: x")
    overloaded = over_the_wire(Overloaded("full", 2.5))
    assert isinstance(overloaded, Overloaded)
    assert overloaded.retry_after_s == 2.5
    bare = error_from_status(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many calls")
    assert isinstance(bare, Overloaded)
    assert bare.retry_after_s == 1.0


def test_config_errors_are_failed_preconditions() -> None:
    assert status_for(ConfigError("grpc", "bad"))[0] is grpc.StatusCode.FAILED_PRECONDITION


def test_what_is_not_paceline_s() -> None:
    assert status_for(PacelineError("bug"))[0] is grpc.StatusCode.INTERNAL
    assert error_from_status(grpc.StatusCode.UNKNOWN, "bug") is None
    bug = error_from_rpc(FakeRpcError(grpc.StatusCode.UNKNOWN, "bug", None), "decode-0")
    assert (type(bug), str(bug)) == (PacelineError, "decode-0: UNKNOWN: bug")
    silent = error_from_rpc(FakeRpcError(grpc.StatusCode.UNAVAILABLE, None, None))
    assert (type(silent), str(silent)) == (NodeUnavailable, "UNAVAILABLE")


def test_a_message_over_the_limit_is_the_caller_s_fault() -> None:
    text = "SERVER: Received message larger than max (104857600 vs. 4194304)"
    error = error_from_rpc(FakeRpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, text, ()))
    assert isinstance(error, InvalidRequest)
    assert error.field == "request"


def test_imports_nothing_heavy() -> None:
    code = (
        "import sys, paceline.wire\n"
        "print([m for m in ('torch', 'ray', 'pydantic', 'numpy', 'redis') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
