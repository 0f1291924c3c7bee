"""What a process that starts is at."""

from __future__ import annotations

import logging

import pytest

from paceline.phases import current_phase, phase


def test_the_innermost_phase_is_told_and_each_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "paceline.phases")
    assert current_phase() == ""
    with phase("loading"):
        with phase("packing"):
            assert current_phase() == "packing"
        with pytest.raises(ZeroDivisionError), phase("checking"):
            _ = 1 / 0
        assert current_phase() == "loading"
    assert current_phase() == ""
    logged = [record.getMessage().rpartition(":")[0] for record in caplog.records]
    assert logged == ["phase packing", "phase checking", "phase loading"]
