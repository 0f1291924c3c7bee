"""Results of the serving benchmark: kept as JSON and read back, and its table."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from benchmarks.serving.measures import Objective, Record, Summary, equal_texts, summarise
from benchmarks.tables import Grid
from paceline.errors import ConfigError


@dataclass(frozen=True)
class Settings:
    """What was run; part of the results."""

    model: str
    api: str
    prompts: str  # name of the file, or "kept texts"
    arrivals: str  # "Poisson" or the trace's name
    prompt_mix: str
    output_mix: str
    temperature: float
    ignore_eos: bool
    seed: int
    repeats: int
    warm_up: int
    max_outstanding: int
    deadline_s: float
    cores: int
    objective: Objective


@dataclass(frozen=True)
class Run:
    """One setting at one rate, once."""

    setting: str
    rate: float
    repeat: int
    records: tuple[Record, ...]


@dataclass(frozen=True)
class ServingReport:
    """The results."""

    settings: Settings
    ours: tuple[
        str, ...
    ]  # settings that must give the same text: deployments of this project, the first is compared with
    runs: tuple[Run, ...]

    def to_json(self) -> str:
        """See ServingReport."""
        return TypeAdapter(ServingReport).dump_json(self).decode()

    @classmethod
    def read(cls, path: Path) -> ServingReport:
        """Raises ConfigError when ``path`` is not such a file."""
        try:
            return TypeAdapter(cls).validate_json(path.read_bytes())
        except OSError as error:
            raise ConfigError("json", f"{path} cannot be read: {error.strerror}") from None
        except ValidationError as error:
            raise ConfigError("json", f"{path} is no result of this benchmark: {error.errors()[0]['msg']}") from None

    def names(self) -> list[str]:
        """Settings, in the order of the run."""
        return list(dict.fromkeys(run.setting for run in self.runs))

    def rates(self) -> list[float]:
        """Rates, rising."""
        return sorted({run.rate for run in self.runs})

    def records(self, setting: str, rate: float) -> list[tuple[Record, ...]]:
        """The requests of each repetition."""
        found = [run for run in self.runs if run.setting == setting and run.rate == rate]
        return [run.records for run in sorted(found, key=lambda run: run.repeat)]

    def summary(self, setting: str, rate: float) -> Summary:
        """Over all repetitions."""
        return summarise(self.records(setting, rate), self.settings.objective)

    def equal(self, setting: str, rate: float) -> tuple[int, int] | None:
        """Requests whose text is that of the first of ``ours``, and those completed in both; None for other servers."""
        if setting not in self.ours:
            return None
        return equal_texts(self.records(setting, rate), self.records(self.ours[0], rate))

    @property
    def holds(self) -> bool:
        """Whether every text is the same in all deployments of ours."""
        found = [self.equal(setting, rate) for setting in self.ours for rate in self.rates()]
        return all(pair is None or pair[0] == pair[1] for pair in found)


COLUMNS = (
    "req/s",
    "setting",
    "TTFT p50/p90/p99",
    "TPOT p50/p99",
    "gap p99",
    "end to end p50/p99",
    "tokens/s",
    "done/failed",
    "goodput",
    "good req/s",
    "equal",
)


def grid(report: ServingReport) -> Grid:
    """A row for each rate and setting."""
    rows, ends = [], []
    for rate in report.rates():
        for name in report.names():
            rows.append(_row(report, name, rate))
            ends.append(name == report.names()[-1])
    s = report.settings
    late = max(report.summary(name, rate).late_p99 for name in report.names() for rate in report.rates())
    notes = (
        f"Objective: first token within {s.objective.ttft_ms:g} ms, then at most {s.objective.tpot_ms:g} ms a token. "
        "Goodput: share and rate of all requests that meet it.",
        "Milliseconds from the moment a request was due. TPOT: time per output token after the first. "
        "Gap: between two events with text.",
        f"Arrivals: {s.arrivals}; prompts of {s.prompt_mix} tokens from {s.prompts}; at most {s.output_mix} output "
        f"tokens; {s.repeats} run(s) each; the driver was at most {late:.0f} ms late (p99).",
        "Equal: requests whose text is that of the first setting.",
    )
    title = f"serving: {s.model}, {s.cores} cores, T={s.temperature:g}"
    return Grid(title, COLUMNS, tuple(rows), tuple(ends), notes)


def _row(report: ServingReport, name: str, rate: float) -> tuple[str, ...]:
    s, equal = report.summary(name, rate), report.equal(name, rate)
    return (
        f"{rate:g}",
        name,
        _ms(s.ttft_p50, s.ttft_p90, s.ttft_p99),
        _ms(s.tpot_p50, s.tpot_p99),
        _ms(s.gap_p99),
        _ms(s.e2e_p50, s.e2e_p99),
        f"{s.tokens_per_s:.1f}",
        f"{s.completed}/{s.failed}",
        f"{s.goodput:.0%}",
        f"{s.goodput_per_s:.2f}",
        "-" if equal is None else f"{equal[0]}/{equal[1]}",
    )


def _ms(*values: float) -> str:
    return " / ".join("-" if math.isnan(value) else f"{value:.0f}" for value in values)
