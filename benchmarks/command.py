"""``paceline bench``: what serving, speculation and the hand-off do on this machine.

Nothing heavy is imported before a command runs.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from benchmarks import server_commands
from benchmarks.common.console import bar, tables_on

if TYPE_CHECKING:
    from benchmarks.jobs import Inputs

bench = typer.Typer(
    help="Measure serving, speculation and the hand-off on this machine.", no_args_is_help=True, add_completion=False
)
bench.command()(server_commands.serving)
bench.command()(server_commands.peers)
bench.command()(server_commands.widths)

ModelOption = Annotated[str, typer.Option(help="A known model, a folder or a hub id.")]
DraftersOption = Annotated[
    str, typer.Option(help="Drafters, separated by commas; options after a colon: eagle3:tree=dynamic,width=4,k=5.")
]
PromptsOption = Annotated[Path, typer.Option(help='JSON lines: Spec-Bench\'s format, or {"prompt": ...}.')]
TokensOption = Annotated[int, typer.Option(min=1, help="Tokens to generate per prompt at most.")]
TemperatureOption = Annotated[
    float, typer.Option(min=0.0, max=100.0, help="Randomness of sampling; 0 takes the likeliest token.")
]
DtypeOption = Annotated[str, typer.Option(help="Number format: bf16 or fp32.")]
DeviceOption = Annotated[str, typer.Option(help="Where to compute: cpu or cuda.")]
ThreadsOption = Annotated[int, typer.Option(min=0, help="Cores to compute on; 0 takes all.")]
LimitOption = Annotated[int | None, typer.Option(min=1, help="Prompts of each category at most.")]
LongestOption = Annotated[int, typer.Option(min=1, help="Longer prompts are left out and counted, in tokens.")]
ContextOption = Annotated[
    int, typer.Option(min=0, help="Other prompts' texts go before each question until it has so many tokens; 0: none.")
]
ChatOption = Annotated[bool, typer.Option(help="Apply the model's chat template.")]
SeedOption = Annotated[int, typer.Option(min=0, help="Seed of sampling; each prompt adds its number.")]
TurnsOption = Annotated[
    Literal["first", "all"], typer.Option(help="How many user turns of a Spec-Bench question to ask.")
]
BatchesOption = Annotated[str, typer.Option(help="Batch sizes, separated by commas.")]
JsonOption = Annotated[Path | None, typer.Option("--json", help="Write the results here.")]
PlotOption = Annotated[Path | None, typer.Option(help="Draw the plot here (PNG); beside --json when not given.")]
MarkdownOption = Annotated[Path | None, typer.Option(help="Write the table here.")]


@bench.command()
def speculation(
    prompts: PromptsOption,
    model: ModelOption = "smollm2-135m-instruct",
    drafters: DraftersOption = "none,ngram",
    max_tokens: TokensOption = 128,
    temperature: TemperatureOption = 0.0,
    dtype: DtypeOption = "bf16",
    device: DeviceOption = "cpu",
    threads: ThreadsOption = 0,
    turns: TurnsOption = "first",
    limit_per_category: LimitOption = None,
    max_prompt_tokens: LongestOption = 1536,
    context: ContextOption = 0,
    chat: ChatOption = True,
    seed: SeedOption = 0,
    json: JsonOption = None,
    plot: PlotOption = None,
    markdown: MarkdownOption = None,
) -> None:
    """Run every drafter on every prompt, one at a time: acceptance length, tokens/s, speed-up over none, costs."""
    from benchmarks import jobs, plots, tables

    outputs = jobs.Outputs(json, plot, markdown)
    outputs.check()
    inputs = _inputs(
        model,
        prompts,
        drafters,
        limit_per_category,
        chat,
        threads,
        max_tokens=max_tokens,
        temperature=temperature,
        dtype=dtype,
        device=device,
        seed=seed,
        turns=turns,
        max_prompt_tokens=max(max_prompt_tokens, context),
        context=context,
    )
    with bar("prompts") as show:
        report = jobs.run_speculation(inputs, show)
    grid = tables.speculation_grid(report)
    outputs.write(report.to_json(), grid, lambda path: plots.plot_speculation(report, path), tables_on)


@bench.command()
def sweep(
    prompts: PromptsOption,
    model: ModelOption = "smollm2-135m-instruct",
    drafters: DraftersOption = "none,ngram",
    batches: BatchesOption = "1,2,4,8,16,32",
    max_tokens: TokensOption = 64,
    temperature: TemperatureOption = 0.0,
    dtype: DtypeOption = "bf16",
    device: DeviceOption = "cpu",
    threads: ThreadsOption = 0,
    limit_per_category: LimitOption = None,
    max_prompt_tokens: LongestOption = 512,
    context: ContextOption = 0,
    chat: ChatOption = True,
    seed: SeedOption = 0,
    json: JsonOption = None,
    plot: PlotOption = None,
    markdown: MarkdownOption = None,
) -> None:
    """Run drafters over batch sizes, to see where speculation stops paying. Exit code 1 when an adaptive run falls
    behind."""
    from benchmarks import jobs, plots, tables

    outputs = jobs.Outputs(json, plot, markdown)
    outputs.check()
    sizes = jobs.parse_batches(batches)
    inputs = _inputs(
        model,
        prompts,
        drafters,
        limit_per_category,
        chat,
        threads,
        max_tokens=max_tokens,
        temperature=temperature,
        dtype=dtype,
        device=device,
        seed=seed,
        turns="first",
        max_prompt_tokens=max(max_prompt_tokens, context),
        context=context,
    )
    with bar("batch sizes") as show:
        report = jobs.run_sweep(inputs, sizes, show)
    grid = tables.sweep_grid(report)
    outputs.write(report.to_json(), grid, lambda path: plots.plot_sweep(report, path), tables_on)
    if not report.holds:
        sys.exit(1)


@bench.command()
def handoff(
    model: ModelOption = "smollm2-135m-instruct",
    prompt_tokens: Annotated[int, typer.Option(min=32, help="Tokens of the prompt that is handed over.")] = 2000,
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Prompt tokens of one prefill step.")] = 256,
    drafter: Annotated[str, typer.Option(help="Drafter of the deployment.")] = "default",
    dtype: DtypeOption = "bf16",
    repeats: Annotated[int, typer.Option(min=1, help="Repetitions; medians are shown.")] = 7,
    launches: Annotated[
        int, typer.Option(min=1, help="How often the nodes are started; launches share the repetitions.")
    ] = 5,
    json: JsonOption = None,
    markdown: MarkdownOption = None,
) -> None:
    """Time a hand-off beside its prefill, against a raw gloo copy. Exit code 1 when a bound is missed."""
    from benchmarks import jobs, tables
    from benchmarks.handoff import bench as bench_handoff
    from benchmarks.handoff.report import HandoffSettings, handoff_grid
    from cluster.commands.fetch import fetch_model

    jobs.Outputs(json, None, markdown).check()
    fetch_model(model)
    settings = HandoffSettings(model, prompt_tokens, chunk_tokens, repeats, drafter, dtype, launches)
    with bar("hand-off") as show:
        report = bench_handoff.run(settings, show)
    grid = handoff_grid(report)
    tables_on.print(tables.rich_table(grid))
    if json is not None:
        json.write_text(report.to_json() + "\n", encoding="utf-8")
    if markdown is not None:
        markdown.write_text(tables.markdown(grid), encoding="utf-8")
    if not report.holds:
        sys.exit(1)


def _inputs(
    model: str,
    prompts: Path,
    drafters: str,
    limit: int | None,
    chat: bool,
    threads: int,
    **settings: Any,
) -> Inputs:
    """Read what can be read before the model is fetched, then fetch it."""
    from benchmarks import jobs
    from benchmarks.speculation.bench import Settings
    from cluster.commands.fetch import fetch_model

    runs, questions = jobs.parse_inputs(drafters, prompts)
    folder = fetch_model(model)
    asked = Settings(model=Path(model).name, prompts=prompts.name, threads=threads or os.cpu_count() or 1, **settings)
    return jobs.Inputs.read(folder, asked, runs, questions, limit, chat)
