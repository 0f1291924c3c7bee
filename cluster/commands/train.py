"""``paceline make-corpus`` and ``train-drafter``: draft heads learn from a target's own answers.

Nothing heavy is imported before a command runs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from paceline.errors import ConfigError

if TYPE_CHECKING:
    from draft_training.answers import Made
    from draft_training.train import Progress as Trained

messages = Console(stderr=True, highlight=False)


# Long, since typer reads a command's options from its parameters.
def train_drafter(
    head: Annotated[str, typer.Argument(help="Kind of head: eagle3, eagle, mtp, mtp3 or medusa.")],
    corpus: Annotated[
        list[Path],
        typer.Option(
            help="JSON lines with prompt_ids and answer_ids, from make-corpus; .xz and .gz too. May be repeated."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder for checkpoint, history and plot. The head goes to OUT/head.")],
    model: Annotated[
        str, typer.Option(help="The target: a known model, a folder or a hub id.")
    ] = "smollm2-135m-instruct",
    minutes: Annotated[
        float, typer.Option(min=0.01, help="Longest time of this run. A later run goes on from OUT.")
    ] = 60.0,
    steps: Annotated[
        int, typer.Option(min=1, help="Optimiser steps of this run at most, if its minutes last.")
    ] = 1_000_000,
    learning_rate: Annotated[
        float, typer.Option(min=1e-7, max=1.0, help="Highest learning rate of the schedule.")
    ] = 6e-4,
    tokens_per_step: Annotated[int, typer.Option(min=1, help="Tokens that one optimiser step trains on.")] = 512,
    draft_steps: Annotated[
        int, typer.Option(min=0, help="Draft positions to train in this run, first ones first; 0 trains all.")
    ] = 0,
    share: Annotated[
        list[str] | None,
        typer.Option(
            help="SOURCE=PART uses only this part, 0 to 1, of the samples whose source begins so. May be repeated."
        ),
    ] = None,
    prompts: Annotated[
        bool, typer.Option("--prompts", help="Train on the prompts' tokens too, not answers only.")
    ] = False,
    cache: Annotated[
        Path | None, typer.Option(help="Folder for the target's hidden rows. Not given: OUT/features.")
    ] = None,
    device: Annotated[str, typer.Option(help="Where to compute: cpu or cuda.")] = "cpu",
    threads: Annotated[int, typer.Option(min=0, help="Cores to compute on; 0 takes all.")] = 0,
    held_out: Annotated[int, typer.Option(min=1, help="Samples to measure on; none of them is trained on.")] = 200,
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
        train=TrainConfig(
            minutes, steps, tokens_per_step, draft_steps, prompts, parse_shares(share or ()), learning_rate
        ),
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


def parse_shares(items: Sequence[str]) -> dict[str, float]:
    """``SOURCE=PART`` items. Raises ConfigError."""
    shares: dict[str, float] = {}
    for item in items:
        source, equals, part = item.rpartition("=")
        try:
            shares[source] = float(part)
        except ValueError:
            equals = ""
        if not equals or not 0.0 <= shares.get(source, -1.0) <= 1.0:
            raise ConfigError("share", f"{item!r} is not SOURCE=PART with a part between 0 and 1")
    return shares


def make_corpus(
    out: Annotated[Path, typer.Option(help="File to write, in JSON lines. A run goes on where the file ends.")],
    model: Annotated[str, typer.Option(help="A known model, a folder or a hub id.")] = "smollm2-135m-instruct",
    prompts: Annotated[
        list[Path] | None,
        typer.Option(help='JSON lines {"prompt": ..., "source": ...}; .xz and .gz too. May be repeated.'),
    ] = None,
    self_made: Annotated[
        int, typer.Option(min=0, help="Prompts that the model makes itself, after those of files.")
    ] = 0,
    max_answer_tokens: Annotated[int, typer.Option(min=1, help="Length at which answers are cut, in tokens.")] = 256,
    batch: Annotated[int, typer.Option(min=1, max=4096, help="Sequences that are generated together.")] = 64,
    seed: Annotated[
        int, typer.Option(min=0, max=2**32 - 1, help="The same seed and options give the same corpus.")
    ] = 0,
    device: Annotated[str, typer.Option(help="Where to compute: cpu or cuda.")] = "cpu",
    threads: Annotated[int, typer.Option(min=0, help="Cores to compute on; 0 takes all.")] = 0,
) -> None:
    """Make a corpus of the target's own answers, to train draft heads on; resumable."""
    missing = [path for path in prompts or () if not path.is_file()]
    if missing:
        raise ConfigError("prompts", f"{missing[0]} does not exist")
    from draft_training.corpus_job import CorpusJob, run_corpus_job

    job = CorpusJob(
        model, out, tuple(prompts or ()), self_made, max_answer_tokens, batch, seed, device,
        threads or os.cpu_count() or 1,
    )  # fmt: skip
    columns = (
        TextColumn("prompts"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
        TextColumn("{task.fields[state]}"),
    )  # fmt: skip
    with Progress(*columns, console=messages) as bar:
        task = bar.add_task("prompts", total=None, state="loading the model")
        began: tuple[float, int] | None = None  # time and answer tokens at the first report

        def report(made: Made) -> None:
            nonlocal began
            now = time.monotonic()
            began = began or (now, made.answer_tokens)
            rate = (made.answer_tokens - began[1]) / max(now - began[0], 1e-9)
            state = f"{made.answer_tokens:,} tokens, {rate:.0f} tokens/s, {made.left_out:,} left out"
            bar.update(task, total=made.total, completed=made.answers + made.left_out, state=state)

        made = run_corpus_job(job, report)
    typer.echo(f"{out}: {made.answers:,} answers, {made.answer_tokens:,} tokens, {made.left_out:,} prompts left out")
