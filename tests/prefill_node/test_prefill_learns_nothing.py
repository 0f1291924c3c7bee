"""Sequences end where they are decoded: only there a drafter learns from them."""

from __future__ import annotations

import pytest
import torch

from paceline.config import NodeConfig
from paceline.engine.model_runner import ModelRunner
from paceline.spec_decode.sequence import Sequence
from tests.support.node_pair import pair
from tests.support.tiny_model import tiny_request, tiny_runner

torch.set_num_threads(1)


def told(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Requests whose end the drafter is told."""
    seen: list[str] = []
    finish = runner.drafter.finish

    def noted(seq: Sequence) -> None:
        seen.append(seq.request.request_id)
        finish(seq)

    monkeypatch.setattr(runner.drafter, "finish", noted)
    return seen


@pytest.mark.parametrize("drafter", ["trie", "suffix"])
async def test_only_decode_is_told_of_the_end(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runners = [tiny_runner(drafter=drafter) for _ in range(2)]
    seen = [told(runner, monkeypatch) for runner in runners]
    config = NodeConfig.model_validate({"model": "tiny", "dtype": "fp32", "drafter": drafter})
    async with pair(config, *runners) as nodes:
        for i in range(3):
            await nodes.generate(tiny_request(index=i, max_tokens=8))
        await nodes.all_released()
    assert seen == [[], ["r0", "r1", "r2"]]
