"""A corpus file that grows by one line per prompt, so that a run that was killed goes on where it ended.

Every prompt has a number, and every number one line: its answer, or why it has none (``left_out``, empty
``prompt_ids`` and ``answer_ids``: readers of a corpus skip it). What is done is told by the file alone. Where
prompts are alike, the one with the lowest number has the answer, in whatever order they end; ``settle`` sorts the lines
by number, so the finished file does not depend on that order either. Memory: a few hundred bytes a line.
"""

from __future__ import annotations

import fcntl
import json
import os
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from paceline.errors import ConfigError

BEGINNING = b'{"number": '  # of every line
SAID_BEFORE = "asked before"


class AnswerFile:
    """The lines of one corpus, open for more; nobody else writes them meanwhile.

    ``done`` are the numbers that have a line. ``answers``, ``answer_tokens`` and ``left_out`` count its lines.
    """

    def __init__(self, path: Path, run: str) -> None:
        """run: what all lines were made with; a file of another run is refused. A line cut short is cut off.

        Raises ConfigError "out".
        """
        if path.suffix in (".xz", ".gz"):
            raise ConfigError("out", f"{path}: a corpus is written as plain text; compress it when it is finished")
        self.path, self.run = path, run
        self.done: set[int] = set()
        self.answers = self.answer_tokens = self.left_out = 0
        self._starts: list[tuple[int, int]] = []  # (number, first byte) of each line, in the order of the file
        self._owners: dict[bytes, int] = {}  # prompt -> the lowest number that has it
        self._beaten: set[int] = set()  # numbers whose prompt a lower one has too
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b")
        except OSError as error:
            raise ConfigError("out", f"{path} cannot be written: {error.strerror}") from None
        try:
            self._lock()
            self._read()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def claim(self, number: int, prompt_ids: Sequence[int]) -> bool:
        """Whether prompt ``number`` is to be answered; it is not when a lower number asks the same."""
        key = blake2b(array("q", prompt_ids).tobytes(), digest_size=16).digest()
        owner = self._owners.setdefault(key, number)
        if owner < number:
            return False
        if owner > number:
            self._beaten.add(owner)
            self._owners[key] = number
        return True

    def add_answer(
        self, number: int, source: str, temperature: float, finish: str, prompt_ids: Sequence[int], ids: Sequence[int]
    ) -> None:
        """Write the answer of a prompt that was claimed; ``settle`` takes it out if a lower number claimed it since."""
        fields = {"temperature": temperature, "finish": finish, "prompt_ids": prompt_ids, "answer_ids": ids}
        self._append(number, self._line(number, source, fields))
        self.answers += 1
        self.answer_tokens += len(ids)

    def leave_out(self, number: int, source: str, why: str) -> None:
        """Write that a prompt has no answer."""
        self._append(number, self._line(number, source, _nothing(why)))
        self.left_out += 1

    def settle(self) -> None:
        """Sort the lines by number and take out answers that a lower number gives too; whole or not at all."""
        ordered = sorted(self._starts)
        if ordered == self._starts and not self._beaten:
            return
        aside = self.path.with_name(f"{self.path.name}.part")
        with aside.open("wb") as out:
            for number, start in ordered:
                self._file.seek(start)
                line = self._file.readline()
                out.write(self._without_answer(number, line) if number in self._beaten else line)
        os.replace(aside, self.path)

    def _line(self, number: int, source: str, fields: dict[str, Any]) -> bytes:
        return json.dumps({"number": number, "run": self.run, "source": source, **fields}).encode() + b"\n"

    def _append(self, number: int, line: bytes) -> None:
        self._starts.append((number, self._file.seek(0, os.SEEK_END)))
        self._file.write(line)
        self._file.flush()
        self.done.add(number)

    def _without_answer(self, number: int, line: bytes) -> bytes:
        row = json.loads(line)
        self.answers -= 1
        self.answer_tokens -= len(row["answer_ids"])
        self.left_out += 1
        return self._line(number, row["source"], _nothing(SAID_BEFORE))

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError("out", f"another run is writing {self.path}") from None

    def _read(self) -> None:
        """Take in the lines there are; what a killed run left of its last one goes."""
        self._file.seek(0)
        start = 0
        for count, line in enumerate(self._file, start=1):
            if not line.endswith(b"\n") and (line.startswith(BEGINNING) or BEGINNING.startswith(line)):
                self._file.truncate(start)
                return
            try:
                self._take_in(json.loads(line), start)
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError("out", f"{self.path}:{count} is not a line of this command: {error!r}") from None
            except ConfigError as error:
                raise ConfigError("out", f"{self.path}:{count} {error.message}") from None
            start += len(line)

    def _take_in(self, row: Any, start: int) -> None:
        number, run, answer = int(row["number"]), row.get("run"), row["answer_ids"]
        if run != self.run:
            raise ConfigError("out", "was made with another model, prompts, seed or limits: choose another file")
        self._starts.append((number, start))
        self.done.add(number)
        if "left_out" in row:
            self.left_out += 1
            return
        self.answers += 1
        self.answer_tokens += len(answer)
        if not self.claim(number, row["prompt_ids"]):
            self._beaten.add(number)


def _nothing(why: str) -> dict[str, Any]:
    return {"left_out": why, "prompt_ids": [], "answer_ids": []}
