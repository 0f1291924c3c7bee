"""The first thirty minutes on a GPU, in one command: ``python -m benchmarks.gpu.tour --out FOLDER``.

It runs the stages of ``benchmarks.gpu.stages`` one by one, without Ray and network, and writes as it goes:
``tour.json`` says after each stage what became of it, ``tour.log`` has what the stages print, and rows and probes have
files of their own. So a call that is cut short leaves what it had. A stage that fails or takes too long takes no other
with it.

A call ends after ``--minutes``; ``--from STAGE`` goes on where the last one stopped, and says so itself.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from benchmarks.gpu.stages import STAGES, Stage
from paceline.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
MINUTES = 9.5  # of a call: a machine that is lent for ten minutes at a time
MARGIN_S = 20.0  # that a stage is given to tell what it has, once it was interrupted
POLL_S = 0.05
TAIL_BYTES = 6000
ENVIRONMENT = {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
PASSED, FAILED, CUT, LEFT_OUT, NEXT = "passed", "failed", "cut short", "left out", "not begun"


@dataclass
class Outcome:
    """What became of a stage."""

    name: str
    shows: str
    state: str
    seconds: float = 0.0
    code: int | None = None
    tail: str = ""  # the end of what it printed, where it did not pass


class Running:
    """A stage's process, in a group of its own, whose output goes to ``log``."""

    def __init__(self, stage: Stage, command: Sequence[str], log: IO[bytes], limit_s: float) -> None:
        self.stage, self._log = stage, log
        self._began = time.monotonic()
        self._end = self._began + limit_s
        log.write(f"\n===== {stage.name}: {stage.shows} (at most {limit_s:.0f} s)\n".encode())
        log.flush()
        self._starts_at = log.tell()
        environment = (
            os.environ | ENVIRONMENT | {"PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))}
        )
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as nohup leaves it; a stage would ignore its end too
            signal.signal(signal.SIGINT, signal.default_int_handler)
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment, start_new_session=True
        )

    def wait(self, most_s: float = float("inf")) -> Outcome:
        """Until it ends or is stopped: at its own limit, or after ``most_s``."""
        end, cut = min(self._end, time.monotonic() + most_s), False
        while self._process.poll() is None:
            if time.monotonic() > end:
                cut = True
                self._stop()
            time.sleep(POLL_S)
        self._send(signal.SIGKILL)  # to what the stage started and left
        code = self._process.returncode
        state = CUT if cut else PASSED if code == 0 else FAILED
        took = time.monotonic() - self._began
        return Outcome(self.stage.name, self.stage.shows, state, took, code, "" if state == PASSED else self._tail())

    def _stop(self) -> None:
        """An interrupt first, upon which pytest tells what failed so far."""
        for sent in (signal.SIGINT, signal.SIGKILL):
            self._send(sent)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(MARGIN_S)
                return

    def _send(self, sent: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, sent)

    def _tail(self) -> str:
        self._log.flush()
        with open(self._log.name, "rb") as said:
            size = said.seek(0, os.SEEK_END)
            said.seek(max(self._starts_at, size - TAIL_BYTES))
            return said.read().decode(errors="replace")


class Tour:
    """Runs stages within a time, and keeps what became of them in ``tour.json``."""

    def __init__(self, out: Path, device: str, seconds: float) -> None:
        self.outcomes: dict[str, Outcome] = {}
        self._out, self._device = out, device
        self._end = time.monotonic() + seconds
        self._beside: Running | None = None

    def run(self, stages: Sequence[Stage]) -> str:
        """Returns the stage to go on with; empty when none is left."""
        with open(self._out / "tour.log", "ab") as log, open(self._out / "beside.log", "ab") as other:
            for i, stage in enumerate(stages):
                if self._beside is not None and self._beside.stage.until == stage.name:
                    self._join()
                left = self._end - time.monotonic() - MARGIN_S
                if left < stage.least_s:
                    self._join()
                    for missing in stages[i:]:
                        self._tell(Outcome(missing.name, missing.shows, NEXT))
                    return stage.name
                self._one(stage, other if stage.beside else log, min(stage.limit_s, left))
            self._join()
        return ""

    def _one(self, stage: Stage, log: IO[bytes], limit_s: float) -> None:
        command = stage.command if self._device == "cuda" else stage.on_cpu
        if command is None:
            self._tell(Outcome(stage.name, stage.shows, LEFT_OUT))
            return
        running = Running(stage, [part.replace("OUT/", f"{self._out}/") for part in command], log, limit_s)
        if stage.beside:
            self._beside = running
            return
        self._tell(running.wait())

    def _join(self) -> None:
        running, self._beside = self._beside, None
        if running is not None:
            self._tell(running.wait(max(self._end - time.monotonic() - MARGIN_S, 0.0)))

    def _tell(self, outcome: Outcome) -> None:
        self.outcomes[outcome.name] = outcome
        whole = {"device": self._device, "stages": [asdict(each) for each in self.outcomes.values()]}
        made = self._out / "tour.json.new"
        made.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
        made.replace(self._out / "tour.json")
        print(f"{outcome.seconds:6.0f} s  {outcome.name}: {outcome.state}", flush=True)


def chosen(first: str, only: str) -> list[Stage]:
    """The stages from ``first`` on, or those of ``only``. Raises ConfigError for a name that none has."""
    names = [stage.name for stage in STAGES]
    wanted = [name for name in only.split(",") if name]
    if unknown := [name for name in (*wanted, *([first] if first else [])) if name not in names]:
        raise ConfigError("stages", f"{', '.join(unknown)}: none of {', '.join(names)}")
    begin = names.index(first) if first else 0
    return [stage for stage in STAGES[begin:] if not wanted or stage.name in wanted]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code: 1 when a stage did not pass, 3 when stages are left for another call."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.tour", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of what is measured and said")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="of this call")
    parser.add_argument("--from", dest="first", default="", help="stage to begin with")
    parser.add_argument("--stages", default="", help="only these, separated by commas")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu is a dry run on tiny sizes")
    parser.add_argument("--list", action="store_true", help="say what the stages are, and run none")
    given = parser.parse_args(arguments)
    try:
        stages = chosen(given.first, given.stages)
    except ConfigError as error:
        print(f"error --stages: {error.message}", file=sys.stderr)
        return 2
    if given.list:
        for stage in stages:
            print(f"{stage.name:11} {stage.limit_s:4.0f} s  {stage.shows}")
        return 0
    given.out.mkdir(parents=True, exist_ok=True)
    tour = Tour(given.out.resolve(), given.device, 60 * given.minutes)
    if following := tour.run(stages):
        print(f"go on with: --from {following}")
    if any(outcome.state in (FAILED, CUT) for outcome in tour.outcomes.values()):
        return 1
    return 3 if following else 0


if __name__ == "__main__":
    sys.exit(main())
