"""The thread that loads a model ends with it: its team of OpenMP would keep the engine's helpers from staying awake."""

from __future__ import annotations

import threading

import pytest

from paceline.config import NodeConfig
from paceline.engine.model_runner import ModelRunner
from paceline.node import shell
from tests.support.tiny_model import tiny_runner


async def test_the_thread_that_loads_a_model_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded_on: list[threading.Thread] = []

    def build(config: NodeConfig, decodes: bool) -> ModelRunner:
        loaded_on.append(threading.current_thread())
        return tiny_runner()

    monkeypatch.setattr(shell, "_build", build)
    await shell.load_model(NodeConfig(model="tiny"), decodes=True)
    assert loaded_on
    assert loaded_on[0] is not threading.current_thread()
    loaded_on[0].join(10)
    assert not loaded_on[0].is_alive()
