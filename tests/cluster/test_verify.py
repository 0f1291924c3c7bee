"""``paceline verify`` on tiny deployments in this process: equal ones, one with other weights, a plain process, a file
of recorded answers."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import typer
from typer.testing import CliRunner, Result

from cluster.commands.verify import verify
from cluster.verification.answers import About, Answer
from cluster.verification.asked import FIRST_SEED, Asked, request_of
from cluster.verification.built_in import built_in
from cluster.verification.report import report_json, show_difference, show_report
from cluster.verification.run import Verification
from paceline.client.testing import FakeServer
from paceline.request import TokenLogprobs
from tests.multihost.small_model import write_model
from tests.support.folder_deployment import deployed
from tests.support.tiny_chat import CHAT_VOCAB
from tests.support.tiny_model import tiny_spec

SPEC = tiny_spec(CHAT_VOCAB)
ASKED = [
    {"prompt": "over and over and over and", "max_tokens": 24, "temperature": 0},
    {"prompt": "a stop", "max_tokens": 40, "temperature": 1.0, "stop": ["e", "Q"]},
    {"prompt": [9, 8, 7, 9, 8, 7], "max_tokens": 16, "top_logprobs": 2, "logit_bias": {"70": 4}, "n": 2},
    {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 20, "prompt_logprobs": 1, "frequency_penalty": 0.5},
    {"prompt": "yes or no: ", "choice": ["yes", "no"], "max_tokens": 8},
    {"prompt": "nothing", "max_tokens": 0},
]


UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


async def run(*arguments: object) -> Result:
    """The command, on a thread: the servers are on this loop."""
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(verify)
    return await asyncio.to_thread(lambda: CliRunner().invoke(app, [str(argument) for argument in arguments]))


@pytest.fixture
def asked(tmp_path: Path) -> Path:
    file = tmp_path / "asked.jsonl"
    file.write_text("\n".join(json.dumps(fields) for fields in ASKED))
    return file


async def test_equal_deployments_a_plain_process_and_recorded_answers(tmp_path: Path, asked: Path) -> None:
    folder, kept = write_model(tmp_path / "tiny", SPEC, seed=0), tmp_path / "kept.jsonl"
    async with deployed(folder, drafter="ngram") as one, deployed(folder, drafter="suffix") as two:
        sides = ("--at", one, "--against", two, "--against-plain", folder)
        done = await run("--requests", asked, *sides, "--record", kept)
        assert done.exit_code == 0, done.output
        assert f"6 of 6 answers are equal to those of {two}" in done.output
        assert "6 of 6 answers are equal to those of the plain process" in done.output
        assert "log-probabilities of equal" not in done.output
        again = await run("--requests", kept, "--at", two, "--json")
        assert again.exit_code == 0, again.output
        report = json.loads(again.stdout)
        assert report["against"][0] | {"name": ""} == {
            "name": "",
            "compared": 6,
            "equal": 6,
            "largest_logprob_gap": 0.0,
            "differences": [],
        }
        digests = {(side["weights"], side["fingerprint"]) for side in report["sides"]}
        assert len(digests) == 1
        assert all(digests.pop())


def test_the_built_in_requests_mix_everything_and_fit_the_context() -> None:
    made = built_in(8192, chats=True)
    options = [dict(one.options) for one in made]
    named = {name for one in options for name in one}
    assert {"seed", "stop", "response_format", "regex", "choice", "n", "top_logprobs", "prompt_logprobs"} <= named
    assert {"frequency_penalty", "repetition_penalty", "min_tokens", "top_p", "min_p", "ignore_eos"} <= named
    assert {one["temperature"] for one in options} >= {0.0, 1.0}
    assert any(not isinstance(one.prompt, str) for one in made)
    assert 0 < len(built_in(256, chats=False)) < len(made)
    assert built_in(40, chats=True) == []


async def test_other_weights_are_found_at_the_first_token_that_differs(tmp_path: Path, asked: Path) -> None:
    right, other = (
        write_model(tmp_path / "a" / "tiny", SPEC, seed=0),
        write_model(tmp_path / "b" / "tiny", SPEC, seed=1),
    )
    async with deployed(right, drafter="ngram") as one, deployed(other, drafter="ngram") as two:
        done = await run("--requests", asked, "--at", one, "--against", two)
        assert done.exit_code == 1, done.output
        assert "request 1 ('over and over and over and', temperature 0), choice 0: differs at token " in done.output
        assert "the distributions differ, by " in done.output
        report = json.loads((await run("--requests", asked, "--at", one, "--against", two, "--json")).stdout)
        (against,) = report["against"]
        first = against["differences"][0]
        assert first["tokens"][0] != first["tokens"][1]
        assert first["repeats"] == [True, True]
        for told, token in zip(first["logprobs"], first["tokens"], strict=True):
            assert told["best"][0] == [token, told["logprob"]]  # greedy
        assert report["sides"][0]["weights"] != report["sides"][1]["weights"]


class Scripted:
    """A side that answers anything."""

    def __init__(self, name: str, *answers: list[Answer]) -> None:
        self.name, self.about, self._answers = name, About("tiny\x1b[2J"), iter(answers)

    async def answer(self, asked: Asked, extra: Mapping[str, Any]) -> list[Answer]:
        return next(self._answers)


def test_null_is_no_value() -> None:
    """Mutant: with a null for a seed each side draws its own, and no temperature is told."""
    asked = request_of(3, {"prompt": "x", "seed": None, "temperature": None, "recorded": None})
    assert asked.options == {"seed": FIRST_SEED + 3}
    assert asked.told == "request 3 ('x', temperature 1)"


async def test_a_side_that_answers_nonsense_is_reported() -> None:
    """Mutants: fewer choices end the run when a side is asked again; -inf is written as it is, which is no JSON."""
    odd = TokenLogprobs(-math.inf, (1, 2), (-math.inf, math.nan))
    first, other = ([Answer((token,), "a", "stop", logprobs=(odd,))] for token in (1, 2))
    sides = Scripted("one", first, first), Scripted("two", other, [])
    done = Verification(sides[0], sides[1:], lambda one: show_difference(one, "one"))
    await done.run([request_of(1, {"prompt": "x"})], 1, lambda: None)
    lines: list[str] = []
    show_report(done, sides, lines.append)
    assert all(line.isprintable() for line in lines)
    (against,) = json.loads(json.dumps(report_json(done, sides)), parse_constant=pytest.fail)["against"]
    assert against["differences"][0]["repeats"] == [True, False]


async def test_no_verdict_is_another_exit_code_than_a_difference(tmp_path: Path, asked: Path) -> None:
    folder, odd = write_model(tmp_path / "tiny", SPEC, seed=0), tmp_path / "odd.jsonl"
    unlike = tmp_path / "unlike"
    folder.rename(unlike)
    async with deployed(unlike, drafter="none") as at:
        for arguments, told in (
            (["--requests", asked, "--against", "127.0.0.1:1"], "127.0.0.1:1 does not answer"),
            (["--requests", asked], "nothing to compare with"),
            (["--requests", tmp_path / "none", "--against", at], "No such file"),
            (["--requests", odd, "--against", at], "line 1: unknown option 'temprature'"),
        ):
            odd.write_text('{"prompt": "x", "temprature": 1}')
            done = await run("--at", at, "--timeout", 5, *arguments)
            assert (done.exit_code, told in done.output) == (2, True), done.output
        odd.write_text(json.dumps({"prompt": "x", "bad_words": ["a"] * 70}))
        refused = await run("--at", at, "--against-plain", unlike, "--requests", odd)
        assert (refused.exit_code, "the plain process refuses" in refused.output) == (2, True), refused.output
        odd.write_text('{"prompt": "x", "drafter": "lookahead"}')
        over = await run("--at", at, "--requests", odd, "--record", odd)
        assert (over.exit_code, "would write over" in over.output) == (2, True), over.output
        assert "lookahead" in odd.read_text()
        refused = await run("--at", at, "--against", at, "--requests", odd)
        assert (refused.exit_code, "refuses request 1" in refused.output) == (2, True), refused.output
        async with deployed(write_model(tmp_path / "tiny", SPEC, seed=0), drafter="none") as named:
            other = await run("--at", at, "--against", named, "--requests", asked)
            assert (other.exit_code, "model is unlike at" in other.output) == (2, True), other.output


class Recording(grpc.GenericRpcHandler):
    """A deployment that refuses every call, and keeps what the caller proves itself with."""

    def __init__(self) -> None:
        self.keys: list[str | bytes | None] = []

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        self.keys.append(dict(details.invocation_metadata or ()).get("authorization"))
        return grpc.unary_unary_rpc_method_handler(lambda request, context: context.abort(UNAVAILABLE, "not now"))


async def test_each_side_gets_its_own_key_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: without a file for it the second side gets the first one's key, or that of the environment."""
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_text("first-key")
    second.write_text("second-key")
    monkeypatch.setenv("PACELINE_API_KEY", "key-of-the-environment")
    recording, server = Recording(), grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers([recording])
    against = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    with FakeServer() as fake:
        sides = ("--at", fake.address, "--api-key-file", first, "--against", against)
        for more, key in (((), None), (("--against-api-key-file", second), "Bearer second-key")):
            assert (await run(*sides, *more)).exit_code == 2
            assert set(recording.keys) == {key}
            recording.keys.clear()
    server.stop(0)
