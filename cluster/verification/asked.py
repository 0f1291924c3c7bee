"""What is asked of every side: the requests of a file, one a line, with answers that were recorded, if any.

A line is a JSON object: ``prompt`` (a text or token ids) or ``messages``, the options of the SDK's GenerateOptions
under their names, and perhaps ``recorded``. A request without a seed gets one: else each side would draw its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from cluster.verification.answers import About, Answer
from paceline.client import Prompt
from paceline.client.convert import generate_request

MAX_REQUESTS = 100_000
MAX_LINE_BYTES = 64 * 1024 * 1024  # a recorded answer has its tokens and their log-probabilities
FIRST_SEED = 20_000  # of requests that have none; the number of the request is added


class CannotCompare(Exception):
    """Why no verdict can be given: a side that cannot be asked, a file that cannot be read, another model."""


@dataclass(frozen=True)
class Recorded:
    """Answers of an earlier run, and who gave them."""

    about: About
    answers: tuple[Answer, ...]  # of all choices, by index


@dataclass(frozen=True)
class Asked:
    """One request."""

    number: int  # the line of the file, from 1
    prompt: Prompt
    options: Mapping[str, Any]  # GenerateOptions
    recorded: Recorded | None = None

    def line(self, recorded: Recorded) -> str:
        """The request with these answers, as a line of a file."""
        key = "messages" if _is_chat(self.prompt) else "prompt"
        kept = _RECORDED.dump_python(recorded, mode="json")
        return json.dumps({key: self.prompt, **self.options, "recorded": kept}, ensure_ascii=False)

    @property
    def told(self) -> str:
        """The request in a few words, for a report."""
        shown = self.prompt if isinstance(self.prompt, str) else json.dumps(self.prompt, ensure_ascii=False)
        shown = f"{shown[:60]}..." if len(shown) > 60 else shown
        return f"request {self.number} ({shown!r}, temperature {self.options.get('temperature', 1.0):g})"


_RECORDED = TypeAdapter(Recorded)


def read_requests(file: Path) -> list[Asked]:
    """All requests of a file. Raises CannotCompare with the line at fault."""
    try:
        with file.open("rb") as lines:
            asked = list(_requests(file, lines))
    except OSError as error:
        raise CannotCompare(f"{file}: {error.strerror}") from None
    if not asked:
        raise CannotCompare(f"{file} has no request")
    return asked


def _requests(file: Path, lines: Any) -> Iterator[Asked]:
    number = 0
    while line := lines.readline(MAX_LINE_BYTES + 1):
        number += 1
        where = f"{file}, line {number}"
        if len(line) > MAX_LINE_BYTES:
            raise CannotCompare(f"{where}: has more than {MAX_LINE_BYTES} bytes")
        if number > MAX_REQUESTS:
            raise CannotCompare(f"{file} has more than {MAX_REQUESTS} lines")
        if not line.strip():
            continue
        try:
            yield request_of(number, json.loads(line))
        except ValidationError as error:
            raise CannotCompare(f"{where}: recorded: {error.errors()[0]['msg']}") from None
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise CannotCompare(f"{where}: {error}") from None


def request_of(number: int, fields: Any) -> Asked:
    """The request of a line. TypeError or ValueError for one that the SDK does not take."""
    if not isinstance(fields, dict):
        raise TypeError("is no JSON object")
    options = {name: value for name, value in fields.items() if value is not None}  # null means not given
    recorded = options.pop("recorded", None)
    prompts = [options.pop(key) for key in ("prompt", "messages") if key in options]
    if len(prompts) != 1:
        raise TypeError("has prompt or messages, and not both")
    if "logit_bias" in options:  # keys of JSON are texts
        options["logit_bias"] = {int(token_id): bias for token_id, bias in dict(options["logit_bias"]).items()}
    options.setdefault("seed", FIRST_SEED + number)
    generate_request(prompts[0], options)  # raises for what no request can hold
    kept = None if recorded is None else _RECORDED.validate_python(recorded)
    return Asked(number, prompts[0], options, kept)


def _is_chat(prompt: Prompt) -> bool:
    return not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
