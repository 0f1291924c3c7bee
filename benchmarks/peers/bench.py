"""``paceline bench peers``: one request at a time to each engine, the same prompts, on the same cores, in one run.

Servers are asked over HTTP by the same client, each in a process of its own that runs alone. transformers and OpenVINO
have no server to speak of: `benchmarks.peers.transformers_worker` and `benchmarks.peers.openvino_worker` run them. A
peer that is not installed, or does not start, has a row that says so.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from benchmarks.common.processes import NotReady, ended_by_signals
from benchmarks.peers.engines import in_process
from benchmarks.peers.openvino_worker import PROMPT_LOOKUP
from benchmarks.peers.servers import (
    DRAFT_TOKENS,
    OPENVINO_PYTHON,
    PEERS,
    cores,
    head_setting,
    installed,
    openvino_folder,
    peer_settings,
    require,
)
from benchmarks.serving import questions
from benchmarks.serving.arrivals import Arrival
from benchmarks.serving.client import Limits, Server, drive, served_model
from benchmarks.serving.deployments import Setting, deployments
from benchmarks.serving.workload import Ask, warm_up
from benchmarks.serving.workload import plan as plan_asks
from benchmarks.speculation.prompts import Prompt
from benchmarks.tables import Grid
from paceline.errors import ConfigError
from paceline.spec_decode.heads.shipped import shipped_heads

LONG_PROMPTS = 3  # of the time to first token; their median counts
ENGINES = ("paceline", "transformers", *PEERS, "openvino")
LIMITS = Limits(outstanding=1, deadline_s=300.0)
WORKER_TIMEOUT_S = 600.0
MESSAGE_CHARACTERS = 300

Progress = Callable[[int, int, str], None]
Timing = tuple[list[float], int]  # seconds at which pieces came, tokens of them all


@dataclass(frozen=True)
class PeersPlan:
    """Requests that every engine gets."""

    decode: list[Ask]
    long: list[Ask]
    warm_up: list[Ask]
    prompts: str
    max_tokens: int
    long_prompt_tokens: int

    def in_turn(self) -> list[Ask]:
        """All of them, one after the other."""
        return [*self.warm_up, *self.decode, *self.long]


@dataclass(frozen=True)
class Figures:
    """One engine, plainly or with speculation."""

    tokens_per_s: float  # after the first token
    tokens: int
    ttft_ms: float  # of the long prompt, median


@dataclass(frozen=True)
class Row:
    """One line of the table. A missing figure has a reason."""

    name: str
    plain: Figures | None
    drafted: Figures | None
    how: str  # it drafts
    reason: str = ""


@dataclass(frozen=True)
class PeersReport:
    """The results."""

    model: str
    cores: int
    prompts: str
    num_prompts: int
    max_tokens: int
    long_prompt_tokens: int
    rows: tuple[Row, ...]

    def to_json(self) -> str:
        """See PeersReport."""
        return TypeAdapter(PeersReport).dump_json(self).decode()

    @classmethod
    def read(cls, path: Path) -> PeersReport:
        """Raises ConfigError when ``path`` is not such a file."""
        try:
            return TypeAdapter(cls).validate_json(path.read_bytes())
        except ValidationError as error:
            raise ConfigError("json", f"{path} is no result of this benchmark: {error.errors()[0]['msg']}") from None


def plan(folder: Path, texts: Sequence[Prompt], named: str, limit: int, max_tokens: int, long_tokens: int) -> PeersPlan:
    """``limit`` questions as they are, categories in turn, and long prompts. Raises ConfigError."""
    count = questions.counter(folder, chat=True)
    fitting = [text for text in texts if count(text.turns[0]) <= long_tokens][:limit]
    if not fitting:
        raise ConfigError("prompts", f"every prompt is longer than {long_tokens} tokens")
    decode = [Ask(i, 0.0, prompt.turns[0], count(prompt.turns[0]), max_tokens, i) for i, prompt in enumerate(fitting)]
    # Another question at the end of each, so that none begins like one before it.
    long = plan_asks([Arrival(0.0, long_tokens, 2)] * LONG_PROMPTS, texts, count, 0, skip=limit)
    return PeersPlan(decode, long, warm_up(long, count, 2), named, max_tokens, long_tokens)


def run(plan: PeersPlan, model: str, folder: Path, only: Sequence[str], progress: Progress) -> PeersReport:
    """Measure every engine, or those named. Raises ConfigError."""
    for name in only:
        if name not in ENGINES:
            raise ConfigError("only", f"{name!r} is none of {', '.join(ENGINES)}")
    rows: list[Row] = []
    names = only or ENGINES
    most = sum(1 if name == "transformers" else 2 for name in names)  # fewer where an engine is not there
    with ended_by_signals():
        for name in names:
            for row in _rows(name, plan, model, folder, lambda what: progress(len(rows), most, what)):
                rows.append(row)
    sizes = (len(plan.decode), plan.max_tokens, plan.long_prompt_tokens)
    return PeersReport(folder.name, cores(), plan.prompts, *sizes, tuple(rows))


def _rows(name: str, plan: PeersPlan, model: str, folder: Path, tell: Callable[[str], None]) -> Iterator[Row]:
    if name == "paceline":
        for layout in ("one node", "apart"):
            settings = deployments(model, [layout], ["none", "default"], ())
            plain, drafted = (_served(setting, plan) for setting in settings)
            yield _row(f"paceline, {layout}", "draft heads", plain, drafted, tell)
    elif name == "transformers":
        asks = [Asked(name, partial(_transformers, plan, folder, tokens)) for tokens in (0, DRAFT_TOKENS)]
        yield _row(name, "n-gram", asks[0], asks[1], tell)
    else:
        try:
            plain, drafted, head = _openvino(plan, folder) if name == "openvino" else _peer(name, plan, folder)
        except ConfigError as error:
            yield Row(name, None, None, "", error.message)
            return
        row = _row(name, "n-gram", plain, drafted, tell)
        yield row
        if head:
            row = replace(row, name=head.name, drafted=None, how="EAGLE-3, our head", reason="")
            yield _with(row, "drafted", head, tell)


@dataclass(frozen=True)
class Asked:
    """An engine to be measured. ``measure`` starts it, asks it and ends it; it raises ConfigError, NotReady."""

    name: str
    measure: Callable[[], Figures]


def _row(name: str, how: str, plain: Asked, drafted: Asked, tell: Callable[[str], None]) -> Row:
    return _with(_with(Row(name, None, None, how), "plain", plain, tell), "drafted", drafted, tell)


def _with(row: Row, field: str, asked: Asked, tell: Callable[[str], None]) -> Row:
    """The row with a figure, or with the reason why there is none."""
    tell(asked.name)
    try:
        return replace(row, **{field: asked.measure()})  # type: ignore[arg-type]
    except (NotReady, ConfigError) as error:
        message = str(error).strip()[-MESSAGE_CHARACTERS:]
        return replace(row, reason=f"{row.reason} {asked.name}: {message}".strip())


def _peer(name: str, plan: PeersPlan, folder: Path) -> tuple[Asked, Asked, Asked | None]:
    """Plainly, with copied tokens, with our head where there is one. Raises ConfigError where it is not installed."""
    plain, drafted = peer_settings([name], folder)
    head = head_setting(name, folder)
    return _served(plain, plan), _served(drafted, plan), _served(head, plan) if head else None


def _served(setting: Setting, plan: PeersPlan) -> Asked:
    def measure() -> Figures:
        with setting.start() as url:
            return asyncio.run(_measured(plan, url))

    return Asked(setting.name, measure)


async def _measured(plan: PeersPlan, url: str) -> Figures:
    """Raises ConfigError when a request fails."""
    server = Server(url, await served_model(url))

    async def ask(asks: Sequence[Ask]) -> list[Timing]:
        found = []
        for one in asks:
            (outcome,) = await drive(server, [one], LIMITS)
            if outcome.error or not outcome.stamps:
                raise ConfigError("peers", f"a request failed: {outcome.error or 'no text came'}")
            found.append((outcome.stamps, outcome.output_tokens))
        return found

    await ask(plan.warm_up)
    return figures(await ask(plan.decode), await ask(plan.long))


def figures(decode: Sequence[Timing], long: Sequence[Timing]) -> Figures:
    """Tokens/s over all answers from their first to their last piece, and the median time to the first of the others.

    A first piece has one token; an answer of a single piece has no rate and counts nothing.
    """
    told = [(stamps, tokens) for stamps, tokens in decode if len(stamps) > 1]
    took_s = sum(stamps[-1] - stamps[0] for stamps, _ in told)
    tokens = sum(tokens - 1 for _, tokens in told)
    first_ms = statistics.median(stamps[0] for stamps, _ in long) * 1e3
    return Figures(tokens / took_s if took_s else 0.0, tokens, first_ms)


def _transformers(plan: PeersPlan, folder: Path, draft_tokens: int) -> Figures:
    """Raises ConfigError."""
    asks = [[ask.text, ask.max_tokens] for ask in plan.in_turn()]
    job = {"model": str(folder), "threads": cores(), "draft_tokens": draft_tokens, "asks": asks}
    command = [sys.executable, "-m", "benchmarks.peers.transformers_worker"]
    try:
        done = subprocess.run(
            command, input=json.dumps(job), capture_output=True, text=True, timeout=WORKER_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise ConfigError("peers", f"not done after {WORKER_TIMEOUT_S:g} s") from None
    if done.returncode != 0:
        raise ConfigError("peers", done.stderr.strip())
    return _counted(plan, [(one["stamps"], one["tokens"]) for one in json.loads(done.stdout)])


def _openvino(plan: PeersPlan, folder: Path) -> tuple[Asked, Asked, Asked | None]:
    """Plainly, with copied tokens, with our head. Raises ConfigError where it is not installed."""
    weights, head = openvino_folder(folder.name, "bf16"), openvino_folder(folder.name, "eagle3")
    require("openvino", [installed(OPENVINO_PYTHON), weights])

    def asked(name: str, drafting: str = "") -> Asked:
        ask = in_process(weights, "bf16", drafting, ignore_eos=False)

        def measure() -> Figures:
            if drafting == str(head):
                require("openvino", [head])
            groups = ask([[one] for one in plan.in_turn()])
            return _counted(plan, [(timing.stamps, timing.tokens) for (timing,) in groups])

        return Asked(name, measure)

    drafted = asked("openvino, n-gram", PROMPT_LOOKUP)
    has_head = shipped_heads(folder.name, "eagle3") is not None
    return asked("openvino"), drafted, asked("openvino, our head", str(head)) if has_head else None


def _counted(plan: PeersPlan, found: Sequence[Timing]) -> Figures:
    """What answers to ``plan.in_turn()`` come to; warm-ups do not count."""
    counted = found[len(plan.warm_up) :]
    return figures(counted[: len(plan.decode)], counted[len(plan.decode) :])


def grid(report: PeersReport) -> Grid:
    """A row for each engine."""
    columns = ("engine", "plain tokens/s", "speculative tokens/s", "drafts with", "first token, ms")
    rows = tuple(
        (
            row.name,
            f"{row.plain.tokens_per_s:.1f}" if row.plain else "-",
            f"{row.drafted.tokens_per_s:.1f}" if row.drafted else "-",
            row.how or "-",
            f"{row.plain.ttft_ms:.0f}" if row.plain else "-",
        )
        for row in report.rows
    )
    notes = (
        f"One request at a time, greedy, {report.num_prompts} prompts of {report.prompts}, at most {report.max_tokens} "
        "tokens each; tokens/s from the first token on.",
        f"First token: of a prompt of {report.long_prompt_tokens} tokens that no cache knows, plain; median of "
        f"{LONG_PROMPTS}.",
        *(f"{row.name}: {row.reason}" for row in report.rows if row.reason),
    )
    title = f"peers: {report.model}, bf16, {report.cores} cores"
    return Grid(title, columns, rows, tuple(False for _ in rows), notes)
