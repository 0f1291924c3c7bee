"""Errors cross process borders whole."""

from __future__ import annotations

import pickle

import pytest

from paceline.errors import (
    ConfigError,
    InvalidRequest,
    NodeUnavailable,
    Overloaded,
    PacelineError,
    PairingRefused,
    failed,
)


@pytest.mark.parametrize(
    "error",
    [InvalidRequest("top_p", "too big"), ConfigError("device", "no GPU"), PairingRefused(["dtype"], "a", "b")],
)
def test_errors_survive_pickling(error: PacelineError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)


def test_the_field_and_the_key_are_kept() -> None:
    assert pickle.loads(pickle.dumps(InvalidRequest("top_p", "too big"))).field == "top_p"
    assert pickle.loads(pickle.dumps(ConfigError("device", "no GPU"))).key == "device"
    assert pickle.loads(pickle.dumps(Overloaded("full"))).retry_after_s == 1.0


def test_a_step_that_fails_for_a_node_that_is_gone_says_so() -> None:
    """Routers give up a request that three nodes answered with another error."""
    gone = NodeUnavailable("the ranks of this node are lost")
    assert failed("prefill", gone) is gone
    other = failed("prefill", ValueError("x"))
    assert (type(other), str(other)) == (PacelineError, "prefill failed: ValueError('x')")
