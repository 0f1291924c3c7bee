"""``python -m benchmarks.refusals``: how soon bad input is refused over HTTP, and what a stream beside it notices.

A deployment answers a stream all the while. Each bad body is sent several times; what is read is the time until its
error, the field that the error names, and the longest gap between two events of the stream. The first row sends good
requests, for comparison.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from benchmarks.common.console import step
from benchmarks.common.processes import serving_paceline

Json = dict[str, Any]
CHATS, TEXTS, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
STREAM_TOKENS = 1500
TIMEOUT_S = 300.0  # of a request; a machine that other work shares takes long for the large ones
GOOD = "good requests"


def _tool(schema: Json, name: str = "f") -> Json:
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def _schema(schema: Json) -> Json:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}


def _body(fields: Json) -> bytes:
    return json.dumps(_said() | fields).encode()


def _doubled(count: int) -> Json:
    """Definitions, each of which asks twice for the one before it."""
    defs: Json = {"d0": {"type": "string", "pattern": "a.*"}}
    defs |= {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i - 1}"}] * 2} for i in range(1, count)}
    return {"$defs": defs, "$ref": f"#/$defs/d{count - 1}"}


def _said(*turns: Json) -> Json:
    return {"messages": [{"role": "user", "content": "a"}, *turns]}


def _chained(count: int) -> Json:
    """Definitions, each a list of the one before it."""
    defs: Json = {"d0": {}} | {
        f"d{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{i - 1}"}} for i in range(1, count)
    }
    return {"$defs": defs, "$ref": f"#/$defs/d{count - 1}"}


def _renamed(count: int) -> Json:
    """One large definition under many names."""
    names = {f"a{i}": {"$ref": "#/d/" + "0" * (i + 1)} for i in range(count)}
    return {"d": [{"allOf": [{"enum": [1] * 2000}] * 5}], "properties": names}


def _calls(count: int, arguments: str) -> Json:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return _said(*({"role": "assistant", "content": None, "tool_calls": [call]} for _ in range(count)))


def _grammar(source: str) -> Json:
    return {"structured_outputs": {"grammar": source}}


SLOW = [{"type": "string", "pattern": f".*{chr(97 + i)}.{{{200 + i}}}"} for i in range(26)]
SCHEMAS: dict[str, Json] = {
    "a product of branches": {"allOf": [{"anyOf": [{"pattern": f"a{i}{j}"} for j in range(4)]} for i in range(9)]},
    "doubled conjunctions": _doubled(20),
    "a reference to itself": {"$ref": "#"},
    "a circle of references": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    "a chain of 700 references": _chained(700),
    "200 names of one definition": _renamed(200),
    "a schema of 900 levels": json.loads('{"items":' * 900 + "{}" + "}" * 900),
    "a regex that explodes in a schema": {"type": "string", "pattern": "^((a{100}){100}){100}$"},
    "the same in patternProperties": {"patternProperties": {"^((a{100}){100}){100}$": {"pattern": "a"}}},
    "an unknown keyword": {"not": {"type": "string"}},
    "500,000 enum values": {"enum": list(range(500_000))},
    "a million enum values": {"enum": list(range(1_000_000))},
    "half a character": {"const": "\ud800"},
    "a compilation without end": {"type": "string", "allOf": SLOW},
}
GRAMMARS: dict[str, Json] = {
    "a regex that explodes": {"structured_outputs": {"regex": "((a{1,100}){1,100}){1,100}"}},
    "classes of letters": {"structured_outputs": {"regex": r"(\p{L}{1,50}\p{N}{1,50}){1,200}"}},
    "900 classes of letters, which are taken": {
        "structured_outputs": {"regex": r"(\p{L}\p{N}\p{So}){300}"},
        "max_tokens": 1,
    },
    "20,000 choices": {"structured_outputs": {"choice": ["x"] * 20_000}},
    "rules that begin with themselves": _grammar("start: s\ns: " + "s s | " * 60 + '"x"'),
    "a text without an end": _grammar('start: "' + r"\"" * 15_000),
    "an expression without an end": _grammar("start: /" + r"\/" * 15_000),
    "GBNF of 900 brackets": _grammar("root ::= " + "(" * 900 + '"a"' + ")" * 900),
}
FIELDS: dict[str, Json] = {
    "a million values in a tool": {"tools": [_tool({"properties": {"a": {"enum": list(range(1_000_000))}}})]},
    "a bomb in a tool": {"tools": [_tool(_doubled(20) | {"type": "object"})], "tool_choice": "required"},
    "tools with equal names": {"tools": [_tool({}), _tool({})]},
    "5,000 tools": {"tools": [_tool({}, f"f{i}") for i in range(5000)]},
    "a name of a million letters": {"tools": [_tool({}, "f" * 1_000_000)]},
    "a call that nobody made": _said({"role": "tool", "tool_call_id": "none", "content": "x"}),
    "calls with 20,001 values": _calls(8, json.dumps({"a": [1] * 20_001})),
    "an image": {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
    "a text, an image and a sound": {
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "a"},
                    {"type": "image_url", "image_url": {"url": "data:,"}},
                    {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
                ],
            }
        ]
    },
    "20,000 messages": _said(*[{"role": "user", "content": "a"}] * 20_000),
    "100,000 biases": {"logit_bias": {str(i): 1 for i in range(100_000)}},
    "10,000 stop texts": {"stop": ["x"] * 10_000},
    "a stop text of a million letters": {"stop": "x" * 1_000_000},
    "50,000 unknown fields": {f"f{i}": i for i in range(50_000)},
}
# What the bounds of a body allow, and no answer can come of.
LARGE: dict[str, tuple[str, Json]] = {
    "2,047 blocks": (
        MESSAGES,
        {"max_tokens": 1, "messages": [{"role": "user", "content": [{"type": "text", "text": "x" * 100}] * 2047}]},
    ),
    "2,047 items": (
        RESPONSES,
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "x" * 100}]}] * 2047},
    ),
    "2,047 turns with calls": (CHATS, _calls(2046, "{}")),
    "200 prompts": (TEXTS, {"prompt": ["a"] * 200}),
    "128 prompts of 4,096 tokens, 129 choices": (TEXTS, {"prompt": [[1] * 4096] * 128, "n": 129}),
    "numbers of 4,000 digits": (TEXTS, {"prompt": [10**4000] * 1900}),
}
BAD: dict[str, tuple[str, bytes]] = {
    GOOD: (CHATS, _body({"max_tokens": 1})),
    **{what: (CHATS, _body(_schema(schema))) for what, schema in SCHEMAS.items()},
    **{what: (CHATS, _body(fields)) for what, fields in (GRAMMARS | FIELDS).items()},
    **{what: (path, json.dumps(body).encode()) for what, (path, body) in LARGE.items()},
    "60,000 open brackets": (CHATS, b'{"messages":' + b"[" * 60_000),
}


@dataclass(frozen=True)
class Figures:
    """What came of one kind of body."""

    what: str
    status: int
    field: str  # that the error names
    median_ms: float  # until the answer
    worst_ms: float
    longest_gap_ms: float  # between two events of the stream meanwhile


class Stream:
    """A stream that runs on, and when its last event came."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client
        self._last, self._longest = time.perf_counter(), 0.0

    async def run(self) -> None:
        """One answer after the other."""
        body = {"prompt": "1, 2, 3,", "max_tokens": STREAM_TOKENS, "ignore_eos": True, "stream": True}
        while True:
            async with self._client.stream("POST", "/v1/completions", json=body) as reply:
                reply.raise_for_status()
                events = reply.aiter_lines()
                await anext(events)
                self._last = time.perf_counter()  # a prompt's time is no gap
                async for _ in events:
                    self._note()

    def longest(self) -> float:
        """Seconds, since this was asked last; a gap that has not ended counts as well."""
        self._note()
        found, self._longest = self._longest, 0.0
        return found

    def _note(self) -> None:
        now = time.perf_counter()
        self._longest, self._last = max(self._longest, now - self._last), now


async def measure(address: str, repeats: int, pause_s: float) -> list[Figures]:
    """Every kind of body, ``repeats`` times each."""
    async with httpx.AsyncClient(base_url=f"http://{address}", timeout=TIMEOUT_S) as client:
        await client.post(CHATS, content=_body(_schema({"type": "integer"}) | {"max_tokens": 1}))  # starts the trials
        stream = Stream(client)
        running = asyncio.create_task(stream.run())
        await asyncio.sleep(1.0)
        try:
            found = []
            for number, what in enumerate(BAD):
                step(number, len(BAD), what)
                found.append(await _measured(client, stream, what, repeats, pause_s))
            return found
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def _measured(client: httpx.AsyncClient, stream: Stream, what: str, repeats: int, pause_s: float) -> Figures:
    path, body = BAD[what]
    times = []
    await asyncio.sleep(pause_s)
    stream.longest()
    for _ in range(repeats):
        began = time.perf_counter()
        reply = await client.post(path, content=body)
        times.append(1e3 * (time.perf_counter() - began))
        await asyncio.sleep(pause_s)
    gap_ms = 1e3 * stream.longest()
    error = reply.json().get("error") or {}
    field = str(error.get("param") or error.get("message", "")[:40])  # Anthropic's errors have no field of their own
    return Figures(what, reply.status_code, field, statistics.median(times), max(times), gap_ms)


def show(rows: list[Figures]) -> None:
    """Print a table."""
    table = Table(title="bad input")
    for column in asdict(rows[0]):
        table.add_column(column)
    for row in rows:
        table.add_row(*(f"{value:.1f}" if isinstance(value, float) else str(value) for value in asdict(row).values()))
    Console(width=140).print(table)


def main() -> None:
    """Start a deployment, send everything, print, stop."""
    parser = argparse.ArgumentParser(prog="benchmarks.refusals", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--pause-s", type=float, default=0.2, help="between two requests")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    step(0, len(BAD), "starting a deployment")
    with serving_paceline(["--model", options.model, "--drafter", "none", "--no-standby"]) as addresses:
        rows = asyncio.run(measure(addresses["http"], options.repeats, options.pause_s))
    show(rows)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
