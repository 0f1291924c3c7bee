"""The log options of a deployment reach every process; logs and counts of its nodes reach the router."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.client import Client
from tests.fakes.wait import wait_for
from tests.multihost.small_model import write_model
from tests.support.server import Server, serve

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(200)]


def entries(server: Server) -> list[dict[str, Any]]:
    """The JSON lines that the deployment has logged so far."""
    return [json.loads(line) for line in server.log.read_text().splitlines() if line.startswith("{")]


def test_the_rounds_of_the_decode_node_are_logged_as_json(tmp_path: Path) -> None:
    model = str(write_model(tmp_path / "model"))
    options = ("--drafter", "ngram", "--no-standby", "--log-level", "debug", "--log-format", "json")
    with serve("--model", model, *options) as server:
        with Client(server.grpc) as client:
            done = client.generate(tuple(range(40, 80)), max_tokens=8, temperature=0.0, ignore_eos=True)

        def rounds() -> list[dict[str, Any]]:
            return [entry for entry in entries(server) if " round " in entry["message"]]

        wait_for(lambda: len(rounds()) == done.completion.speculation.rounds)
        assert {(entry["node"], entry["level"]) for entry in rounds()} == {("decode-0", "debug")}
        assert " round 1: ngram drafted " in rounds()[0]["message"]
        assert {"router", "prefill-0", "decode-0"} <= {entry["node"] for entry in entries(server)}
        copied = r'paceline_node_copy_rounds_total\{drafter="ngram",node="decode-0",result="\w+"\} ([\d.]+)'

        def counted() -> float:
            return sum(map(float, re.findall(copied, httpx.get(f"http://{server.http}/metrics").text)))

        # With the lease after the next, if need be; the last round may have had no room for a draft.
        wait_for(lambda: counted() >= len(rounds()) - 1)
        assert counted() <= len(rounds())
