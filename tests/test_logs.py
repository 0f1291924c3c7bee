"""Logging of a process, in one of its own: pytest has set up this one's."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import datetime

import pytest

PROGRAM = """
import logging, sys
from paceline.logs import configure_logging
configure_logging(sys.argv[1], sys.argv[2], "decode-0")
configure_logging("error", "text", "another")
log = logging.getLogger("decode_node.engine")
log.debug("round %d", 1)
log.info("started")
logging.getLogger("somebody.else").debug("noise")
try:
    raise ValueError("broken\\nin two lines")
except ValueError:
    log.error("failed: %s", "é", exc_info=True)
"""


def lines(level: str, form: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, level, form], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == ""
    return done.stderr.splitlines()


def test_json_is_an_object_a_line_with_the_exception_in_it() -> None:
    first, second, third = (json.loads(line) for line in lines("debug", "json"))
    assert datetime.fromisoformat(first.pop("time")).tzinfo is not None
    assert first == {"level": "debug", "logger": "decode_node.engine", "node": "decode-0", "message": "round 1"}
    assert second["message"] == "started"
    assert (third["level"], third["message"]) == ("error", "failed: é")
    assert third["exception"].endswith("ValueError: broken\nin two lines")


@pytest.mark.parametrize(("level", "messages"), [("info", ["started", "failed: é"]), ("error", ["failed: é"])])
def test_text_begins_with_the_time_and_the_process(level: str, messages: list[str]) -> None:
    found = [line for line in lines(level, "text") if " decode-0 " in line]
    assert [line.partition("decode_node.engine: ")[2] for line in found] == messages
