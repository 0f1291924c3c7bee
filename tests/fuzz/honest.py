"""Streams of clients that mean well, beside whatever a deployment is sent, and the longest that each waited.

They are in a process of their own, where who makes and looks at hostile messages does not hold them up. A line of its
input has the addresses of gRPC and HTTP; the next line ends the streams, and a line of JSON says what became of them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from paceline.client import AsyncClient

PROMPT, TOKENS, SEED = "honest", 60, 3
STREAM_S = 30.0
MOST_TOLD = 20
HEARD = "heard"
ROOT = Path(__file__).parents[2]


@dataclass
class Report:
    """What became of the streams, by the way that they came."""

    done: dict[str, int] = field(default_factory=dict)
    longest_wait_s: dict[str, float] = field(default_factory=dict)  # for a chunk, the first one too
    wrong: list[str] = field(default_factory=list)  # streams that broke, or brought another answer

    def problems(self, most_s: float) -> list[str]:
        """What must not be: a wait of ``most_s``, a way without a stream, and what is wrong."""
        late = [f"{way} waited for {wait_s:.3f} s" for way, wait_s in self.longest_wait_s.items() if wait_s >= most_s]
        return [*self.wrong, *late, *(f"no stream over {way}" for way in ("grpc", "http") if not self.done.get(way))]

    def __str__(self) -> str:
        return f"honest streams: {self.done}, longest wait {self.longest_wait_s} s, {len(self.wrong)} wrong"


class Honest:
    """The process of these streams."""

    def __init__(self, log: Path) -> None:
        environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.fuzz.honest"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
                cwd=ROOT,
            )
        self._log = log

    @asynccontextmanager
    async def beside(self, grpc: str, http: str) -> AsyncIterator[Report]:
        """They stream while the block runs. The report is filled in at its end, when each has come to its own."""
        report = Report()
        await self._say(f"{grpc} {http}")
        try:
            yield report
        finally:
            await self._say("end")
            for name, value in json.loads(await self._hear()).items():
                setattr(report, name, value)

    async def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        assert await self._hear() == HEARD

    async def _hear(self) -> str:
        assert self._process.stdout is not None
        line = (await asyncio.to_thread(self._process.stdout.readline)).strip()
        assert line, f"the honest clients' process ended: {self._log.read_text()[-3000:]}"
        return line

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


# -- in the process -----------------------------------------------------------------------------------------------


class _Streams:
    """One after another over either way, until they are to end."""

    def __init__(self, grpc: str, http: str) -> None:
        self.report = Report({"grpc": 0, "http": 0}, {"grpc": 0.0, "http": 0.0})
        self._grpc_address, self._http_address = grpc, http
        self._first: dict[str, list[int]] = {}  # answers, by the way
        self._stop = False

    async def until(self, end: asyncio.Future[str]) -> None:
        """Those that run at the end are read to their own."""
        async with AsyncClient(self._grpc_address) as client, httpx.AsyncClient(timeout=STREAM_S) as web:
            ways = {"grpc": lambda: self._grpc(client), "http": lambda: self._http(web)}
            tasks = [asyncio.create_task(self._again(way, ask)) for way, ask in ways.items()]
            await end
            self._stop = True
            await asyncio.gather(*tasks)

    async def _again(self, way: str, ask: Callable[[], AsyncIterator[list[int]]]) -> None:
        while not self._stop and len(self.report.wrong) < MOST_TOLD:
            try:
                answer = await self._take(way, ask())
            except Exception as error:
                self.report.wrong.append(f"{way}: {error!r}")
                continue
            self.report.done[way] += 1
            if answer != self._first.setdefault(way, answer):
                self.report.wrong.append(f"{way}: {answer}, and before {self._first[way]}")

    async def _take(self, way: str, parts: AsyncIterator[list[int]]) -> list[int]:
        """Tokens of all parts."""
        answer, last = list[int](), time.monotonic()
        async for token_ids in parts:
            now = time.monotonic()
            self.report.longest_wait_s[way] = max(self.report.longest_wait_s[way], now - last)
            last = now
            answer += token_ids
        return answer

    async def _grpc(self, client: AsyncClient) -> AsyncIterator[list[int]]:
        stream = client.stream(PROMPT, max_tokens=TOKENS, seed=SEED, ignore_eos=True, timeout=STREAM_S)
        async with stream as chunks:
            async for chunk in chunks:
                yield list(chunk.token_ids)

    async def _http(self, web: httpx.AsyncClient) -> AsyncIterator[list[int]]:
        """Tokens come all at once, with the last event that has a choice."""
        body = {"prompt": PROMPT, "max_tokens": TOKENS, "seed": SEED, "ignore_eos": True, "stream": True}
        last = ""
        async with web.stream("POST", f"http://{self._http_address}/v1/completions", json=body) as reply:
            reply.raise_for_status()
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    yield json.loads(line.removeprefix("data: ")).get("paceline", {}).get("token_ids", [[]])[0]
                last = line or last
        assert last == "data: [DONE]", last


async def _main() -> None:
    while addresses := (await asyncio.to_thread(sys.stdin.readline)).split():
        streams = _Streams(*addresses)
        end: Any = asyncio.ensure_future(asyncio.to_thread(sys.stdin.readline))
        print(HEARD)
        await streams.until(end)
        print(HEARD)
        report = streams.report
        report.longest_wait_s = {way: round(wait_s, 3) for way, wait_s in report.longest_wait_s.items()}
        print(json.dumps(dataclasses.asdict(report)))


if __name__ == "__main__":
    asyncio.run(_main())
