"""Requests as bytes, and whether the answers are ones that they may get, by the deployment's own document."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from jsonschema import Draft202012Validator  # type: ignore[import-untyped]
from jsonschema.exceptions import best_match  # type: ignore[import-untyped]

from tests.fuzz.campaign import ANSWER_S, Wrongly
from tests.fuzz.http_cases import GENERATIONS, HttpCase
from tests.fuzz.http_socket import Reply, exchange
from tests.support.http_app import FORMATS

# What only fields together decide, or the deployment's context, vocabulary, model, drafters and their limits.
TOGETHER = {
    *("prompt", "messages", "model", "logit_bias", "stop_token_ids", "max_tokens", "min_tokens"),
    *("speculation.drafter", "speculation.num_draft_tokens", "speculation.tree", "speculation.tree_width"),
    *("best_of", "top_logprobs", "prompt_logprobs", "stream_options", "body", "n"),
    *FORMATS,
    *("tools", "tool_choice", "continue_final_message", "chat_template_kwargs"),
}
WITHIN = re.compile(r"(messages|tools|prompt|bad_words)\[\d+\]")  # what each needs, and what stands where
MESSAGES = re.compile(rb"[A-Za-z]+ /v1/messages[/ ?]")  # its errors have a shape of their own


class HttpSender:
    """Sends cases, one connection each."""

    def __init__(self, address: str, document: Mapping[str, Any]) -> None:
        self._address = address
        schemas = document["components"]
        self._checks = {
            name: Draft202012Validator({"$ref": f"#/components/schemas/{name}", "components": schemas})
            for name in schemas["schemas"]
        }

    async def send(self, case: HttpCase) -> str:
        """The status of the last answer; "closed" for none. Raises Wrongly."""
        try:
            replies = await exchange(self._address, case.parts, case.hang_up, ANSWER_S)
        except ValueError as error:
            raise Wrongly(str(error)) from None
        if case.requests and len(replies) != case.requests:
            raise Wrongly(f"{len(replies)} answers to {case.requests} requests")
        shape = "MessageError" if case.parts and MESSAGES.match(case.parts[0]) else "Error"
        for reply in replies:
            self._judge(reply, case.hang_up, shape)
        if case.body is not None and case.requests == 1:
            self._judge_body(case.path, case.body, replies[0])
        return str(replies[-1].status) if replies else "closed"

    def _judge(self, reply: Reply, may_be_cut: bool, shape: str) -> None:
        said = f"{reply.status} {reply.headers} {reply.body[:500]!r}"
        if not reply.whole:
            if may_be_cut:
                return
            raise Wrongly(f"half an answer: {said}")
        if reply.status >= 400 and reply.headers.get("content-type") != "application/json":
            raise Wrongly(f"not the product's error: {said}")
        if reply.status // 100 not in (2, 4) and reply.status != 503:
            raise Wrongly(said)
        if reply.status in (429, 503) and not reply.headers.get("retry-after", "").isdigit():
            raise Wrongly(f"it is not said when to come back: {said}")
        if reply.status >= 400 and reply.body:  # HEAD has none
            self._matches(shape, json.loads(reply.body))
        if reply.headers.get("content-type") == "text/event-stream" and not may_be_cut:
            _judge_events(reply.body)

    def _judge_body(self, path: str, body: bytes, reply: Reply) -> None:
        """The schema decides, but for what fields mean together and what only the deployment knows."""
        said = f"{reply.status} {reply.body[:500]!r}"
        fault = self._fault(GENERATIONS[path], body)
        if fault and 200 <= reply.status < 300:
            raise Wrongly(f"taken though {fault}: {said}")
        if reply.status == 400:
            error = json.loads(reply.body)["error"]
            if not error["param"] or not error["message"].startswith(f"{error['param']}: "):
                raise Wrongly(f"no field is named: {said}")
            if fault == "" and not (error["param"] in TOGETHER or WITHIN.match(error["param"])):
                raise Wrongly(f"refused though the schema allows it: {said}")
        if reply.status == 200 and reply.headers["content-type"] == "application/json":
            self._matches("Chat" if "chat" in path else "Completion", json.loads(reply.body))

    def _fault(self, name: str, body: bytes) -> str | None:
        """Why the body is none by the schema; empty when it is one, None when the schema cannot tell."""
        try:
            value = json.loads(body.decode(), parse_constant=_not_finite, parse_float=_finite)
        except (ValueError, RecursionError) as error:
            return str(error) or "it is too deep"
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return None  # a lone surrogate: refused in a text, of no importance elsewhere
        except RecursionError:
            return None
        return "" if self._checks[name].is_valid(value) else "the schema does not allow it"

    def _matches(self, name: str, value: Any) -> None:
        error = best_match(self._checks[name].iter_errors(value))
        if error is not None:
            raise Wrongly(f"no {name} by the document: {error.message[:300]} in {str(value)[:500]}")


def _judge_events(body: bytes) -> None:
    """A stream ends with [DONE]: nothing went wrong in its midst."""
    lines = [line for line in body.decode("ascii").split("\n\n") if line]
    if not lines or lines[-1] != "data: [DONE]" or any("event: error" in line for line in lines):
        raise Wrongly(f"a stream that broke: {lines[-2:]}")
    for line in lines[:-1]:
        json.loads(line.removeprefix("data: "))


def _not_finite(name: str) -> float:
    raise ValueError(f"{name} is no number")


def _finite(text: str) -> float:
    value = float(text)
    return value if abs(value) != float("inf") else _not_finite(text)
