"""``python -m benchmarks.ranks [--degrees 1,3] [--model ...]``: what several ranks cost a node, in time and in bytes.

Plain decoding of one process, degree after degree in each round, so that a machine that slows down slows all of them.
The bytes that cross between the ranks in a step are counted and stand beside what the shapes say. A last table compares
a node of one rank whose products have the model's slabs with the same node whose products have one sum.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest import mock

from rich.console import Console
from rich.table import Table

from benchmarks.common.console import step
from benchmarks.engine import PROMPT_TOKENS, decode_step_s, greedy
from paceline.assembly.build import build_runner
from paceline.config import NodeConfig
from paceline.engine.model_runner import ModelRunner, PrefillChunk
from paceline.models.llama import LlamaModel
from paceline.ranks.channel import Array, Channel, Kind
from paceline.ranks.target import ParallelTarget

BATCHES = (1, 8)
WARM_STEPS, COUNTED_STEPS = 8, 10
HEADER_BYTES = 24 + 8  # of a frame with one field


@dataclass(frozen=True)
class Cost:
    """One degree at one batch. Bytes: of one step, over all channels that rank 0 has to the others."""

    degree: int
    batch: int
    step_ms: float  # the best of the rounds
    command_bytes: int
    sent_sum_bytes: int  # by rank 0, of what it tells the others in collectives
    formula_bytes: int  # the same, from the shapes


@contextmanager
def counted() -> Iterator[Counter[Kind]]:
    """Bytes that this process sends to other ranks, by kind of frame."""
    seen: Counter[Kind] = Counter()
    send = Channel.send

    def counting(self: Channel, kind: Kind, number: int = 0, fields: Sequence[Array] = ()) -> None:
        seen[kind] += HEADER_BYTES - 8 + sum(8 + field.nbytes for field in fields)
        send(self, kind, number, fields)

    with mock.patch.object(Channel, "send", counting):
        yield seen


def step_s(runner: ModelRunner, batch: int, steps: int) -> float:
    """Median seconds of a plain step of ``batch`` sequences."""
    if batch == 1:
        return decode_step_s(runner, steps)
    seqs = [runner.new_sequence(greedy(PROMPT_TOKENS, 4 * steps, f"bench-{i}")) for i in range(batch)]
    for seq in seqs:
        seq.table.ensure(PROMPT_TOKENS + 4 * steps + runner.spec_slots + 16)
        runner.prefill([PrefillChunk(seq, seq.num_computed, seq.num_prefill)])
    times = []
    for _ in range(steps):
        began = time.perf_counter()
        runner.decode(seqs)
        times.append(time.perf_counter() - began)
    for seq in seqs:
        seq.table.release()
    return statistics.median(times[3:])


def bytes_of_step(runner: ModelRunner, batch: int) -> tuple[int, int, int]:
    """What commands take, what rank 0 tells in collectives, and the latter by the shapes."""
    if not isinstance(runner.model, ParallelTarget):
        return 0, 0, 0
    with counted() as fewer:  # the prompts, and some steps
        step_s(runner, batch, WARM_STEPS)
    with counted() as more:
        step_s(runner, batch, WARM_STEPS + COUNTED_STEPS)
    per_step = {kind: (more[kind] - fewer[kind]) // COUNTED_STEPS for kind in more}
    spec, others = runner.model.spec, runner.model.followers.degree - 1
    row = batch * spec.hidden_size * runner.model.dtype.itemsize + HEADER_BYTES
    collectives = 2 * spec.num_layers + 1  # o and down of every layer, and the embedding
    commands = sum(count for kind, count in per_step.items() if kind is not Kind.PART)
    return commands, per_step[Kind.PART], others * collectives * row


def measure(model: str, degrees: Sequence[int], threads: int, rounds: int) -> list[Cost]:
    """A line for each degree and batch."""
    runners: dict[int, ModelRunner] = {}
    best: dict[tuple[int, int], float] = {}
    parts = (2 + rounds) * len(degrees)
    try:
        for degree in degrees:
            step(len(runners), parts, f"loading: {degree} ranks")
            runners[degree] = _runner(model, degree, threads)
        for number in range(rounds):
            for place, (degree, runner) in enumerate(runners.items()):
                step((1 + number) * len(runners) + place, parts, f"round {number + 1}: {degree} ranks")
                for batch in BATCHES:
                    key = (degree, batch)
                    best[key] = min(best.get(key, 1e9), step_s(runner, batch, 24))
        found = []
        for place, (degree, runner) in enumerate(runners.items()):
            step((1 + rounds) * len(runners) + place, parts, f"bytes of a step: {degree} ranks")
            for batch in BATCHES:
                found.append(Cost(degree, batch, 1e3 * best[degree, batch], *bytes_of_step(runner, batch)))
        return found
    finally:
        for runner in runners.values():
            runner.close()


def slabs_over_one_sum(model: str, threads: int, pairs: int) -> dict[int, float]:
    """By batch, the median ratio of the time of a step with slabs to that of one without, in the same weights."""
    runner = _runner(model, 1, threads)
    assert isinstance(runner.model, LlamaModel)
    linears = [linear for layer in runner.model.layers for linear in (layer.o_proj, layer.down_proj)]
    slabs = [linear.slabs for linear in linears]
    found: dict[int, float] = {}
    for batch in BATCHES:
        ratios = []
        for pair in range(pairs):
            step(len(found) * pairs + pair, len(BATCHES) * pairs, f"with slabs and without, batch {batch}")
            took = {}
            for with_slabs in (True, False) if pair % 2 else (False, True):
                for linear, count in zip(linears, slabs, strict=True):  # what the kernel reads at each call
                    linear._matrix._matrix.slabs = count if with_slabs else 1
                took[with_slabs] = step_s(runner, batch, 12)
            ratios.append(took[True] / took[False])
        found[batch] = statistics.median(ratios)
    return found


def _runner(model: str, degree: int, threads: int) -> ModelRunner:
    options = {"model": model, "drafter": "none", "kv_cache_tokens": 16384, "prefix_cache": False, "tp": degree}
    return build_runner(NodeConfig.model_validate(options | {"threads": threads * degree}))


def show(costs: Sequence[Cost], ratios: dict[int, float]) -> None:
    """Print tables."""
    table = Table(title="a plain decode step")
    for column in ("ranks", "batch", "ms", "bytes of commands", "bytes of sums", "by the shapes"):
        table.add_column(column, justify="right")
    for cost in costs:
        figures = (cost.command_bytes, cost.sent_sum_bytes, cost.formula_bytes)
        table.add_row(str(cost.degree), str(cost.batch), f"{cost.step_ms:.1f}", *(f"{figure:,}" for figure in figures))
    Console(width=120).print(table)
    told = ", ".join(f"{ratio:.3f} at batch {batch}" for batch, ratio in ratios.items())
    print(f"one rank, a step with slabs over one without: {told}")


def main() -> None:
    """Measure, print, and keep the figures where ``--json`` says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--degrees", default="1,3", help="numbers of ranks, separated by commas")
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    options = parser.parse_args()
    degrees = [int(degree) for degree in options.degrees.split(",")]
    costs = measure(options.model, degrees, options.threads, options.rounds)
    ratios = slabs_over_one_sum(options.model, options.threads, 4 * options.rounds)
    show(costs, ratios)
    if options.json:
        options.json.write_text(json.dumps({"steps": [asdict(c) for c in costs], "slabs": ratios}, indent=1) + "\n")


if __name__ == "__main__":
    main()
