"""``paceline train-drafter``: train draft heads on a target's own answers. Nothing heavy is imported before it runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from paceline.errors import ConfigError

if TYPE_CHECKING:
    from draft_training.train import Progress as Trained

messages = Console(stderr=True, highlight=False)


def train_drafter(
    head: Annotated[str, typer.Argument(help="eagle3, eagle, mtp, mtp3 or medusa.")],
    corpus: Annotated[list[Path], typer.Option(help="JSON lines with prompt_ids and answer_ids; .xz and .gz too.")],
    out: Annotated[Path, typer.Option(help="Checkpoint, history and plot; the head goes to OUT/head.")],
    model: Annotated[str, typer.Option(help="A known model, a folder or a hub id.")] = "smollm2-135m-instruct",
    minutes: Annotated[float, typer.Option(min=0.01, help="Bound of this run; a later run goes on from OUT.")] = 60.0,
    steps: Annotated[int, typer.Option(min=1, help="Bound of this run, whichever ends first.")] = 1_000_000,
    learning_rate: Annotated[float, typer.Option(min=1e-7, max=1.0, help="Peak.")] = 6e-4,
    cache: Annotated[Path | None, typer.Option(help="The target's features; default: below OUT.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    threads: Annotated[int, typer.Option(min=0, help="0: one per core.")] = 0,
    held_out: Annotated[int, typer.Option(min=1, help="Samples never trained on.")] = 200,
) -> None:
    """Train a draft head on the target's own answers; resumable, CPU or CUDA."""
    from draft_training.job import HEADS, Job, run_job
    from draft_training.train import TrainConfig

    if head not in HEADS:
        raise ConfigError("head", f"{head!r} is not one of {', '.join(HEADS)}")
    missing = [path for path in corpus if not path.is_file()]
    if missing:
        raise ConfigError("corpus", f"{missing[0]} does not exist")
    job = Job(
        head, model, tuple(corpus), out, cache or out / "features", device, threads or os.cpu_count() or 1, held_out,
        train=TrainConfig(minutes=minutes, steps=steps, learning_rate=learning_rate),
    )  # fmt: skip
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.fields[state]}"))
    with Progress(*columns, console=messages) as bar:
        task = bar.add_task(head, total=1.0, state="reading the corpus")

        def report(trained: Trained, share: float) -> None:
            last = trained.history[-1]
            rates = " ".join(f"{rate:.2f}" for rate in last["accepted_per_position"])
            state = f"step {trained.step}, {trained.tokens:,} tokens, length {last['acceptance_length']:.2f} ({rates})"
            bar.update(task, completed=share, state=state)

        found = run_job(job, report)
    typer.echo(f"{out / 'head'}: {found.length:.3f} tokens a round on held-out answers")
