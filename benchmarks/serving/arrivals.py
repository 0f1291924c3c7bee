"""When requests arrive and how long they are: drawn from a law by seed, or read from a trace."""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TextIO

from paceline.errors import ConfigError

MAX_REQUESTS = 100_000
MAX_LENGTH = 1_000_000  # tokens
# Columns by name, in any case: this project's, and those of the Azure LLM inference traces.
COLUMNS = (
    ("timestamp", "prompt_tokens", "output_tokens"),
    ("timestamp", "contexttokens", "generatedtokens"),
)


@dataclass(frozen=True)
class Arrival:
    """One request to come."""

    at_s: float  # after the first moment of the run
    prompt_tokens: int
    output_tokens: int  # at most


@dataclass(frozen=True)
class Mix:
    """Lengths in tokens, and how often each comes."""

    lengths: tuple[int, ...]
    weights: tuple[float, ...]

    def draw(self, source: random.Random) -> int:
        """One length."""
        return source.choices(self.lengths, self.weights)[0]


def parse_mix(text: str, option: str) -> Mix:
    """``64,256,1024``, or with weights ``64:3,1024:1``. Raises ConfigError naming ``option``."""
    lengths, weights = [], []
    for item in text.split(","):
        length, colon, weight = item.strip().partition(":")
        try:
            lengths.append(int(length))
            weights.append(float(weight) if colon else 1.0)
        except ValueError:
            raise ConfigError(option, f"{item.strip()!r} is neither LENGTH nor LENGTH:WEIGHT") from None
        if not (1 <= lengths[-1] <= MAX_LENGTH and 0 < weights[-1] < math.inf):
            raise ConfigError(option, f"{item.strip()!r}: a length is 1 to {MAX_LENGTH}, a weight above 0")
    return Mix(tuple(lengths), tuple(weights))


def poisson(
    rate: float, seed: int, prompts: Mix, outputs: Mix, *, requests: int | None = None, duration_s: float | None = None
) -> list[Arrival]:
    """A Poisson process of ``rate`` requests a second, until ``requests`` have come or ``duration_s`` is over.

    The same seed gives the same lengths at every rate, and the same gaps between arrivals in units of 1 / rate.
    Raises ConfigError.
    """
    if not 0 < rate < math.inf:
        raise ConfigError("rate", f"must be above 0, got {rate:g}")
    if requests is None and duration_s is None:
        raise ConfigError("duration", "give --requests or --duration")
    most = MAX_REQUESTS if requests is None else requests
    gaps, lengths = random.Random(f"gaps {seed}"), random.Random(f"lengths {seed}")
    found: list[Arrival] = []
    at_s = 0.0
    while len(found) < most:
        at_s += gaps.expovariate(1.0) / rate
        if duration_s is not None and at_s >= duration_s:
            break
        found.append(Arrival(at_s, prompts.draw(lengths), outputs.draw(lengths)))
    if not found:
        raise ConfigError("duration", f"no request arrives in {duration_s:g} s at {rate:g} a second")
    return found


def read_trace(path: Path, *, requests: int | None = None, duration_s: float | None = None) -> list[Arrival]:
    """The requests of a CSV trace, the first at 0 s. Raises ConfigError naming file and line.

    The first line names the columns (``COLUMNS``; others are passed over). A timestamp is a number of seconds or a
    date with a time. Rows need not be sorted.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            found = _rows(path, file)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("trace", f"{path} cannot be read: {error}") from None
    if not found:
        raise ConfigError("trace", f"{path} holds no request")
    found.sort(key=lambda arrival: arrival.at_s)
    first = found[0].at_s
    moved = [Arrival(a.at_s - first, a.prompt_tokens, a.output_tokens) for a in found[:requests]]
    return [a for a in moved if duration_s is None or a.at_s < duration_s]


def _rows(path: Path, file: TextIO) -> list[Arrival]:
    places: list[int] = []
    found: list[Arrival] = []
    lines = csv.reader(file)
    for cells in lines:
        where = f"{path} line {lines.line_num}"
        if not any(cell.strip() for cell in cells):
            continue
        if not places:
            places = _places(cells, where)
            continue
        if len(cells) <= max(places):
            raise ConfigError("trace", f"{where}: has {len(cells)} columns, needs {max(places) + 1}")
        at, prompt, output = (cells[place].strip() for place in places)
        found.append(Arrival(_seconds(at, where), _length(prompt, where), _length(output, where)))
        if len(found) > MAX_REQUESTS:
            raise ConfigError("trace", f"{where}: more than {MAX_REQUESTS} requests")
    return found


def _places(cells: Sequence[str], where: str) -> list[int]:
    names = [cell.strip().lower() for cell in cells]
    for columns in COLUMNS:
        if set(columns) <= set(names):
            return [names.index(column) for column in columns]
    raise ConfigError("trace", f"{where}: must name the columns {','.join(COLUMNS[0])}")


def _seconds(text: str, where: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = datetime.fromisoformat(text).timestamp()
        except ValueError:
            raise ConfigError("trace", f"{where}: {text!r} is neither seconds nor a date with a time") from None
    if not math.isfinite(seconds):
        raise ConfigError("trace", f"{where}: {text!r} is no time")
    return seconds


def _length(text: str, where: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= MAX_LENGTH):
        raise ConfigError("trace", f"{where}: {text!r} is no number of tokens from 1 to {MAX_LENGTH}")
    return int(text)


def at_rate(arrivals: Sequence[Arrival], rate: float) -> list[Arrival]:
    """The same requests in the same rhythm, faster or slower: ``rate`` a second on the whole."""
    span = arrivals[-1].at_s - arrivals[0].at_s
    scale = (len(arrivals) - 1) / span / rate if span > 0 else 1.0
    return [Arrival(a.at_s * scale, a.prompt_tokens, a.output_tokens) for a in arrivals]


def mean_rate(arrivals: Sequence[Arrival]) -> float:
    """Requests a second, from the first to the last; 0 for a single one."""
    span = arrivals[-1].at_s - arrivals[0].at_s
    return (len(arrivals) - 1) / span if span > 0 else 0.0
