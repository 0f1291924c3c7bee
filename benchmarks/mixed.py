"""``python -m benchmarks.mixed``: an option's values under the loads that a host meets, in turn; threads per node if
no other option is named.

Every value is a deployment of its own, all up at once and idle but for the one that is measured. Loads: a long prompt
alone (time to first token), streams alone (tokens/s of all), streams while long prompts arrive one after another
(both), and short prompts while long ones are computed (time to first token of both). ``--crowd 1``: the same where
another program keeps a core busy.
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

from benchmarks.common.console import step
from benchmarks.common.processes import ended_by_signals, serving_paceline
from benchmarks.engine import prompt
from paceline.client import AsyncClient

STREAMS, STREAM_TOKENS, STREAM_PROMPT = 8, 64, 32
LONG_PROMPT, LONG_PROMPTS = 1024, 3
SHORT_PROMPT, SHORT_PROMPTS, SHORT_EVERY_S = 128, 8, 0.23


@dataclass(frozen=True)
class Figures:
    """One repetition. Seconds to the first token of a long prompt; tokens/s of all streams together."""

    alone_ttft_s: float
    alone_tokens_s: float
    mixed_ttft_s: float
    mixed_tokens_s: float
    short_ttft_s: float  # of short prompts beside long ones
    long_ttft_s: float  # of these


class Load:
    """Requests to one deployment; prompts that no cache has seen."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._number = 0

    def _prompt(self, num_tokens: int) -> tuple[int, ...]:
        self._number += 1
        return (2000 + self._number, *prompt(num_tokens - 1))

    async def first_token_s(self, num_tokens: int = LONG_PROMPT) -> float:
        """Seconds to the first token of a prompt."""
        began = time.perf_counter()
        async for chunk in self._client.stream(
            self._prompt(num_tokens), max_tokens=1, temperature=0.0, ignore_eos=True
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

    async def short_beside_long(self) -> tuple[float, float]:
        """Median seconds to the first token of short prompts that come at a steady pace, and of the long ones that are
        computed meanwhile, one after another."""
        long: list[float] = []
        ended = asyncio.Event()

        async def long_ones() -> None:
            while not ended.is_set():
                long.append(await self.first_token_s())

        beside = asyncio.create_task(long_ones())
        short = []
        for _ in range(SHORT_PROMPTS):
            await asyncio.sleep(SHORT_EVERY_S)
            short.append(asyncio.create_task(self.first_token_s(SHORT_PROMPT)))
        times = await asyncio.gather(*short)
        ended.set()
        await beside  # what is left of a prompt would take cores from the deployment that comes next
        return statistics.median(times), statistics.median(long)

    async def repetition(self) -> Figures:
        """All loads once."""
        alone = await self.first_token_s()
        tokens = await self.streams()
        return Figures(alone, tokens, *await self.mixed(), *await self.short_beside_long())


async def measure(addresses: dict[str, str], repeats: int) -> dict[str, list[Figures]]:
    """Settings in turn, repetition by repetition, after one that does not count."""
    found: dict[str, list[Figures]] = {name: [] for name in addresses}
    for number in range(repeats + 1):
        for name, address in addresses.items():
            async with AsyncClient(address) as client:
                figures = await Load(client).repetition()
            if number:
                found[name].append(figures)
            step(number, repeats, f"{name}: {figures}")
    return found


def show(option: str, found: dict[str, list[Figures]]) -> None:
    """Medians of every setting, and of its ratios to the first one."""
    title = f"medians; prompts of {LONG_PROMPT} and {SHORT_PROMPT} tokens, {STREAMS} streams; ratios to the first row"
    table = Table(title=title)
    loads = ("TTFT alone", "tokens/s alone", "TTFT mixed", "tokens/s mixed", "TTFT short", "TTFT beside short")
    for column in (option, *loads):
        table.add_column(column, justify="right")
    first = [list(asdict(row).values()) for row in next(iter(found.values()))]
    for name, rows in found.items():
        columns = list(zip(*(asdict(row).values() for row in rows), strict=True))
        cells = []
        for number, (load, values) in enumerate(zip(loads, columns, strict=True)):
            median = statistics.median(values)
            ratio = statistics.median(value / row[number] for value, row in zip(values, first, strict=True))
            cells.append(f"{median:.0f} ({ratio:.2f})" if "/s" in load else f"{median * 1e3:.0f} ms ({ratio:.2f})")
        table.add_row(name, *cells)
    Console(width=140).print(table)


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
    parser.add_argument("--option", default="threads-per-node", help="of paceline serve")
    parser.add_argument("--values", default="0,1,2", help="of the option, separated by commas")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--drafter", default="none")
    parser.add_argument("--crowd", type=int, default=0, help="processes beside the deployments that keep a core busy")
    parser.add_argument("--json", type=Path, help="write every repetition here")
    options = parser.parse_args()
    common = ["--no-prefix-cache", "--no-standby", "--drafter", options.drafter]
    with ended_by_signals(), ExitStack() as stack:
        values, served = options.values.split(","), dict[str, str]()
        for value in values:
            step(len(served), len(values), f"starting a deployment: {value}")
            served[value] = stack.enter_context(serving_paceline([f"--{options.option}", value, *common]))["grpc"]
        for _ in range(options.crowd):
            stack.enter_context(_busy_process())
        found = asyncio.run(measure(served, options.repeats))
    show(options.option, found)
    if options.json is not None:
        options.json.write_text(json.dumps({name: [asdict(row) for row in rows] for name, rows in found.items()}))


if __name__ == "__main__":
    main()
