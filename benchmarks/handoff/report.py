"""Results of the hand-off benchmark, and their table."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from benchmarks.tables import Grid
from paceline.errors import ConfigError, PacelineError
from paceline.results import TraceEvent

EXPOSED_SHARE = 0.2  # of a raw copy's time, at most
RATE_SHARE = 0.8  # of the raw copy's bytes per second, at least


@dataclass(frozen=True)
class HandoffSettings:
    """What is measured."""

    model: str
    prompt_tokens: int = 2000
    chunk_tokens: int = 256
    repeats: int = 7
    drafter: str = "default"
    dtype: str = "bf16"
    launches: int = 1  # of the processes, at most one a repetition: each is lucky or not with its memory

    def shares(self) -> list[int]:
        """The repetitions of each launch."""
        launches = min(self.launches, self.repeats)
        return [self.repeats * (i + 1) // launches - self.repeats * i // launches for i in range(launches)]


@dataclass(frozen=True)
class Crossing:
    """Messages of one hand-off, from the traces of both nodes."""

    prefill_s: float  # first forward's start to last forward's end
    exposed_s: float  # first token to the decode node having everything
    acknowledged_s: float  # first token to the prefill node knowing it
    sending_s: float  # in which the sender had a message on the wire
    sizes: tuple[int, ...]  # bytes of each message

    @property
    def num_bytes(self) -> int:
        """Bytes of all messages."""
        return sum(self.sizes)


@dataclass(frozen=True)
class Move:
    """Rows that went from one pool to the other with nothing computed beside them."""

    whole_s: float  # first byte sent to the last row written
    sizes: tuple[int, ...]  # bytes of each message

    @property
    def num_bytes(self) -> int:
        """Bytes of all messages."""
        return sum(self.sizes)


@dataclass(frozen=True)
class Repetition:
    """One turn. The raw copies are of the same messages as what they stand beside."""

    overlapped: Crossing
    overlapped_raw_s: float
    moved: Move
    moved_raw_s: float

    @property
    def exposed_share(self) -> float:
        """Exposed time over a raw copy of everything that crossed, with the machine to itself."""
        return self.overlapped.exposed_s / self.overlapped_raw_s

    @property
    def exposed_of_sending(self) -> float:
        """Exposed time over the time in which the sender had bytes on the wire, beside the prefill."""
        return self.overlapped.exposed_s / self.overlapped.sending_s

    @property
    def rate_share(self) -> float:
        """Bytes per second from pool to pool over those of the raw copy."""
        return self.moved_raw_s / self.moved.whole_s


@dataclass(frozen=True)
class HandoffReport:
    """The results. Written as JSON and read back."""

    settings: HandoffSettings
    repetitions: tuple[Repetition, ...]

    def to_json(self) -> str:
        """See HandoffReport."""
        return TypeAdapter(HandoffReport).dump_json(self, indent=1).decode()

    @classmethod
    def read(cls, path: Path) -> HandoffReport:
        """Raises ConfigError when ``path`` is not such a file."""
        try:
            return TypeAdapter(cls).validate_json(path.read_bytes())
        except ValidationError as error:
            raise ConfigError("json", f"{path} is no result of this benchmark: {error.errors()[0]['msg']}") from None

    def median(self, of: Callable[[Repetition], float]) -> float:
        """Over the repetitions."""
        return statistics.median(of(r) for r in self.repetitions)

    @property
    def exposed_share(self) -> float:
        """See Repetition."""
        return self.median(lambda r: r.exposed_share)

    @property
    def rate_share(self) -> float:
        """See Repetition."""
        return self.median(lambda r: r.rate_share)

    @property
    def holds(self) -> bool:
        """Whether both bounds hold."""
        return self.exposed_share <= EXPOSED_SHARE and self.rate_share >= RATE_SHARE


def crossing(events: Sequence[TraceEvent], acknowledged_s: float) -> Crossing:
    """What the traces of both nodes, whose clock is one, say of one hand-off. Raises PacelineError when they do not fit
    together."""
    chunks = [event for event in events if event.track == "prefill" and event.name == "chunk"]
    sent, received = _messages(events, "send", " sent"), _messages(events, "receive", " received")
    first = [event.start_s for event in events if event.name == "first token"]
    ready = [event.start_s for event in events if event.name == "hand-off ready"]
    if not chunks or not sent or len(sent) != len(received) or not len(first) == len(ready) == 1:
        counts = f"{len(chunks)} chunks, {len(sent)} messages sent, {len(received)} received"
        raise PacelineError(f"traces of {counts}, {len(first)} first tokens, {len(ready)} hand-offs ready")
    return Crossing(
        prefill_s=max(_end(event) for event in chunks) - min(event.start_s for event in chunks),
        exposed_s=ready[0] - first[0],
        acknowledged_s=acknowledged_s,
        sending_s=sum(_end(event) - event.start_s for event in sent),
        sizes=tuple(_num_bytes(event) for event in sent),
    )


def last_received_s(events: Sequence[TraceEvent]) -> float:
    """When the last row was written, Unix time. Raises PacelineError when none was."""
    received = _messages(events, "receive", " received")
    if not received:
        raise PacelineError("a trace of no messages")
    return max(_end(event) for event in received)


def _messages(events: Sequence[TraceEvent], track: str, suffix: str) -> list[TraceEvent]:
    """Those with bytes, in order."""
    names = (f"chunk{suffix}", f"state{suffix}")
    found = [event for event in events if event.track == track and event.name in names and _num_bytes(event)]
    return sorted(found, key=lambda event: event.start_s)


def _num_bytes(event: TraceEvent) -> int:
    return int(event.attributes.get("num_bytes", 0))


def _end(event: TraceEvent) -> float:
    return event.start_s if event.end_s is None else event.end_s


def handoff_grid(report: HandoffReport) -> Grid:
    """The table."""
    s, median = report.settings, report.median
    overlapped, moved = report.repetitions[0].overlapped, report.repetitions[0].moved
    rows: list[tuple[str, str, str]] = []

    def row(name: str, value: str, bound: str = "", holds: bool | None = None) -> None:
        rows.append((name, value, bound if holds is None else f"{bound}: {'holds' if holds else 'MISSED'}"))

    def timed(name: str, num_bytes: int, of: Callable[[Repetition], float]) -> None:
        row(name, f"{median(of) * 1e3:.2f} ms = {num_bytes / median(of) / 1e9:.2f} GB/s")

    row("prefill", f"{median(lambda r: r.overlapped.prefill_s) * 1e3:.0f} ms")
    row("handed over beside it", _described(overlapped.sizes))
    timed("raw gloo copy of the same: the floor", overlapped.num_bytes, lambda r: r.overlapped_raw_s)
    timed("sender busy, beside the prefill", overlapped.num_bytes, lambda r: r.overlapped.sending_s)
    row("exposed: first token to all there", f"{median(lambda r: r.overlapped.exposed_s) * 1e3:.2f} ms")
    share = report.exposed_share
    row("exposed / floor", f"{share:.1%}", f"<= {EXPOSED_SHARE:.0%}", share <= EXPOSED_SHARE)
    row("exposed / sender busy", f"{median(lambda r: r.exposed_of_sending):.1%}")
    row("first token to acknowledgement", f"{median(lambda r: r.overlapped.acknowledged_s) * 1e3:.2f} ms")
    row("its share of the floor", f"{median(lambda r: r.overlapped.acknowledged_s / r.overlapped_raw_s):.1%}")
    row("moved, nothing computed beside it", _described(moved.sizes))
    timed("raw gloo copy of the same", moved.num_bytes, lambda r: r.moved_raw_s)
    timed("pool to pool, first byte to last row", moved.num_bytes, lambda r: r.moved.whole_s)
    share = report.rate_share
    row("its bytes/s / raw", f"{share:.2f}", f">= {RATE_SHARE}", share >= RATE_SHARE)
    size = f"{s.prompt_tokens} tokens in chunks of {s.chunk_tokens}"
    title = f"hand-off: {s.model}, {s.dtype}, {size}, drafter {s.drafter}"
    repetitions = f"{len(report.repetitions)} repetitions in {len(report.settings.shares())} launches"
    notes = (f"Medians of {repetitions}; ratios are of one repetition. One thread a node.",)
    return Grid(title, ("what", "measured", "reach"), tuple(rows), (False,) * len(rows), notes)


def _described(sizes: Sequence[int]) -> str:
    smallest, largest = min(sizes) / 1024, max(sizes) / 1024
    return f"{sum(sizes) / 1e6:.2f} MB, {len(sizes)} messages of {smallest:.0f} to {largest:.0f} KiB"
