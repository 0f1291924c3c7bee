"""``python -m benchmarks.secured``: what certificates, TLS and API keys cost, over gRPC and HTTP.

Two deployments, one with ``--tls-dir`` and ``--api-keys``, are up at once and measured in turn, so that both meet the
same machine. Loads: a short prompt and a long one (time to first token), and streams (tokens/s of all, and what a token
takes of the CPU in all processes of its deployment).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import ssl
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import torch
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from rich.console import Console
from rich.table import Table

from benchmarks.common.console import step
from benchmarks.common.processes import PACELINE, ended_by_signals, serving_paceline
from benchmarks.engine import prompt
from benchmarks.mixed import LONG_PROMPT, STREAM_TOKENS, STREAMS, Load
from kv_transfer.transports.sealed import PLAIN_BYTES, TAG_BYTES
from paceline.client import AsyncClient

SHORT_PROMPT, SHORT_PROMPTS, HTTP_PROMPT = 16, 8, "The capital of France is"
ROW_BYTES = 30 * 2 * 3 * 64 * 2  # of a token of the demo: keys and values of 30 layers, 3 heads of 64, bfloat16
SEALINGS = 50

LOADS = {  # columns of the table: what is measured, and what its median is multiplied by
    "short": ("TTFT short ms", 1e3),
    "http": ("TTFT HTTP ms", 1e3),
    "long": ("TTFT long ms", 1e3),
    "streams": ("tokens/s", 1.0),
    "cpu": ("CPU ms/token", 1e3),
}
Found = dict[str, dict[str, list[float]]]  # by load and way, one for each repetition


@dataclass(frozen=True)
class Way:
    """How a deployment is asked. ca: None in the clear; processes: of the deployment."""

    grpc: str
    http: str
    processes: list[psutil.Process]
    ca: Path | None = None
    key: str = ""

    async def figures(self, load: str, number: int) -> dict[str, float]:
        """One load, once: seconds to a first token, or tokens/s of streams and the CPU seconds that each token took in
        all processes of the deployment."""
        if load == "http":
            return {load: await self._http_s()}
        tls = False if self.ca is None else str(self.ca)
        async with AsyncClient(self.grpc, tls=tls, api_key=self.key) as client:
            if load == "short":
                first = [await _first_token_s(client, number * SHORT_PROMPTS + i) for i in range(SHORT_PROMPTS)]
                return {load: statistics.median(first)}
            if load == "long":
                return {load: await Load(client).first_token_s()}
            before = self._cpu_s()
            rate = await Load(client).streams()
            return {load: rate, "cpu": (self._cpu_s() - before) / (STREAMS * STREAM_TOKENS)}

    def _cpu_s(self) -> float:
        return sum(sum(process.cpu_times()[:2]) for process in self.processes)

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


async def measure(ways: dict[str, Way], repeats: int) -> Found:
    """Each load over both ways at once, one after the other, the first one another each time, after a repetition that
    does not count: what a machine does meanwhile comes to both."""
    found: Found = {load: {name: [] for name in ways} for load in LOADS}
    for number in range(repeats + 1):
        step(number, repeats + 1, "all loads")
        for load in LOADS:
            for name in sorted(ways, reverse=bool(number % 2)) if load != "cpu" else ():
                figures = await ways[name].figures(load, number)
                for what, figure in figures.items() if number else ():
                    found[what][name].append(figure)
    return found


def show(found: Found) -> None:
    """Medians, and the median of what each repetition of the one costs over that of the other, with its interval."""
    table = Table(title="medians")
    for column in ("", *(title for title, _ in LOADS.values())):
        table.add_column(column, justify="right")
    for name in found["short"]:
        cells = [f"{statistics.median(found[load][name]) * factor:.1f}" for load, (_, factor) in LOADS.items()]
        table.add_row(name, *cells)
    pairs = [zip(found[load]["plain"], found[load]["secured"], strict=True) for load in LOADS]
    ratios = [[b / a for a, b in both] for both in pairs]
    table.add_row("secured / plain", *(f"{statistics.median(one):.3f}" for one in ratios))
    table.add_row("95 % interval", *("{:.3f} to {:.3f}".format(*median_interval(one)) for one in ratios))
    Console().print(table)


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Between which of the values the true median lies with 95 %, whatever their distribution: the ranks are those of
    a fair coin's count of heads."""
    ordered, count = sorted(values), len(values)
    low = max(0, math.floor((count - 1.96 * math.sqrt(count)) / 2))
    return ordered[low], ordered[count - 1 - low]


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
        of_plain = psutil.Process().children(recursive=True)
        with_all = stack.enter_context(serving_paceline([*options, "--tls-dir", str(certs), "--api-keys", str(keys)]))
        others = [process for process in psutil.Process().children(recursive=True) if process not in of_plain]
        yield {
            "plain": Way(plain["grpc"], plain["http"], of_plain),
            "secured": Way(with_all["grpc"], with_all["http"], others, certs / "ca.pem", key),
        }


def sealing_ms(num_bytes: int) -> tuple[float, float]:
    """Milliseconds to encrypt, and to decrypt, the rows of a hand-off of so many bytes, as its two ends do."""
    cipher, rows, number = AESGCM(AESGCM.generate_key(256)), torch.ones(num_bytes, dtype=torch.uint8), bytes(12)
    pieces = [rows[at : at + PLAIN_BYTES] for at in range(0, num_bytes, PLAIN_BYTES)]
    sealed = [torch.empty(len(piece) + TAG_BYTES, dtype=torch.uint8) for piece in pieces]
    times = []
    for _ in range(SEALINGS):
        began = time.perf_counter()
        for piece, message in zip(pieces, sealed, strict=True):
            cipher.encrypt_into(number, piece.numpy().data, None, message.numpy().data)
        between = time.perf_counter()
        for piece, message in zip(pieces, sealed, strict=True):
            cipher.decrypt_into(number, message.numpy().data, None, piece.numpy().data)
        times.append((between - began, time.perf_counter() - between))
    encrypting, decrypting = zip(*times, strict=True)
    return statistics.median(encrypting) * 1e3, statistics.median(decrypting) * 1e3


def main() -> None:
    """Start the deployments, measure, print, stop."""
    parser = argparse.ArgumentParser(prog="benchmarks.secured", description=__doc__)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", type=Path, help="write every repetition here")
    options = parser.parse_args()
    step(0, options.repeats + 1, "starting two deployments")
    with ended_by_signals(), deployments(["--no-prefix-cache", "--no-standby", "--drafter", "none"]) as ways:
        found = asyncio.run(measure(ways, options.repeats))
    show(found)
    encrypting, decrypting = sealing_ms(LONG_PROMPT * ROW_BYTES)
    print(f"rows of {LONG_PROMPT} tokens are encrypted in {encrypting:.1f} ms and decrypted in {decrypting:.1f} ms")
    if options.json is not None:
        options.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
