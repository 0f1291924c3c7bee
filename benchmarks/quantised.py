"""``python -m benchmarks.quantised [--schemes ...] [--quality FILE ...]``: what ``--quantize`` gains and what it costs.

Plain decoding and prompts of one process, scheme after scheme in each round, so that a machine that slows down slows
all of them; beside each the floor, the bytes that a step reads over the memory's bandwidth. The bandwidth of a shared
machine changes within minutes, so it is measured before and after each scheme's steps, and "share" is the median over
the rounds of what they reach of it. With ``--quality``, the perplexity of the files' text; with ``--written`` also that
of folders which ``paceline quantize`` writes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import cast

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.common.console import bar, step
from benchmarks.common.timing import read_bandwidth
from benchmarks.engine import PROMPT_TOKENS, decode_step_s, greedy, weight_bytes
from paceline.assembly.build import build_runner
from paceline.assembly.quantise import Job, Method, quantise
from paceline.assembly.selfcheck import logits_in_chunks
from paceline.config import NodeConfig
from paceline.engine.colocated import ColocatedEngine
from paceline.engine.model_runner import ModelRunner
from paceline.kvcache.layout import LayerOwner
from paceline.models.hub import resolve_model
from paceline.models.quantization.round_to_nearest import SCHEMES
from paceline.text.tokenizer import Tokenizer

BATCH, BATCH_TOKENS = 8, 64
PROMPTS = (128, 512, 1024)  # tokens
WINDOW, MOST_WINDOWS = 512, 48  # of text whose tokens are scored together, each without what comes before it


@dataclass(frozen=True)
class Speed:
    """One scheme: the best of the rounds, for what else runs on the machine only slows it down."""

    scheme: str
    weight_bytes: int  # that a step reads
    floor_tokens_per_s: float  # of decoding at batch 1, by the bandwidth beside the fastest round
    share: float  # of the floor of the same round, the median
    tokens_per_s: float
    batch_tokens_per_s: float  # of BATCH requests side by side
    ttft_ms: dict[int, float]  # by tokens of the prompt


@dataclass(frozen=True)
class Quality:
    """One scheme on a text."""

    scheme: str
    perplexity: float
    tokens: int


@dataclass(frozen=True)
class Round:
    """One scheme, once. bandwidth: bytes/s of the memory beside the steps of one request."""

    tokens_per_s: float
    bandwidth: float
    batch_tokens_per_s: float
    ttft_ms: dict[int, float]


def once(runner: ModelRunner) -> Round:
    """Tokens/s at batch 1 and at BATCH, and milliseconds to the first token of each length of prompt."""
    engine = ColocatedEngine(runner, max_running=BATCH)

    def timed(num: int, num_prompt: int, num_output: int) -> float:
        requests = [greedy(num_prompt, num_output, f"bench-{i}") for i in range(num)]
        began = time.perf_counter()
        engine.generate(requests)
        return time.perf_counter() - began

    ttft = {tokens: 1e3 * timed(1, tokens, 1) for tokens in PROMPTS}
    decoding = timed(BATCH, PROMPT_TOKENS, BATCH_TOKENS) - timed(BATCH, PROMPT_TOKENS, 1)
    before = read_bandwidth()
    tokens_per_s = 1.0 / decode_step_s(runner)
    bandwidth = (before + read_bandwidth()) / 2
    return Round(tokens_per_s, bandwidth, BATCH * (BATCH_TOKENS - 1) / decoding, ttft)


def measure(model: str, schemes: Sequence[str], threads: int, rounds: int) -> tuple[float, list[Speed]]:
    """The largest bytes/s of the memory, and a line for each scheme."""
    runners: dict[str, ModelRunner] = {}
    parts = (1 + rounds) * len(schemes)
    for scheme in schemes:
        step(len(runners), parts, f"loading: {scheme}")
        runners[scheme] = _runner(model, scheme, threads)
    seen: dict[str, list[Round]] = {scheme: [] for scheme in schemes}
    for number in range(rounds):
        for place, (scheme, runner) in enumerate(runners.items()):
            step((1 + number) * len(runners) + place, parts, f"round {number + 1}: {scheme}")
            seen[scheme].append(once(runner))
    speeds = [_speed(scheme, runner, seen[scheme]) for scheme, runner in runners.items()]
    return max(each.bandwidth for rounds_of in seen.values() for each in rounds_of), speeds


def _speed(scheme: str, runner: ModelRunner, rounds: Sequence[Round]) -> Speed:
    weights = weight_bytes(runner)
    read = weights + PROMPT_TOKENS * runner.kv.layout.token_bytes(LayerOwner.TARGET)
    fastest = max(rounds, key=lambda each: each.tokens_per_s)
    return Speed(
        scheme=scheme,
        weight_bytes=weights,
        floor_tokens_per_s=fastest.bandwidth / read,
        share=statistics.median(each.tokens_per_s * read / each.bandwidth for each in rounds),
        tokens_per_s=fastest.tokens_per_s,
        batch_tokens_per_s=max(each.batch_tokens_per_s for each in rounds),
        ttft_ms={tokens: min(each.ttft_ms[tokens] for each in rounds) for tokens in PROMPTS},
    )


def perplexities(model: str, schemes: Sequence[str], threads: int, files: Sequence[Path]) -> list[Quality]:
    """The perplexity of a text by each scheme."""
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    token_ids = Tokenizer.from_folder(resolve_model(model)).encode(text)
    windows = [token_ids[i : i + WINDOW] for i in range(0, len(token_ids) - WINDOW, WINDOW)][:MOST_WINDOWS]
    found = []
    for scheme in schemes:
        with bar(f"perplexity, {scheme}") as show_progress:
            losses = list(_losses(_runner(model, scheme, threads), windows, show_progress))
        found.append(Quality(scheme, math.exp(sum(losses) / len(losses)), len(losses)))
    return found


def written_perplexities(model: str, written: Sequence[str], threads: int, files: Sequence[Path]) -> list[Quality]:
    """The same of folders, each named by a scheme and a method, such as ``w8a8:smooth``."""
    found = []
    with tempfile.TemporaryDirectory() as scratch:
        for number, name in enumerate(written):
            scheme, _, method = name.partition(":")
            folder = Path(scratch) / str(number)
            with bar(f"writing {name}") as show_progress:
                _write(Job(model, scheme, folder, cast(Method, method), threads=threads), show_progress)
            found += [replace(one, scheme=name) for one in perplexities(str(folder), ["none"], threads, files)]
    return found


def _write(job: Job, show_progress: Callable[[int, int, str], None]) -> None:
    quantise(job, lambda what, share: show_progress(round(100 * share), 100, what))


def _losses(
    runner: ModelRunner, windows: Sequence[Sequence[int]], show_progress: Callable[[int, int, str], None]
) -> Iterator[float]:
    """Minus the logarithm of the probability of each token but a window's first."""
    for number, window in enumerate(windows):
        show_progress(number, len(windows), "windows of text")
        logits = logits_in_chunks(
            runner.model, runner.kv, runner.allocator, runner.attention, list(window), (len(window),)
        )
        logprobs = logits[:-1].log_softmax(-1)
        yield from (-logprobs.gather(1, torch.tensor(window[1:])[:, None])[:, 0]).tolist()


def _runner(model: str, scheme: str, threads: int) -> ModelRunner:
    options = {"model": model, "drafter": "none", "threads": threads, "kv_cache_tokens": 16384, "prefix_cache": False}
    return build_runner(NodeConfig.model_validate(options | {"quantize": scheme}))


def show(bandwidth: float, speeds: Sequence[Speed], qualities: Sequence[Quality]) -> None:
    """Print tables."""
    table = Table(title=f"memory reads up to {bandwidth / 1e9:.1f} GB/s")
    names = ("scheme", "weights MB", "B=1 tokens/s", "floor", "share", f"B={BATCH} tokens/s")
    for column in (*names, *(f"first of {tokens}, ms" for tokens in PROMPTS)):
        table.add_column(column)
    for s in speeds:
        figures = [s.weight_bytes / 1e6, s.tokens_per_s, s.floor_tokens_per_s]
        last = [s.batch_tokens_per_s, *s.ttft_ms.values()]
        table.add_row(s.scheme, *(f"{f:.1f}" for f in figures), f"{s.share:.2f}", *(f"{f:.0f}" for f in last))
    if speeds:
        Console(width=140).print(table)
    for q in qualities:
        ratio = q.perplexity / qualities[0].perplexity - 1.0
        print(f"{q.scheme}: perplexity {q.perplexity:.3f} over {q.tokens} tokens, {ratio:+.2%}")


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(prog="benchmarks.quantised", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--schemes", default=",".join(("none", *SCHEMES)), help="of --quantize, comma-separated")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=3, help="0 measures no speed")
    parser.add_argument("--quality", type=Path, nargs="*", default=[], help="files of text")
    parser.add_argument("--written", default="", help="by paceline quantize, such as w8a8:smooth,w4a16:gptq")
    parser.add_argument("--json", type=Path, help="file to write the results to")
    options = parser.parse_args()
    schemes: list[str] = options.schemes.split(",")
    bandwidth, speeds = 0.0, list[Speed]()
    if options.rounds:
        bandwidth, speeds = measure(options.model, schemes, options.threads, options.rounds)
    qualities = perplexities(options.model, schemes, options.threads, options.quality) if options.quality else []
    if options.written:
        qualities += written_perplexities(options.model, options.written.split(","), options.threads, options.quality)
    show(bandwidth, speeds, qualities)
    if options.json is not None:
        about = {"model": options.model, "threads": options.threads, "bandwidth": bandwidth}
        kept = about | {"speed": [asdict(s) for s in speeds], "quality": [asdict(q) for q in qualities]}
        options.json.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
