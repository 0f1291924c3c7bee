"""Followers as processes: the same tokens, and nothing is left of them however the node ends."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest

from paceline.assembly.build import build_runner
from paceline.config import NodeConfig
from paceline.errors import NodeUnavailable
from tests.support.exactness import run
from tests.support.needs import needs_kernels
from tests.support.prompts import prompt_requests

pytestmark = [needs_kernels, pytest.mark.real_model, pytest.mark.timeout(300)]


def followers() -> list[psutil.Process]:
    """Those of this process that live."""
    return [child for child in psutil.Process().children() if "paceline.ranks.process" in " ".join(child.cmdline())]


def test_a_node_of_three_ranks(smollm2_folder: Path) -> None:
    """Mutant: followers keep KV in the model's dtype, whatever kv_dtype says."""
    options = {"model": str(smollm2_folder), "drafter": "ngram", "kv_cache_tokens": 1024, "kv_dtype": "int8"}
    requests = prompt_requests(smollm2_folder, 12)[:2]
    alone = run(build_runner(NodeConfig.model_validate(options)), requests, batch=2)
    runner = build_runner(NodeConfig.model_validate(options | {"tp": 3}))
    assert len(followers()) == 2
    assert run(runner, requests, batch=2) == alone
    followers()[1].send_signal(signal.SIGKILL)
    with pytest.raises(NodeUnavailable, match="ranks of this node are lost"):
        run(runner, requests)
    assert not runner.alive()
    runner.close()
    assert followers() == []
