"""``python -m benchmarks.lanes [--tp 3]``: hand-offs between two nodes of several ranks, for each ``--rank-links``.

A pair of nodes runs for each of the two, and all take turns, so that a machine that slows down slows both. Each node,
with all of its ranks, has one core. A turn is two hand-offs of a prompt:

1. *computed*: no cache knows the prompt. Rows leave while it is computed; what is left then is exposed.
2. *cached*: the prefill node has computed another prompt and kept its rows, so all of them leave at once and nothing
   but the last token is computed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.common.console import step
from benchmarks.handoff.bench import Asked, Bench, Pair
from paceline.config import NodeConfig
from paceline.errors import PacelineError
from paceline.results import TraceEvent
from paceline.v1 import node_pb2

WAYS = ("direct", "through-0")
WARM_UPS = 3  # turns


@dataclass(frozen=True)
class Turn:
    """Seconds."""

    computed_s: float  # first forward's start to everything there
    exposed_s: float  # of it, behind the first token
    cached_s: float  # first byte sent to last row written


def config_of(options: argparse.Namespace, way: str) -> NodeConfig:
    """The options of both nodes of a pair."""
    return NodeConfig.model_validate(
        {
            "model": options.model,
            "drafter": "default",
            "threads": 1,
            "tp": options.tp,
            "rank_links": way,
            "prefill_chunk_tokens": options.chunk_tokens,
            "kv_cache_tokens": 4 * options.prompt_tokens + 1024,
            "head_check": False,
        }
    )


async def turn(pair: Pair, prompt_tokens: int) -> Turn:
    """Both hand-offs."""
    computed = await pair.cross(Asked.fresh(prompt_tokens))
    asked = Asked.fresh(prompt_tokens)
    before = asked.request()
    before.request_id += "-before"
    async for _ in pair.prefill.Prefill(node_pb2.PrefillRequest(sequence=before, alone=True)):
        pass
    await pair.cross(asked)
    events = [event for node in (pair.prefill, pair.decode) for event in await pair.trace(asked, node)]
    return Turn(computed.prefill_s + computed.exposed_s, computed.exposed_s, moved_s(events))


def moved_s(events: Sequence[TraceEvent]) -> float:
    """Seconds from the first byte to the last row. Raises PacelineError for a trace without rows."""
    sent = [event.start_s for event in events if event.name == "chunk sent"]
    received = [event.end_s for event in events if event.name == "chunk received" and event.end_s is not None]
    if not sent or not received:
        raise PacelineError("a trace of no rows")
    return max(received) - min(sent)


async def measure(benches: dict[str, Bench], options: argparse.Namespace) -> dict[str, list[Turn]]:
    """The turns of each way, behind the warm-up."""
    found: dict[str, list[Turn]] = {way: [] for way in benches}
    async with AsyncExitStack() as stack:
        pairs = {way: await stack.enter_async_context(bench.connected()) for way, bench in benches.items()}
        count = WARM_UPS + options.rounds
        for number in range(count):
            for place, way in enumerate(WAYS if number % 2 else WAYS[::-1]):
                step(number * len(WAYS) + place, count * len(WAYS), way)
                found[way].append(await turn(pairs[way], options.prompt_tokens))
    return {way: turns[WARM_UPS:] for way, turns in found.items()}


def show(found: dict[str, list[Turn]], options: argparse.Namespace) -> None:
    """Print the medians, and the median of the ratios turn by turn."""
    table = Table(title=f"{options.prompt_tokens} tokens between nodes of {options.tp} ranks, medians in ms")
    for column in ("what", *WAYS, "direct / through-0"):
        table.add_column(column, justify="left" if column == "what" else "right")
    rows: tuple[tuple[str, Callable[[Turn], float]], ...] = (
        ("computed and handed over", lambda one: one.computed_s),
        ("of it exposed", lambda one: one.exposed_s),
        ("cached rows, first byte to last row", lambda one: one.cached_s),
    )
    for name, of in rows:
        ratio = statistics.median(of(a) / of(b) for a, b in zip(found[WAYS[0]], found[WAYS[1]], strict=True))
        figures = (f"{1e3 * statistics.median(map(of, found[way])):.1f}" for way in WAYS)
        table.add_row(name, *figures, f"{ratio:.2f}")
    Console(width=120).print(table)


def main() -> None:
    """Measure, print, and keep the figures where ``--json`` says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--tp", type=int, default=3, help="ranks of each node")
    parser.add_argument("--prompt-tokens", type=int, default=2000)
    parser.add_argument("--chunk-tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    options = parser.parse_args()
    step(0, (WARM_UPS + options.rounds) * len(WAYS), "starting nodes")
    with ExitStack() as stack:
        benches = {way: stack.enter_context(Bench.open(config_of(options, way), computes=True)) for way in WAYS}
        found = asyncio.run(measure(benches, options))
    show(found, options)
    if options.json:
        settings = {key: value for key, value in vars(options).items() if key != "json"}
        turns = {way: [asdict(one) for one in turns] for way, turns in found.items()}
        options.json.write_text(json.dumps({"settings": settings, "turns": turns}, indent=1) + "\n")


if __name__ == "__main__":
    main()
