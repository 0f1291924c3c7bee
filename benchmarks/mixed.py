"""``python -m benchmarks.mixed``: threads per node under the three loads that a host meets, settings in turn.

Every setting is a deployment of its own, all up at once and idle but for the one that is measured. Loads: a long prompt
alone (time to first token), streams alone (tokens/s of all), and streams while long prompts arrive one after another
(both). ``--crowd 1``: the same where another program keeps a core busy.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.common.processes import ended_by_signals, serving_paceline
from benchmarks.engine import prompt
from paceline.client import AsyncClient

STREAMS, STREAM_TOKENS, STREAM_PROMPT = 8, 64, 32
LONG_PROMPT, LONG_PROMPTS = 1024, 3


@dataclass(frozen=True)
class Figures:
    """One repetition. Seconds to the first token of a long prompt; tokens/s of all streams together."""

    alone_ttft_s: float
    alone_tokens_s: float
    mixed_ttft_s: float
    mixed_tokens_s: float


class Load:
    """Requests to one deployment; prompts that no cache has seen."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._number = 0

    def _prompt(self, num_tokens: int) -> tuple[int, ...]:
        self._number += 1
        return (2000 + self._number, *prompt(num_tokens - 1))

    async def first_token_s(self) -> float:
        """Seconds to the first token of a long prompt."""
        began = time.perf_counter()
        async for chunk in self._client.stream(
            self._prompt(LONG_PROMPT), max_tokens=1, temperature=0.0, ignore_eos=True
        ):
            if chunk.token_ids:
                return time.perf_counter() - began
        raise RuntimeError("the stream ended without a token")

    async def streams(self) -> float:
        """Tokens/s of ``STREAMS`` streams together, from the first token of the last of them on."""
        times = await asyncio.gather(*(self._stream() for _ in range(STREAMS)))
        began = max(stamps[0][0] for stamps in times)
        ended = min(stamps[-1][0] for stamps in times)
        tokens = sum(count for stamps in times for at, count in stamps if began < at <= ended)
        return tokens / (ended - began)

    async def _stream(self) -> list[tuple[float, int]]:
        """When how many tokens came."""
        stream = self._client.stream(
            self._prompt(STREAM_PROMPT), max_tokens=STREAM_TOKENS, temperature=0.0, ignore_eos=True
        )
        return [(time.perf_counter(), len(chunk.token_ids)) async for chunk in stream if chunk.token_ids]

    async def mixed(self) -> tuple[float, float]:
        """Streams, and once they run long prompts one after another: median seconds to first token, tokens/s."""
        running = asyncio.create_task(self.streams())
        await asyncio.sleep(0.5)
        times = [await self.first_token_s() for _ in range(LONG_PROMPTS)]
        return statistics.median(times), await running

    async def repetition(self) -> Figures:
        """All three loads once."""
        alone = await self.first_token_s()
        tokens = await self.streams()
        mixed, beside = await self.mixed()
        return Figures(alone, tokens, mixed, beside)


async def measure(addresses: dict[str, str], repeats: int) -> dict[str, list[Figures]]:
    """Settings in turn, repetition by repetition, after one that does not count."""
    found: dict[str, list[Figures]] = {name: [] for name in addresses}
    for number in range(repeats + 1):
        for name, address in addresses.items():
            async with AsyncClient(address) as client:
                figures = await Load(client).repetition()
            if number:
                found[name].append(figures)
            print(f"{number}/{repeats} {name}: {figures}", file=sys.stderr)
    return found


def show(found: dict[str, list[Figures]]) -> None:
    """Medians of every setting."""
    table = Table(title=f"medians; prompts of {LONG_PROMPT} tokens, {STREAMS} streams")
    for column in ("threads per node", "TTFT alone ms", "tokens/s alone", "TTFT mixed ms", "tokens/s mixed"):
        table.add_column(column, justify="right")
    for name, rows in found.items():
        median = [statistics.median(values) for values in zip(*(asdict(row).values() for row in rows), strict=True)]
        table.add_row(name, f"{median[0] * 1e3:.0f}", f"{median[1]:.0f}", f"{median[2] * 1e3:.0f}", f"{median[3]:.0f}")
    Console().print(table)


@contextmanager
def _busy_process() -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def main() -> None:
    """Start the deployments, measure, print, stop."""
    parser = argparse.ArgumentParser(prog="benchmarks.mixed", description=__doc__)
    parser.add_argument("--threads", default="0,1,2", help="settings of --threads-per-node, separated by commas")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--drafter", default="none")
    parser.add_argument("--crowd", type=int, default=0, help="processes beside the deployments that keep a core busy")
    parser.add_argument("--json", type=Path, help="write every repetition here")
    options = parser.parse_args()
    common = ["--no-prefix-cache", "--no-standby", "--drafter", options.drafter]
    with ended_by_signals(), ExitStack() as stack:
        served = {
            threads: stack.enter_context(serving_paceline(["--threads-per-node", threads, *common]))["grpc"]
            for threads in options.threads.split(",")
        }
        for _ in range(options.crowd):
            stack.enter_context(_busy_process())
        found = asyncio.run(measure(served, options.repeats))
    show(found)
    if options.json is not None:
        options.json.write_text(json.dumps({name: [asdict(row) for row in rows] for name, rows in found.items()}))


if __name__ == "__main__":
    main()
