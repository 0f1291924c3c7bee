"""``python -m benchmarks.secured``: what certificates, TLS and API keys cost, over gRPC and HTTP.

Two deployments, one with ``--tls-dir`` and ``--api-keys``, are up at once and measured in turn, so that both meet the
same machine. Loads: a short prompt and a long one (time to first token), and streams (tokens/s of all).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
from rich.console import Console
from rich.table import Table

from benchmarks.common.processes import PACELINE, ended_by_signals, serving_paceline
from benchmarks.engine import prompt
from benchmarks.mixed import Load
from paceline.client import AsyncClient

SHORT_PROMPT, SHORT_PROMPTS, HTTP_PROMPT = 16, 8, "The capital of France is"


@dataclass(frozen=True)
class Figures:
    """One repetition. Seconds to first tokens; tokens/s of all streams together."""

    short_ttft_s: float
    http_ttft_s: float
    long_ttft_s: float
    tokens_s: float


@dataclass(frozen=True)
class Way:
    """How a deployment is asked. ca: None in the clear."""

    grpc: str
    http: str
    ca: Path | None = None
    key: str = ""

    async def repetition(self, number: int) -> Figures:
        """All loads once."""
        tls = False if self.ca is None else str(self.ca)
        async with AsyncClient(self.grpc, tls=tls, api_key=self.key) as client:
            load = Load(client)
            short = [await _first_token_s(client, number * SHORT_PROMPTS + i) for i in range(SHORT_PROMPTS)]
            http = await self._http_s()
            return Figures(statistics.median(short), http, await load.first_token_s(), await load.streams())

    async def _http_s(self) -> float:
        """Median seconds to the first event, each over the connection of the one before."""
        verify = True if self.ca is None else ssl.create_default_context(cafile=self.ca)
        headers = {"authorization": f"Bearer {self.key}"} if self.key else {}
        body = {"prompt": HTTP_PROMPT, "max_tokens": 1, "temperature": 0, "stream": True}
        url = f"{'http' if self.ca is None else 'https'}://{self.http}/v1/completions"
        times = []
        async with httpx.AsyncClient(verify=verify, headers=headers, timeout=60.0) as client:
            for _ in range(SHORT_PROMPTS + 1):
                began = time.perf_counter()
                async with client.stream("POST", url, json=body) as reply:
                    reply.raise_for_status()
                    parts = reply.aiter_text()
                    await anext(parts)
                    times.append(time.perf_counter() - began)
                    async for _ in parts:
                        pass
        return statistics.median(times[1:])


async def _first_token_s(client: AsyncClient, number: int) -> float:
    began = time.perf_counter()
    asked = (3000 + number, *prompt(SHORT_PROMPT - 1))
    async for chunk in client.stream(asked, max_tokens=1, temperature=0.0, ignore_eos=True):
        if chunk.token_ids:
            return time.perf_counter() - began
    raise RuntimeError("the stream ended without a token")


async def measure(ways: dict[str, Way], repeats: int) -> dict[str, list[Figures]]:
    """Each in turn, the first one another each time, after a repetition that does not count."""
    found: dict[str, list[Figures]] = {name: [] for name in ways}
    for number in range(repeats + 1):
        for name in sorted(ways, reverse=bool(number % 2)):
            figures = await ways[name].repetition(number)
            if number:
                found[name].append(figures)
            print(f"{number}/{repeats} {name}: {figures}", file=sys.stderr)
    return found


def show(found: dict[str, list[Figures]]) -> None:
    """Medians, and the median of what each repetition of the one costs over that of the other."""
    table = Table(title="medians")
    for column in ("", "TTFT short ms", "TTFT HTTP ms", "TTFT long ms", "tokens/s"):
        table.add_column(column, justify="right")
    for name, rows in found.items():
        cells = [statistics.median(values) for values in zip(*(asdict(row).values() for row in rows), strict=True)]
        table.add_row(name, *(f"{cell * 1e3:.1f}" for cell in cells[:3]), f"{cells[3]:.1f}")
    plain, secured = (zip(*(asdict(row).values() for row in found[name]), strict=True) for name in ("plain", "secured"))
    ratios = [statistics.median(b / a for a, b in zip(*both, strict=True)) for both in zip(plain, secured, strict=True)]
    table.add_row("secured / plain", *(f"{ratio:.3f}" for ratio in ratios))
    Console().print(table)


@contextmanager
def deployments(options: list[str]) -> Iterator[dict[str, Way]]:
    """One in the clear, one with everything on."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-secured-")))
        certs, keys = folder / "certs", folder / "keys.yaml"
        subprocess.run(
            [*PACELINE, "certs", "init", str(certs), "--hosts", "127.0.0.1"], check=True, capture_output=True
        )
        made = [*PACELINE, "keys", "create", "--file", str(keys), "--tenant", "bench"]
        key = subprocess.run(made, check=True, capture_output=True, text=True).stdout.strip().split()[-1]
        plain = stack.enter_context(serving_paceline(options))
        with_all = stack.enter_context(serving_paceline([*options, "--tls-dir", str(certs), "--api-keys", str(keys)]))
        yield {
            "plain": Way(plain["grpc"], plain["http"]),
            "secured": Way(with_all["grpc"], with_all["http"], certs / "ca.pem", key),
        }


def main() -> None:
    """Start the deployments, measure, print, stop."""
    parser = argparse.ArgumentParser(prog="benchmarks.secured", description=__doc__)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--json", type=Path, help="write every repetition here")
    options = parser.parse_args()
    with ended_by_signals(), deployments(["--no-prefix-cache", "--no-standby", "--drafter", "none"]) as ways:
        found = asyncio.run(measure(ways, options.repeats))
    show(found)
    if options.json is not None:
        options.json.write_text(json.dumps({name: [asdict(row) for row in rows] for name, rows in found.items()}))


if __name__ == "__main__":
    main()
