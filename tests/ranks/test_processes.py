"""Followers as processes: the same tokens, and nothing is left of them however the node ends."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from paceline.assembly.build import build_runner
from paceline.config import NodeConfig
from paceline.errors import NodeUnavailable
from tests.support.exactness import run
from tests.support.needs import needs_kernels
from tests.support.prompts import prompt_requests

pytestmark = [needs_kernels, pytest.mark.real_model, pytest.mark.timeout(900)]


def followers() -> list[psutil.Process]:
    """Those of this process that live."""
    return [child for child in psutil.Process().children() if "paceline.ranks.process" in " ".join(child.cmdline())]


@pytest.mark.cases(
    ("dtype", "kv_dtype", "prompts"),
    [("bf16", "int8", 1)],
    [("bf16", "int8", 20), ("bf16", "auto", 20), ("fp32", "auto", 20)],
)
def test_a_node_of_three_ranks(
    dtype: str, kv_dtype: str, prompts: int, smollm2_folder: Path, same_outcomes: Callable[..., bool]
) -> None:
    """Mutant: followers keep KV in the model's dtype, whatever kv_dtype says."""
    options = {"model": str(smollm2_folder), "drafter": "ngram", "kv_cache_tokens": 1024, "dtype": dtype}
    options |= {"kv_dtype": kv_dtype}
    requests = prompt_requests(smollm2_folder, 12)[: 2 * prompts]  # each at temperature 0 and 1
    alone = run(build_runner(NodeConfig.model_validate(options)), requests, batch=2)
    runner = build_runner(NodeConfig.model_validate(options | {"tp": 3}))
    assert len(followers()) == 2
    assert same_outcomes(run(runner, requests, batch=2), alone)
    followers()[1].send_signal(signal.SIGKILL)
    with pytest.raises(NodeUnavailable, match="ranks of this node are lost"):
        run(runner, requests)
    assert not runner.alive()
    runner.close()
    assert followers() == []
