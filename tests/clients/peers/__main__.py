"""Runs the tests that vLLM and SGLang have of their servers against a deployment of Paceline, unmodified.

    python -m tests.clients.peers --vllm FOLDER --sglang FOLDER --results FILE [--files REGEX] [--raw FILE]
    python -m tests.clients.peers --recount RAW --results FILE

A folder is a checkout of the peer's sources. Its tests run in a process of their own, where `inside` stands in for the
peer's package. The file counts, by test, what passed and why the others did not (`reasons`). Exit status 1: a test
failed and no rule says why. ``--raw`` keeps what pytest said, which ``--recount`` counts anew with other rules.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.models.hub import resolve_model
from tests.clients.peers.reasons import UNEXPLAINED, Result, once, reason, rules_of
from tests.support.server import serve

MODEL = "smollm2-135m-instruct"
INSIDE = Path(__file__).with_name("inside")
NAMES = re.compile(r"""(?:MODEL\w*|model\w*|"model")\s*[=:]\s*"([\w.-]+(?:/[\w.-]+)?)\"""")
TEST_TIMEOUT_S, SUITE_TIMEOUT_S = 120, 3600
INI = "[pytest]\nasyncio_mode = strict\nasyncio_default_fixture_loop_scope = function\n"


ASKS = re.compile(r"RemoteOpenAIServer|popen_launch_server|\bclient\b *[:,)]")  # what asks a server says one of these


@dataclass(frozen=True)
class Peer:
    """Where a peer has tests of its server. beside: files that are left out. top: pytest reads no conftest.py above."""

    name: str
    places: tuple[str, ...]
    beside: str
    top: str


VLLM = Peer(
    "vllm",
    (
        *("tests/entrypoints/openai", "tests/entrypoints/anthropic"),
        *("tests/entrypoints/serve/tokenize", "tests/entrypoints/serve/instrumentator"),
    ),
    "harmony|parsable|mcp|correctness|_vlm|serving_|error|conversion"  # gpt-oss, images, data sets, units
    "|anthropic|function_call|namespace|test_simple|decisions|thinking|schema|metrics|_uds",  # tools and long answers
    "tests/entrypoints",
)
SGLANG = Peer(
    "sglang",
    ("test/registered/openai_server", "test/manual/openai_server"),
    "hidden_states|transcription|tool|function|anthropic|http2|large_max",
    "test",
)


def files_of(peer: Peer, sources: Path, pattern: str) -> list[Path]:
    """The files with tests that ask a server and whose paths match, sorted."""
    found = (file for place in peer.places for file in (sources / place).rglob("test_*.py"))
    named = {str(file.relative_to(sources)): file for file in found}
    taken = (file for name, file in named.items() if re.search(pattern, name) and not re.search(peer.beside, name))
    return sorted(file for file in taken if ASKS.search(file.read_text(encoding="utf-8")))


def names_in(files: list[Path]) -> set[str]:
    """Names of models that the tests ask for."""
    return {name for file in files for name in NAMES.findall(file.read_text(encoding="utf-8"))}


def run(peer: Peer, sources: Path, files: list[Path], url: str) -> list[Result]:
    """Run a peer's tests; one result for each."""
    with tempfile.TemporaryDirectory(prefix="paceline-peers-") as folder:
        found, ini = Path(folder) / "results", Path(folder) / "pytest.ini"
        found.touch()
        ini.write_text(INI)
        more = {
            "PEER_TESTS_URL": url,
            "PEER_TESTS_MODEL": MODEL,
            "PEER_TESTS_FOLDER": str(resolve_model(MODEL)),
            "PEER_TESTS_RESULTS": str(found),
            "PYTHONPATH": f"{INSIDE}{os.pathsep}{sources}",
            "PYTHONDONTWRITEBYTECODE": "1",
            "HF_HUB_OFFLINE": "1",
        }
        options = ["-p", "peer_plugin", "-p", "no:cacheprovider", "-p", "no:schemathesis", "-q", "--tb=native"]
        options += ["--continue-on-collection-errors"]
        options += ["-c", str(ini), f"--rootdir={sources}", f"--confcutdir={sources / peer.top}"]
        options += [f"--timeout={TEST_TIMEOUT_S}", *map(str, files)]
        command = [sys.executable, "-m", "pytest", *options]
        subprocess.run(command, cwd=sources, env={**os.environ, **more}, timeout=SUITE_TIMEOUT_S, check=False)
        return once(Result(**json.loads(line)) for line in found.read_text(encoding="utf-8").splitlines())


def told(peer: str, results: list[Result]) -> dict[str, Any]:
    """What the file has of a peer."""
    rules = rules_of(peer)
    others = {one.test: reason(one, rules) for one in results if one.outcome != "passed"}
    passed = sorted(one.test for one in results if one.outcome == "passed")
    return {
        "passed": len(passed),
        "others": dict(sorted(Counter(name for name, _ in others.values()).items())),
        "tests": dict.fromkeys(passed, "passed")
        | {test: ": ".join(filter(None, why)) for test, why in sorted(others.items())},
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.clients.peers")
    parser.add_argument("--vllm", type=Path, help="a checkout of vLLM")
    parser.add_argument("--sglang", type=Path, help="a checkout of SGLang")
    parser.add_argument("--results", type=Path, help="the JSON file to write")
    parser.add_argument("--files", default="", help="a pattern for the paths of files; all unless given")
    parser.add_argument("--raw", type=Path, help="keep what pytest said in this file")
    parser.add_argument("--recount", type=Path, help="count what --raw kept, and run nothing")
    return parser.parse_args()


def _asked(arguments: argparse.Namespace) -> Iterator[tuple[Peer, Path, list[Path]]]:
    for peer in (VLLM, SGLANG):
        folder: Path | None = getattr(arguments, peer.name)
        if folder is not None and (files := files_of(peer, folder.resolve(), arguments.files)):
            yield peer, folder.resolve(), files


def _run_all(arguments: argparse.Namespace) -> dict[str, list[Result]]:
    """Results by peer."""
    asked = list(_asked(arguments))
    names = sorted(names_in([file for _, _, files in asked for file in files]) - {MODEL})
    options = ("--model", MODEL, "--served-model-name", ",".join([MODEL, *names]), "--drafter", "ngram", "--no-standby")
    with serve(*options) as server:
        return {peer.name: run(peer, folder, files, f"http://{server.http}") for peer, folder, files in asked}


def _kept(raw: Path) -> dict[str, list[Result]]:
    kept = json.loads(raw.read_text(encoding="utf-8"))
    return {peer: [Result(**one) for one in results] for peer, results in kept.items()}


def main() -> int:
    """Run what is asked for, and write what it gave."""
    arguments = _arguments()
    results = _kept(arguments.recount) if arguments.recount else _run_all(arguments)
    if arguments.raw is not None:
        raw = {peer: [asdict(one) for one in found] for peer, found in results.items()}
        arguments.raw.write_text(json.dumps(raw), encoding="utf-8")
    written: dict[str, Any] = {"model": MODEL}
    for peer, found in results.items():
        written[peer] = made = told(peer, found)
        for one in found:
            if made["tests"][one.test] == UNEXPLAINED:
                print(f"\n== {one.test}\n{one.error}")
        print(peer, made["passed"], "passed,", made["others"])
    if arguments.results is not None:
        arguments.results.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    return int(any(UNEXPLAINED in written[peer]["others"] for peer in results))


if __name__ == "__main__":
    sys.exit(main())
