"""The grid of structured answers as a command: ``python -m tests.soak.answer_grid --requests 100 --seed 1``.

It starts deployments, kills their nodes, prints a table by drafter, and exits with 1 where an answer is invalid,
different from plain decoding's or lost, or where no kill hit a running sequence.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from paceline.grammar.compile import GrammarCompiler
from paceline.models.config import ModelSpec
from paceline.models.hub import resolve_model
from tests.multihost.small_model import write_model
from tests.soak.grid import GRIDS, GridRun
from tests.soak.json_asks import make_json_asks, public_schemas
from tests.soak.tally import Outcome, Tally, table
from tests.support.tiny_chat import CHAT_VOCAB
from tests.support.tiny_model import tiny_spec
from tests.support.untrained_heads import write_tiny_head

TINY = "tiny"
SPEC = replace(tiny_spec(CHAT_VOCAB), max_position_embeddings=4096)
SHOWN = 50  # of what failed
MANY = 500  # answers of a drafter among which some must have lost their node in mid-stream
BLUR = 0.01  # of the draft model's weights: it is right often, and not always


def tiny_run(folder: Path, seed: int, count: int, suite: Path | None = None) -> GridRun:
    """Over a tiny random model with untrained heads of every kind, all written into ``folder``."""
    model = write_model(folder / "model", SPEC)
    names = [grid.drafter for grid in GRIDS if grid.drafter != "auto"]
    heads = {name: folder / name for name in names}
    for name, place in heads.items():
        if name == "draft_model":
            _write_blurred(write_model(place, SPEC))
        else:
            write_tiny_head(place, name, SPEC)
    heads["auto"] = heads["eagle3"]
    public = public_schemas(suite, GrammarCompiler(model, SPEC.vocab_size)) if suite else []
    return GridRun(str(model), model, heads, "fp32", make_json_asks(seed, count, public), seed)


def real_run(name: str, seed: int, count: int, suite: Path | None = None) -> GridRun:
    """Over a model that is in the cache, with the heads that ship for it; it is its own draft model."""
    folder = resolve_model(name)
    public = public_schemas(suite, GrammarCompiler(folder, ModelSpec.from_folder(folder).vocab_size)) if suite else []
    return GridRun(name, folder, {"draft_model": folder}, "bf16", make_json_asks(seed, count, public), seed)


def _write_blurred(folder: Path) -> None:
    generator = torch.Generator().manual_seed(5)
    file = folder / "model.safetensors"
    blurred = {}
    for name, tensor in load_file(file).items():
        noise = torch.randn(tensor.shape, generator=generator) * BLUR
        blurred[name] = tensor if tensor.ndim == 1 else (tensor + noise).to(tensor.dtype)
    save_file(blurred, file)


def add_to_file(file: Path, run: dict[str, Any]) -> None:
    """Append a run to a file of results, which begins with the totals by model and drafter."""
    kept = json.loads(file.read_text(encoding="utf-8"))["runs"] if file.exists() else []
    runs = [*kept, run]
    totals = sorted(totals_of(runs).items())
    content = {"totals": {name: vars(tally) for name, tally in totals}, "runs": runs}
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def totals_of(runs: Iterable[dict[str, Any]]) -> dict[str, Tally]:
    """All runs together, by ``model, drafter``."""
    totals: dict[str, Tally] = {}
    for run in runs:
        for drafter, counts in run["by_drafter"].items():
            totals.setdefault(f"{run['model']}, {drafter}", Tally()).add(counts)
    return totals


def failed(outcome: Outcome) -> list[str]:
    """Why a run does not pass; empty when it does."""
    why = list(outcome.wrong)
    if not outcome.streams.running_when_killed:
        why.append("no kill hit a sequence that ran: the run shows nothing about kills")
    for name, tally in outcome.by_drafter.items():
        if tally.answers >= MANY and not tally.moved:
            why.append(f"{name}: no stream lost its node after its first token")
    return why


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.answer_grid", description=__doc__)
    parser.add_argument("--requests", type=int, default=100, help="distinct requests; each is asked of every drafter")
    parser.add_argument("--seed", type=int, default=1, help="of requests and of kills")
    parser.add_argument("--model", default=TINY, help="tiny (random weights, untrained heads), or a model's name")
    parser.add_argument("--suite", type=Path, help="draft's folder of JSON-Schema-Test-Suite, for more schemas")
    parser.add_argument("--results", type=Path, help="file of results to which the run is added")
    parser.add_argument("--at-once", type=int, default=GridRun.at_once, help="streams")
    parser.add_argument("--kill-every", type=float, default=GridRun.kill_every_s, help="seconds, about, to the next")
    names = [grid.drafter for grid in GRIDS]
    parser.add_argument("--deployments", nargs="+", choices=names, default=names, help="by their own drafter")
    return parser.parse_args()


async def _run(arguments: argparse.Namespace, folder: Path) -> list[str]:
    """Returns what failed."""
    given = arguments.seed, arguments.requests, arguments.suite
    run = tiny_run(folder, *given) if arguments.model == TINY else real_run(arguments.model, *given)
    run = replace(run, at_once=arguments.at_once, kill_every_s=arguments.kill_every)
    why: list[str] = []
    runs: list[dict[str, Any]] = []
    for grid in (grid for grid in GRIDS if grid.drafter in arguments.deployments):
        began = time.monotonic()
        outcome = await run.ask(grid)
        about = {"model": arguments.model, "deployment": grid.drafter, "seed": arguments.seed}
        figures = about | outcome.figures() | {"seconds": round(time.monotonic() - began, 1)}
        runs.append(figures)
        if arguments.results:
            add_to_file(arguments.results, figures)
        print(
            f"{grid.drafter}: {figures['seconds']} s, {outcome.streams.running_when_killed} sequences on killed nodes"
        )
        why += failed(outcome)
    print(f"\n{table(totals_of(runs))}")
    return why


def main() -> int:
    """Run, and tell. Returns the exit status."""
    arguments = _arguments()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="paceline-grid-") as folder:
        why = asyncio.run(_run(arguments, Path(folder)))
    for line in why[:SHOWN]:
        print(f"FAILED {line}")
    return 1 if why else 0


if __name__ == "__main__":
    sys.exit(main())
