"""Every program of examples/, and what pages have their reader type, against one deployment."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.assembly.build import build_runner
from paceline.config import NodeConfig
from paceline.request import SamplingParams, SequenceRequest
from tests.support.exactness import run
from tests.support.relay import Relay
from tests.support.server import Server
from tests.support.shell_blocks import ROOT, shell_blocks
from tests.support.tiny_checkpoint import write_tiny_llama

pytestmark = [pytest.mark.e2e, pytest.mark.real_model, pytest.mark.timeout(400)]

EXAMPLES = ROOT / "examples"
PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def example(name: str, *options: object) -> str:
    """What ``examples/NAME.py`` prints; it must end well."""
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *map(str, options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="session")
def server(served_model: Server) -> Server:
    return served_model


def test_train_a_head(tmp_path: Path) -> None:
    """A head of two steps for a tiny target, which then drafts with it."""
    model, out = write_tiny_llama(tmp_path / "tiny", num_layers=4), tmp_path / "training"
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        "".join(json.dumps({"prompt": f"Say {word}."}) + "\n" for word in ("one", "two", "three", "four"))
    )
    corpus = ("--prompts", prompts, "--answer-tokens", 8)
    limits = ("--steps", 2, "--tokens-per-step", 16, "--held-out", 1)
    said = example("train_a_head", out, "--model", model, "--head", "mtp", "--threads", 1, *corpus, *limits)
    head = out / "mtp/head"
    assert said.splitlines()[-1].endswith(f"--model {model} --drafter mtp --drafter-path {head}")
    runner = build_runner(NodeConfig(model=str(model), drafter="mtp", drafter_path=str(head), kv_cache_tokens=256))
    request = SequenceRequest("drafts", tuple(range(5, 25)), SamplingParams(temperature=0.0, max_tokens=12))
    (answer,) = run(runner, [request])
    assert answer.accepted_per_round


def test_sdk(server: Server) -> None:
    said = example("sdk", "--server", server.grpc, "--max-tokens", 24).splitlines()
    assert said[0] == "smollm2-135m-instruct, drafter auto, 2 nodes"
    assert re.search(r"\[\d+ tokens in \d+ rounds, \d+ drafts accepted, .* prefill-0 -> decode-0\]", "\n".join(said))
    assert said[-1] == "streamed, the same text: True"


def test_structured_output(server: Server) -> None:
    parsed, *_, same, cut, chosen, pattern = example("structured_output", "--server", server.grpc).splitlines()
    assert re.fullmatch(r"parsed: (Paris|Rome|Madrid) in (France|Italy|Spain)", parsed)
    assert same == "streamed, the same object: True"
    assert cut.startswith("cut off after: '{")
    assert chosen in ("chosen: yes", "chosen: no")
    assert re.fullmatch(r"by a pattern: 19[0-9]{2}", pattern)


def test_tools(server: Server) -> None:
    called, told, *answer = example("tools", "--server", server.grpc).splitlines()
    assert called.startswith("called: weather({")
    assert told.startswith("told: It is sunny in ")
    assert "".join(answer)


def test_openai_client(server: Server) -> None:
    first, *rest = example("openai_client", "--url", f"http://{server.http}/v1").splitlines()
    text = first.removeprefix("smollm2-135m-instruct: ")
    assert text.startswith("The capital of France is Paris.")
    assert rest == [text, "[48 tokens, 41 of them predicted]", "refused: top_p of a request with top_p=2"]


def test_a_stream_survives_its_router(server: Server) -> None:
    whole = example("streaming_with_failover", "--server", server.grpc, "--max-tokens", 96)
    relay = Relay(server.grpc)
    command = [sys.executable, "-u", str(EXAMPLES / "streaming_with_failover.py"), "--max-tokens", "96"]
    addresses = ["--server", relay.address, "--server", server.grpc]
    with subprocess.Popen([*command, *addresses], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        begin = process.stdout.read(20)
        relay.cut()
        assert begin + process.stdout.read() == whole
        assert process.wait(60) == 0
    alone = subprocess.run([*command, "--server", relay.address], capture_output=True, text=True, timeout=60)
    assert alone.returncode == 1
    assert "the stream broke after 0 tokens" in alone.stderr


def test_batch(server: Server, tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    asked = [{"prompt": f"Say {word}."} for word in ("one", "two " * 9000, "three", "four", "five")]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in asked))
    example("batch", prompts, out, "--server", server.grpc, "--max-tokens", 8, "--concurrency", 2)
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["prompt"] for line in answers] == [line["prompt"] for line in asked]
    assert [set(line) - {"prompt"} for line in answers] == [
        {"error"} if i == 1 else {"answer", "tokens"} for i in range(5)
    ]
    assert "maximum context length is 8" in answers[1]["error"]


@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("*.py")))
def test_help(name: str) -> None:
    assert example(name, "--help").startswith("usage:")


def here(text: str, server: Server) -> str:
    """A command of the page, for this deployment and this Python."""
    return text.replace("127.0.0.1:50051", server.grpc).replace("127.0.0.1:8000", server.http)


def typed(block: str, server: Server) -> str:
    """A block of commands that ask a deployment, for this one; empty where it has none, or starts one."""
    block = block.replace(". .venv/bin/activate\n", "")
    if not re.search(r"^paceline (generate|trace) |^curl -s 127", block, re.MULTILINE) or "paceline serve" in block:
        return ""
    for command, option in (("generate", "--server"), ("trace", "--router")):
        block = block.replace(f"paceline {command}", f"paceline {command} {option} {server.grpc}")
    return here(block, server)


@pytest.mark.parametrize(
    ("page", "told"),
    [
        ("quickstart.md", ['"object":"chat.completion"', "paceline_completion_tokens_total", "events of 3 processes"]),
        ("guides/structured_output.md", ['"finish_reason":"stop"']),
        ("guides/operations.md", ['"status"', 'paceline_nodes{role="decode"} 1.0', "events of 3 processes"]),
    ],
)
def test_a_page_asks_as_it_says(page: str, told: list[str], server: Server, tmp_path: Path) -> None:
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    ran = ""
    for block in filter(None, (typed(block, server) for block in shell_blocks(ROOT / "docs" / page))):
        done = subprocess.run(
            ["bash", "-euc", block], cwd=tmp_path, env=environment, capture_output=True, text=True,
            timeout=100, check=False,
        )  # fmt: skip
        assert done.returncode == 0, block + done.stdout + done.stderr
        ran += done.stdout
    assert [text for text in told if text not in ran] == [], ran


PAGES = (
    "quickstart.md",
    *(f"guides/{name}.md" for name in ("structured_output", "tools", "other_apis", "drafters")),
)


@pytest.mark.parametrize("page", PAGES)
def test_python_of_a_page_runs(page: str, server: Server) -> None:
    blocks = PYTHON_BLOCK.findall((ROOT / "docs" / page).read_text(encoding="utf-8"))
    assert blocks
    for block in blocks:
        done = subprocess.run([sys.executable, "-c", here(block, server)], capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, block + done.stderr
        assert done.stdout.strip()
