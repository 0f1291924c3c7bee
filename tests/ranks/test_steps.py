"""Steps of several ranks where something is not as usual: attention in torch, no rows, who listens fails."""

from __future__ import annotations

import pytest
import torch

from paceline.assembly.selfcheck import logits_in_chunks
from paceline.attention.base import Segment
from paceline.engine.model_runner import ModelRunner
from paceline.kvcache.table import PageTable
from tests.support.thread_ranks import ranks_runner, ranks_spec

IDS = [(31 * i + 5) % 519 for i in range(23)]


def logits_of(runner: ModelRunner) -> torch.Tensor:
    return logits_in_chunks(runner.model, runner.kv, runner.allocator, runner.attention, IDS, (20, 3))


def test_attention_in_torch() -> None:
    """Mutant: it reads the heads of all ranks. Runs without kernels too."""
    seen = []
    for degree in (1, 2, 8):
        runner = ranks_runner(degree, ranks_spec(), "fp32", drafter="none", attention="torch")
        seen.append(logits_of(runner))
        assert runner.model.logits(torch.empty(0, 96)).shape == (0, 519)
        runner.close()
    for logits in seen[1:]:
        torch.testing.assert_close(logits, seen[0], rtol=1e-3, atol=1e-3)


def test_a_listener_that_fails_ends_its_step_alone() -> None:
    """A link that raises in the midst of a forward is no fault of the ranks, which are in step."""
    runner = ranks_runner(2, ranks_spec(), "fp32", drafter="none")
    expected = logits_of(runner)
    heard = []

    def listener(layer: int) -> None:
        heard.append(layer)
        raise RuntimeError("no link")

    table = PageTable(runner.allocator, runner.page_size)
    table.ensure(len(IDS))
    with pytest.raises(RuntimeError, match="no link"):
        runner.forward([Segment.linear(IDS, 0, table.slots)], listener)
    table.release()
    assert heard == [0]
    assert runner.alive()
    assert torch.equal(logits_of(runner), expected)
    runner.close()
