"""The recipe of paceline/speculation.py: a new drafter is one file and one record."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cluster.commands.options import load_config
from paceline.engine.colocated import ColocatedEngine
from paceline.errors import ConfigError
from paceline.request import SequenceRequest, SpeculationParams
from paceline.speculation import DRAFTERS, DrafterRecord
from support.tiny_model import tiny_request, tiny_runner

torch.set_num_threads(1)

FILE = '''
"""Drafts the last token again."""

from dataclasses import replace

from paceline.spec_decode.base import Drafter
from paceline.spec_decode.drafters.plan import plan_weightless
from paceline.spec_decode.trees.tree import build_tree


class Parrot(Drafter):
    name = "parrot"

    def extend(self, items):
        pass

    def propose(self, seqs, budgets):
        return [self._chain(seq.token_ids[-1], budget) for seq, budget in zip(seqs, budgets)]

    def _chain(self, root, budget):
        pairs = [(i - 1, root) for i in range(budget.num_draft_tokens)]
        return replace(build_tree(root, pairs, 10**6, budget.max_nodes, budget.num_draft_tokens), drafter=self.name)


def plan(name, config, model):
    return plan_weightless(Parrot())
'''


@pytest.fixture
def parrot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "parrot_drafter.py").write_text(FILE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(DRAFTERS, "parrot", DrafterRecord("parrot", "parrot_drafter:plan", weightless=True))


def asking(index: int, drafter: str | None) -> SequenceRequest:
    request = tiny_request(index=index, max_tokens=16)
    return SequenceRequest(
        f"r{index}", request.prompt_token_ids, request.params, speculation=SpeculationParams(None, None, drafter)
    )


@pytest.mark.usefixtures("parrot")
@pytest.mark.parametrize(
    ("options", "asked"), [({"drafter": "parrot"}, None), ({"drafter": "mtp", "drafters": "parrot"}, "parrot")]
)
def test_it_serves_tokens(options: dict[str, str], asked: str | None) -> None:
    requests = [asking(index, asked) for index in range(3)]
    plain = ColocatedEngine(tiny_runner(drafter="none")).generate([asking(index, None) for index in range(3)])
    drafted = ColocatedEngine(tiny_runner(**options)).generate(requests)
    assert [done.token_ids for done in drafted] == [done.token_ids for done in plain]
    assert all(set(done.stats.rounds_by_drafter) == {"parrot"} for done in drafted)
    assert sum(done.stats.draft_tokens for done in drafted) > 0


@pytest.mark.usefixtures("parrot")
def test_an_unknown_one_is_refused_with_the_list_of_those_there_are(tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("drafter: parot\n")
    sources = {
        "command line": ({"drafter": "parot"}, None, {}),
        "environment": ({}, None, {"PACELINE_DRAFTER": "parot"}),
        str(file): ({}, file, {}),
    }
    for source, given in sources.items():
        with pytest.raises(ConfigError) as refused:
            load_config(*given)
        assert refused.value.key == "drafter"
        for part in ("default, auto, none, ngram", "parrot", f"from {source}: 'parot'"):
            assert part in str(refused.value)
    assert load_config({"drafter": "parrot"}, None, {}).drafter == "parrot"
