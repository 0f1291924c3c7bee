"""``paceline bench serving``: the same arrivals, prompts and seeds to every server, one server after the other.

A server is started, asked a few requests that do not count, measured at every rate, and stopped; nothing else of the
benchmark runs meanwhile. Repetitions take the servers forwards and backwards in turn, so that a machine that slows down
over the run favours none.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import aiohttp

from benchmarks.common.processes import ended_by_signals
from benchmarks.serving.arrivals import Arrival
from benchmarks.serving.client import API, Limits, Outcome, Server, drive, served_model
from benchmarks.serving.deployments import Setting
from benchmarks.serving.measures import Objective, record
from benchmarks.serving.report import Run, ServingReport, Settings
from benchmarks.serving.workload import Ask, CountTokens, plan, warm_up
from benchmarks.speculation.prompts import Prompt
from paceline.errors import ConfigError

Progress = Callable[[int, int, str], None]  # (requests done, in all, what runs now)


@dataclass(frozen=True)
class Load:
    """What every server gets."""

    model: str
    arrivals: dict[float, list[Arrival]]  # by requests a second
    source: str  # of the arrivals, for the report
    questions: Sequence[Prompt]
    prompts: str  # where they are from, for the report
    count: CountTokens
    prompt_mix: str
    output_mix: str
    objective: Objective
    limits: Limits
    api: API = "chat"
    temperature: float = 0.0
    ignore_eos: bool = False
    seed: int = 0
    repeats: int = 1
    warm_up: int = 2

    def asks(self) -> dict[tuple[float, int], list[Ask]]:
        """Requests by rate and repetition. Each has other prompts, so that no cache knows them. Raises ConfigError."""
        found, skip = {}, 0
        for repeat in range(self.repeats):
            for rate, arrivals in self.arrivals.items():
                found[rate, repeat] = plan(arrivals, self.questions, self.count, self.seed, skip)
                skip += len(arrivals)
        return found

    def settings(self) -> Settings:
        """For the report."""
        return Settings(
            model=self.model,
            api=self.api,
            prompts=self.prompts,
            arrivals=self.source,
            prompt_mix=self.prompt_mix,
            output_mix=self.output_mix,
            temperature=self.temperature,
            ignore_eos=self.ignore_eos,
            seed=self.seed,
            repeats=self.repeats,
            warm_up=self.warm_up,
            max_outstanding=self.limits.outstanding,
            deadline_s=self.limits.deadline_s,
            cores=len(os.sched_getaffinity(0)),
            objective=self.objective,
        )


def run(load: Load, settings: Sequence[Setting], progress: Progress) -> ServingReport:
    """Measure every setting. Raises ConfigError when a server cannot be reached, NotReady when one does not start."""
    names = [setting.name for setting in settings]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError("url", f"{name!r} is listed twice")
    asks = load.asks()
    total = len(settings) * sum(map(len, asks.values()))
    finished = 0
    runs: list[Run] = []

    def done(outcome: Outcome) -> None:
        nonlocal finished
        finished += 1
        progress(finished, total, current)

    with ended_by_signals():
        for repeat in range(load.repeats):
            for setting in settings if repeat % 2 == 0 else reversed(settings):
                current = setting.name
                progress(finished, total, f"{current}: starting")
                with setting.start() as url:
                    server = asyncio.run(_prepared(load, setting, url, asks))
                    for rate in load.arrivals:
                        current = f"{setting.name}, {rate:g} req/s"
                        outcomes = asyncio.run(drive(server, asks[rate, repeat], load.limits, done))
                        runs.append(Run(setting.name, rate, repeat, tuple(map(record, outcomes))))
    runs.sort(key=lambda one: (names.index(one.setting), one.rate, one.repeat))
    return ServingReport(load.settings(), tuple(s.name for s in settings if s.ours), tuple(runs))


async def _prepared(load: Load, setting: Setting, url: str, asks: dict[tuple[float, int], list[Ask]]) -> Server:
    """The server, warmed up. Raises ConfigError when it does not answer."""
    try:
        model = setting.model or await served_model(url)
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        raise ConfigError("url", f"{url} does not answer: {error}") from None
    server = Server(url, model, load.api, load.temperature, load.ignore_eos)
    some = next(iter(asks.values()))
    for ask in warm_up(some, load.count, load.warm_up):
        (outcome,) = await drive(server, [ask], load.limits)
        if outcome.error:
            raise ConfigError("url", f"{setting.name}: a request before the run failed: {outcome.error}")
    return server
