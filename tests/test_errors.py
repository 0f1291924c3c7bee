"""Errors cross process borders whole."""

from __future__ import annotations

import pickle

import pytest

from paceline.errors import ConfigError, InvalidRequest, Overloaded, PacelineError, PairingRefused


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
