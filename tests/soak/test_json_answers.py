"""Schemas and tools x every drafter x prefill and decode apart, with nodes that die in mid-stream: every answer is
valid, and that of one plain process.

The short run is in this process and kills nobody; ``--requests N`` starts deployments, kills their nodes and asks a
tenth of N requests of every drafter. ``python -m tests.soak.answer_grid`` is the same with a table of results.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.multihost.small_model import write_model
from tests.soak.answer_grid import SPEC, failed, tiny_run
from tests.soak.grid import GRIDS, PREDICTION, ask_all, plain_answers, predictions
from tests.soak.json_asks import make_json_asks
from tests.soak.tally import Outcome, table
from tests.support.folder_deployment import deployed
from tests.support.needs import needs_kernels

pytestmark = needs_kernels

SHORT_REQUESTS, SHORT_SEED, AT_ONCE = 12, 15, 8
SHARE = 10  # of --requests: the other parts of the soak ask each request once, this one asks it of every drafter


async def test_json_of_schemas_and_tools(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    torch.set_num_threads(1)
    count = request.config.getoption("requests", default=None)
    seed = request.config.getoption("seed", default=None) or SHORT_SEED
    if count is None:
        outcomes = [await _short(tmp_path, seed)]
        assert outcomes[0].wrong == []
    else:
        run = tiny_run(tmp_path, seed, max(1, count // SHARE))
        outcomes = [await run.ask(grid) for grid in GRIDS]
        print(*(f"\n{table(outcome.by_drafter)}" for outcome in outcomes))
        assert [failed(outcome) for outcome in outcomes] == [[] for _ in GRIDS]
    tallies = [tally for outcome in outcomes for tally in outcome.by_drafter.values()]
    assert sum(t.valid for t in tallies) > sum(t.cut for t in tallies)


async def _short(tmp_path: Path, seed: int) -> Outcome:
    """A drafter and a prediction, in this process."""
    outcome, folder = Outcome(), write_model(tmp_path / "model", SPEC)
    asks = make_json_asks(seed, SHORT_REQUESTS)
    async with deployed(folder, drafter="ngram", tree="static", tree_width=2) as address:
        right = await plain_answers(folder, address, asks)
        predicted = predictions(folder, right, seed)
        await ask_all(address, asks, right, ("ngram", PREDICTION), outcome, predicted, AT_ONCE)
    return outcome
