"""Sequences dealt to ranks that are processes: the tokens of one rank, from a cache that is as large as all of theirs.

Mutants that fail: followers are not told that sequences are dealt; a rank attends the rows of all; a rank without rows
leaves the exchange out; rows of a tree keep their slots of the node; copies of other ranks' rows are made too.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.assembly.build import build_runner
from paceline.config import NodeConfig
from paceline.engine.model_runner import ModelRunner
from tests.support.exactness import run
from tests.support.needs import needs_kernels
from tests.support.tiny_deepseek import ranks_deepseek_spec, write_folder
from tests.support.tiny_model import tiny_request

pytestmark = needs_kernels

TOKENS = 640  # that the cache of a rank holds


def test_more_sequences_than_a_rank_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MTP modules draft trees, with KV of their own on rank 0. The second turn finds prompts cached on both ranks."""
    folder = write_folder(tmp_path / "tiny", spec=ranks_deepseek_spec())
    options = {"model": str(folder), "drafter": "mtp", "tree": "dynamic", "head_check": False, "max_model_len": 200}
    options |= {"kv_cache_tokens": TOKENS}
    requests = [tiny_request(range(3 + i, 130 + i), index=i, max_tokens=20, temperature=float(i % 2)) for i in range(6)]
    alone = run(build_runner(NodeConfig.model_validate(options)), requests)
    runner = build_runner(NodeConfig.model_validate(options | {"tp": 2, "attention_dp": 2}))
    lived = parts_of(runner, monkeypatch)
    for _ in range(2):
        assert run(runner, requests, batch=6) == alone
    assert sum(len(request.prompt_token_ids) for request in requests) > TOKENS
    assert lived == [0, 1] * 6
    assert runner.prefix is not None
    assert runner.prefix.hit_tokens > 0
    runner.close()


def parts_of(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Filled with the part of the pool in which each sequence gets its pages."""
    lived: list[int] = []
    take_pages = runner.take_pages

    def watched(*arguments: object) -> None:
        take_pages(*arguments)  # type: ignore[arg-type]
        lived.append(arguments[0].table.part)  # type: ignore[attr-defined]

    monkeypatch.setattr(runner, "take_pages", watched)
    return lived
