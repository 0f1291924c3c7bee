"""A runner is warmed and measured with its weights as they stay."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.assembly import build
from paceline.config import NodeConfig
from paceline.errors import ConfigError
from paceline.huge_pages import ReadableMap
from paceline.layers.weight_file import WeightFile
from paceline.models.llama import LlamaModel
from tests.support.tiny_checkpoint import write_tiny_llama


@pytest.mark.parametrize("fails", [False, True])
def test_rounds_are_measured_when_the_weights_lie_in_huge_pages(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutants: huge pages are asked for when rounds were measured, or a model stays open that could not be warmed."""
    happened = list[str]()

    def warm(*_: object, **__: object) -> None:
        happened.append("warm")
        if fails:
            raise ConfigError("model", "cannot be warmed")

    def collapse(*_: object) -> int:
        happened.append("huge pages")
        return 0

    monkeypatch.setattr(build, "warm_kernels", warm)
    monkeypatch.setattr(build, "_measure", lambda *_: happened.append("measure"))
    monkeypatch.setattr(ReadableMap, "collapse", collapse)
    monkeypatch.setattr(LlamaModel, "close", lambda _: happened.append("close"))
    file = WeightFile()
    options = {"model": str(write_tiny_llama(tmp_path)), "drafter": "none", "kv_cache_tokens": 256}
    config = NodeConfig.model_validate(options | {"weight_file": file.path})
    try:
        build.build_runner(config)
    except ConfigError:
        happened.append("failed")
    finally:
        file.close()
    assert happened == ["huge pages", "warm", *(["close", "failed"] if fails else ["measure"])]
