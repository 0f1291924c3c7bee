"""``paceline quantize``: write a model folder with rounded weights. Nothing heavy is imported before it runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from cluster.commands.console import errors


def quantize(
    model: Annotated[str, typer.Argument(help="A folder of floats, a known model or a hub id.")],
    scheme: Annotated[
        str,
        typer.Option(
            help="Bits of weights, then of inputs: w8a8, w4a8, w8a16 or w4a16. a16 leaves inputs as they are."
        ),
    ],
    output: Annotated[Path, typer.Option(help="Folder to write; it must not exist.")],
    method: Annotated[
        Literal["nearest", "gptq", "smooth", "smooth-gptq"],
        typer.Option(
            help="nearest: every weight to its nearest code. gptq: codes make up for each other's errors (4 bits). "
            "smooth: ranges of inputs are moved into weights first, by powers of two. smooth-gptq: both."
        ),
    ] = "nearest",
    group_size: Annotated[
        int,
        typer.Option(help="Weights that share a scale of 4 bits: 32, or 64 or 128 that divide every layer's width."),
    ] = 32,
    calibration: Annotated[
        Path | None,
        typer.Option(help="Text file to calibrate on. Not given: text that the model writes itself."),
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="Text file to measure perplexity on. Not given: one that comes with Paceline.")
    ] = None,
    threads: Annotated[int, typer.Option(min=0, help="Cores to compute on; 0 takes all.")] = 0,
) -> None:
    """Round a model's linear layers to 8 or 4 bits, write it, and say in its README.md what that cost."""
    from paceline.assembly.quantise import HELD_TEXT, Job, quantise

    job = Job(model, scheme, output, method, calibration, text or HELD_TEXT, threads or os.cpu_count() or 1, group_size)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    with Progress(*columns, console=errors, transient=True) as bar:
        tasks: dict[str, Any] = {}

        def show(what: str, share: float) -> None:
            if what not in tasks:
                if not errors.is_terminal:
                    errors.print(f"{model}: {what}", soft_wrap=True)
                tasks[what] = bar.add_task(what, total=1.0)
            bar.update(tasks[what], completed=share)

        written, cost = quantise(job, show)
    smaller = written.bytes_before / written.bytes_after
    typer.echo(
        f"{output}: {written.bytes_after:,} bytes of weights ({smaller:.2f} times fewer), perplexity "
        f"{cost.perplexity_before:.3f} to {cost.perplexity_after:.3f}"
    )
