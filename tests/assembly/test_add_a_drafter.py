"""docs/extend/drafter.md, followed: its file and its record are installed, then its own tests run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cluster.commands.options import load_config
from paceline.errors import ConfigError
from paceline.speculation import DRAFTERS, DrafterRecord
from tests.support.needs import needs_kernels
from tests.support.recipes import code_of, collected, install, load, record_of
from tests.support.tiny_model import tiny_runner

PAGE = "drafter.md"
FILE = "paceline/spec_decode/drafters/echo.py"

torch.set_num_threads(1)
pytestmark = needs_kernels


@pytest.fixture(autouse=True)
def followed(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, PAGE, FILE)
    record = record_of(PAGE, "paceline/speculation.py", DrafterRecord=DrafterRecord)
    monkeypatch.setitem(DRAFTERS, record.name, record)


with pytest.MonkeyPatch.context() as while_importing:
    install(while_importing, PAGE, FILE)
    globals().update(collected(load(PAGE, "tests/spec_decode/drafters/test_echo_drafter.py")))


def test_its_module_may_lie_outside_the_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_echo.py").write_text(code_of(PAGE)[FILE], encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(DRAFTERS, "echo", replace(DRAFTERS["echo"], plan="my_echo:plan"))
    assert type(tiny_runner(drafter="echo").drafter).__module__ == "my_echo"


def test_an_unknown_one_is_refused_with_the_list_of_those_there_are(tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("drafter: ecko\n")
    sources = {
        "command line": ({"drafter": "ecko"}, None, {}),
        "environment": ({}, None, {"PACELINE_DRAFTER": "ecko"}),
        str(file): ({}, file, {}),
    }
    for source, given in sources.items():
        with pytest.raises(ConfigError) as refused:
            load_config(*given)
        assert refused.value.key == "drafter"
        for part in ("default, auto, none, ngram", "echo", f"from {source}: 'ecko'"):
            assert part in str(refused.value)
    assert load_config({"drafter": "echo"}, None, {}).drafter == "echo"
