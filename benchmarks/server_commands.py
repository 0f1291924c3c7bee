"""``paceline bench serving``, ``peers`` and ``widths``: servers under load, ours and others.

Nothing heavy is imported before a command runs.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from benchmarks.common.console import bar, messages, tables_on
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from benchmarks.serving.arrivals import Arrival, Mix
    from benchmarks.serving.deployments import Setting

DEFAULT_REQUESTS = 40
MAX_RATES = 16


# Long, because a command's options are its parameters.
def serving(
    model: Annotated[str, typer.Option(help="Model to serve, and whose tokenizer counts prompt tokens.")] = (
        "smollm2-135m-instruct"
    ),
    url: Annotated[
        list[str] | None,
        typer.Option(help="Measure this running server (http://HOST:PORT or NAME=http://...) instead."),
    ] = None,
    peers: Annotated[
        str, typer.Option(help="Also start and measure these, made by benchmarks.peers.install: llama.cpp, vllm.")
    ] = "",
    layouts: Annotated[str, typer.Option(help="Deployments of ours, separated by commas.")] = "apart,one node",
    drafters: Annotated[str, typer.Option(help="Drafters of each layout, separated by commas.")] = "none,default",
    serve_options: Annotated[str, typer.Option(help="Further options of `paceline serve` for each deployment.")] = "",
    rate: Annotated[float, typer.Option(min=0.001, help="Requests a second, on average.")] = 1.0,
    rates: Annotated[str, typer.Option(help="Several rates, separated by commas, instead of --rate.")] = "",
    requests: Annotated[
        int | None, typer.Option(min=1, help="End after so many requests; 40 with no --duration.")
    ] = None,
    duration: Annotated[float | None, typer.Option(min=0.1, help="End arrivals after so many seconds.")] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Arrivals from a CSV file: timestamp,prompt_tokens,output_tokens.")
    ] = None,
    prompt_tokens: Annotated[str, typer.Option(help="Prompt lengths and weights: 64:2,256,1024.")] = "64,256,1024",
    output_tokens: Annotated[str, typer.Option(help="Output lengths at most, and weights.")] = "64",
    prompts: Annotated[
        Path | None,
        typer.Option(help='JSON lines: Spec-Bench\'s format, or {"prompt": ...}; kept texts when not given.'),
    ] = None,
    api: Annotated[Literal["chat", "completions"], typer.Option(help="Endpoint to ask.")] = "chat",
    temperature: Annotated[float, typer.Option(min=0.0, max=100.0, help="0 takes the likeliest token.")] = 0.0,
    ignore_eos: Annotated[bool, typer.Option(help="Generate to the full length, past the end of sequence.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of arrivals, lengths and sampling.")] = 0,
    repeats: Annotated[int, typer.Option(min=1, help="Repetitions; servers forwards and backwards in turn.")] = 1,
    warm_up: Annotated[int, typer.Option(min=0, help="Requests to each server that are not counted.")] = 2,
    max_outstanding: Annotated[int, typer.Option(min=1, help="A request beyond so many outstanding ones fails.")] = 256,
    deadline_s: Annotated[float, typer.Option(min=0.1, help="A request fails after so many seconds.")] = 120.0,
    ttft_ms: Annotated[float, typer.Option(min=1, help="Objective: time to the first token.")] = 2000.0,
    tpot_ms: Annotated[float, typer.Option(min=1, help="Objective: time per token after the first.")] = 100.0,
    json: Annotated[Path | None, typer.Option("--json", help="Write the results here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw here (PNG or SVG); beside --json when not given.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the table here.")] = None,
) -> None:
    """Load servers with requests that arrive at random or by a trace: latencies, tokens/s, goodput. Without --url it
    compares deployments of ours; exit code 1 when their texts differ."""
    from benchmarks.jobs import Outputs
    from benchmarks.serving import bench, questions
    from benchmarks.serving.arrivals import parse_mix
    from benchmarks.serving.client import Limits
    from benchmarks.serving.measures import Objective
    from benchmarks.serving.plot import plot as draw
    from benchmarks.serving.report import grid

    outputs = Outputs(json, plot, markdown)
    outputs.check()
    prompt_mix, output_mix = parse_mix(prompt_tokens, "prompt_tokens"), parse_mix(output_tokens, "output_tokens")
    arrivals = _arrivals(trace, rates or f"{rate:g}", bool(rates), requests, duration, prompt_mix, output_mix, seed)
    settings = _settings(model, url or [], peers, layouts, drafters, serve_options)
    texts = questions.read(prompts)
    load = bench.Load(
        model=Path(model).name,
        arrivals=arrivals,
        source=trace.name if trace else "Poisson",
        questions=texts,
        prompts=prompts.name if prompts else "kept texts",
        count=questions.counter(_fetched(model), chat=api == "chat"),
        prompt_mix="the trace's" if trace else prompt_tokens,
        output_mix="the trace's" if trace else output_tokens,
        objective=Objective(ttft_ms, tpot_ms),
        limits=Limits(max_outstanding, deadline_s),
        api=api,
        temperature=temperature,
        ignore_eos=ignore_eos,
        seed=seed,
        repeats=repeats,
        warm_up=warm_up,
    )
    with bar("serving") as show:
        report = bench.run(load, settings, show)
    outputs.write(report.to_json(), grid(report), lambda path: draw(report, path), tables_on)
    if not report.holds:
        messages.print("texts differ between deployments of ours")
        sys.exit(1)


def _arrivals(
    trace: Path | None,
    rates: str,
    scaled: bool,
    requests: int | None,
    duration: float | None,
    prompts: Mix,
    outputs: Mix,
    seed: int,
) -> dict[float, list[Arrival]]:
    """Requests by rate. A trace keeps its own times unless rates are given."""
    from benchmarks.serving.arrivals import at_rate, mean_rate, poisson, read_trace

    if requests is None and duration is None:
        requests = DEFAULT_REQUESTS
    if trace is not None and not scaled:
        found = read_trace(trace, requests=requests, duration_s=duration)
        return {round(mean_rate(found), 3): found}
    try:
        values = sorted({float(one) for one in rates.split(",")})
    except ValueError:
        raise ConfigError("rates", f"must be numbers separated by commas, got {rates!r}") from None
    if len(values) > MAX_RATES or values[0] <= 0:
        raise ConfigError("rates", f"must be at most {MAX_RATES} numbers above 0, got {rates!r}")
    if trace is not None:
        found = read_trace(trace, requests=requests, duration_s=duration)
        return {value: at_rate(found, value) for value in values}
    return {value: poisson(value, seed, prompts, outputs, requests=requests, duration_s=duration) for value in values}


def _settings(model: str, urls: list[str], peers: str, layouts: str, drafters: str, options: str) -> list[Setting]:
    from benchmarks.serving.deployments import by_url, deployments

    if urls:
        return [by_url(url) for url in urls]
    found = deployments(model, _items(layouts), _items(drafters), shlex.split(options))
    if peers:
        from benchmarks.peers.servers import peer_settings

        found += peer_settings(_items(peers), _fetched(model))
    return found


def _items(text: str) -> list[str]:
    return [item.strip() for item in text.split(",") if item.strip()]


def _fetched(model: str) -> Path:
    from cluster.commands.fetch import fetch_model

    return fetch_model(model)


def peers(
    prompts: Annotated[
        Path | None,
        typer.Option(help='JSON lines: Spec-Bench\'s format, or {"prompt": ...}; kept texts when not given.'),
    ] = None,
    model: Annotated[str, typer.Option(help="Model to compare on.")] = "smollm2-135m-instruct",
    only: Annotated[str, typer.Option(help="These alone: paceline, transformers, llama.cpp, vllm, openvino.")] = "",
    limit: Annotated[int, typer.Option(min=1, help="Prompts to decode.")] = 6,
    max_tokens: Annotated[int, typer.Option(min=8, help="Tokens to generate per prompt at most.")] = 64,
    long_prompt_tokens: Annotated[int, typer.Option(min=16, help="Prompt of the time to first token.")] = 1024,
    json: Annotated[Path | None, typer.Option("--json", help="Write the results here.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the table here.")] = None,
) -> None:
    """Compare with other engines, one request at a time: tokens/s plain and speculative, time to first token."""
    from benchmarks import tables
    from benchmarks.jobs import Outputs
    from benchmarks.peers import bench as bench_peers
    from benchmarks.serving import questions

    Outputs(json, None, markdown).check()
    folder, texts = _fetched(model), questions.read(prompts)
    named = prompts.name if prompts else "kept texts"
    plan = bench_peers.plan(folder, texts, named, limit, max_tokens, long_prompt_tokens)
    with bar("peers") as show:
        report = bench_peers.run(plan, model, folder, _items(only), show)
    grid = bench_peers.grid(report)
    tables_on.print(tables.rich_table(grid))
    if json is not None:
        json.write_text(report.to_json() + "\n", encoding="utf-8")
    if markdown is not None:
        markdown.write_text(tables.markdown(grid), encoding="utf-8")


def widths(
    prompts: Annotated[
        Path | None,
        typer.Option(help='JSON lines: Spec-Bench\'s format, or {"prompt": ...}; kept texts when not given.'),
    ] = None,
    model: Annotated[str, typer.Option(help="Model to compare on.")] = "smollm2-135m-instruct",
    only: Annotated[str, typer.Option(help="These alone: paceline, llama.cpp, openvino.")] = "",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of all engines; the best of them counts.")] = 3,
    max_tokens: Annotated[int, typer.Option(min=8, help="Tokens that each stream gets.")] = 64,
    json: Annotated[Path | None, typer.Option("--json", help="Write the results here.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the tables here.")] = None,
) -> None:
    """Compare weights of 16, 8 and 4 bits with llama.cpp and OpenVINO: tokens/s of one stream and of 8, time to first
    token, and ratios. Exit code 1 when a ratio is missed."""
    from benchmarks import tables
    from benchmarks.jobs import Outputs
    from benchmarks.peers import width_goals
    from benchmarks.peers import widths as bench_widths
    from benchmarks.serving import questions

    Outputs(json, None, markdown).check()
    folder, texts = _fetched(model), questions.read(prompts)
    plan = bench_widths.plan(folder, texts, prompts.name if prompts else "kept texts", max_tokens)
    with bar("widths") as show:
        report = bench_widths.run(plan, model, folder, _items(only), rounds, show)
    grids = (width_goals.grid(report), width_goals.goal_grid(report))
    for grid in grids:
        tables_on.print(tables.rich_table(grid))
    if json is not None:
        json.write_text(report.to_json() + "\n", encoding="utf-8")
    if markdown is not None:
        markdown.write_text("\n".join(map(tables.markdown, grids)), encoding="utf-8")
    if any(goal.holds is False for goal in width_goals.goals(report)):
        sys.exit(1)
