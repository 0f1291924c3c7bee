"""docs/coming_from_vllm.md names no flag, field, metric or drafter of ours that does not exist, and what it says is
refused is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cluster.commands.cli import app
from cluster.commands.options import load_config, serve_options
from cluster.commands.other_flags import ABSENT, OURS
from cluster.frontdoor.openai_parse import parse_chat, parse_completion
from cluster.frontdoor.openai_requests import ChatRequest, CompletionRequest, Speculation
from paceline.errors import ConfigError, InvalidRequest
from paceline.models.families import FAMILIES
from paceline.speculation import drafter_choices
from tests.clients.peers.reasons import REASONS
from tests.support.reference.metrics import metrics_page
from tests.support.shell_blocks import ROOT

PAGE = (ROOT / "docs/coming_from_vllm.md").read_text(encoding="utf-8")
CODE = re.compile(r"`([^`]+)`")
FLAG = re.compile(r"--[a-z][a-z0-9-]*")
MOST = 200  # characters of a cell

FLAGS = {flag for option in serve_options() for flag in option.flag.split("/")} | {"--config"}
FIELDS = {*CompletionRequest.model_fields, *ChatRequest.model_fields, *Speculation.model_fields}
METRICS = set(re.findall(r"\| `(paceline_\w+)` \|", metrics_page()))
THEIRS = {"--enable-deterministic-inference"}  # what the text outside of tables names of theirs


def rows(anchor: str) -> Iterator[dict[str, str]]:
    """The rows of the first table below an anchor, by the heads of its columns."""
    lines = iter(PAGE.partition(f'<a id="{anchor}"></a>')[2].splitlines())
    head: list[str] = []
    for line in lines:
        if line.startswith("|"):
            cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
            if not head:
                head = cells
                next(lines)
            else:
                yield dict(zip(head, cells, strict=True))
        elif head:
            return


def ours(cell: str) -> set[str]:
    return {name for code in CODE.findall(cell) for name in FLAG.findall(code)}


def test_flags() -> None:
    named = set().union(*(ours(row["Paceline"] + row.get("note", "")) for row in [*rows("flags"), *rows("start")]))
    assert len(named) > 25
    assert named - FLAGS == set()
    text = "\n".join(line for line in PAGE.splitlines() if not line.startswith(("|", "```")))
    assert ours(text) - FLAGS - THEIRS == set()


def test_serve_says_what_their_flags_are_here() -> None:
    """The command line and the table agree, both ways."""
    listed: dict[str, set[str]] = {}
    for row in rows("flags"):
        for flag in ours(row["vLLM"]) | ours(row["SGLang"]):
            listed.setdefault(flag, set()).update(ours(row["Paceline"]))
    theirs = {flag: flags for flag, flags in listed.items() if flag not in FLAGS}
    long = {flag for flag in (*OURS, *ABSENT) if flag.startswith("--")}
    assert long == theirs.keys()
    assert [flag for flag in long & OURS.keys() if not set(FLAG.findall(OURS[flag])) & theirs[flag]] == []
    assert [flag for flag in long & ABSENT.keys() if theirs[flag]] == []


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--port=8000"], "No such option: --port. It is --http HOST:PORT here"),
        (["-tp", "2"], "No such option: -tp. It is --tp here"),
        (["--enable-lora"], "there is no LoRA"),
        (["Qwen/Qwen3-0.6B", "--tp", "2"], "The model is given as --model Qwen/Qwen3-0.6B"),
    ],
)
def test_a_command_of_theirs_is_refused_with_what_it_is_here(words: list[str], told: str) -> None:
    done = CliRunner().invoke(app, ["serve", *words], env={"COLUMNS": "200"})
    assert done.exit_code == 2
    assert told in done.output


def test_an_option_of_theirs_in_a_file_is_refused_with_what_it_is_here(tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("tensor_parallel_size: 2\n")
    with pytest.raises(ConfigError, match="It is --tp here"):
        load_config({}, file, environment={})


def test_fields() -> None:
    named = {name for row in rows("fields") for name in CODE.findall(row["Paceline"])}
    assert len(named) > 20
    assert named - FIELDS == set()
    of_speculation = next(row["note"] for row in rows("fields") if row["Paceline"] == "`speculation`")
    assert set(CODE.findall(of_speculation)) == set(Speculation.model_fields)


REFUSED: dict[str, Any] = {
    "functions": [{}],
    "function_call": {"name": "f"},
    "audio": {},
    "modalities": ["audio"],
    "verbosity": "low",
    "use_beam_search": True,
    "length_penalty": 1.5,
    "add_special_tokens": True,
    "allowed_token_ids": [1],
    "structural_tag": "{}",
    "guided_whitespace_pattern": " ",
    "logprob_token_ids": [1],
    "include_reasoning": False,
    "thinking_token_budget": 5,
    "repetition_detection": {"max_pattern_size": 2},
    "stop_regex": "x",
    "documents": [{}],
    "return_hidden_states": True,
    "return_token_offsets": True,
    "kv_transfer_params": {"prompt_token_ids": [1]},
    "lora_path": "x",
    "prompt_embeds": "x",
    "chat_template": "x",
}
REFUSED_OF_COMPLETIONS: dict[str, Any] = {"suffix": "x", "best_of": 2}


def test_every_refused_field_is_tried() -> None:
    named = {name for row in rows("refused-fields") for name in CODE.findall(row["field"])}
    assert named == REFUSED.keys() | REFUSED_OF_COMPLETIONS.keys()


@pytest.mark.parametrize("field", [*REFUSED, *REFUSED_OF_COMPLETIONS])
def test_what_is_said_to_be_refused_is_refused(field: str) -> None:
    chat = field in REFUSED
    body = {"messages": [{"role": "user", "content": "x"}]} if chat else {"prompt": "x"}
    parse = parse_chat if chat else parse_completion
    parse(body, "id")
    with pytest.raises(InvalidRequest, match=field):
        parse({**body, field: (REFUSED | REFUSED_OF_COMPLETIONS)[field]}, "id")


def test_metrics() -> None:
    named = set(re.findall(r"paceline_\w+", PAGE))
    assert len(named) > 20
    assert named - METRICS == set()


def test_drafters() -> None:
    named = {CODE.findall(row["Paceline `--drafter`"])[0] for row in rows("drafters")}
    assert len(named) > 7
    assert named - set(drafter_choices()) == set()


def test_families() -> None:
    """A new family is a line of the page."""
    assert len({family.name for family in FAMILIES.values()}) == 11


def test_cells_fit_a_page() -> None:
    assert [
        cell for line in PAGE.splitlines() if line.startswith("|") for cell in line.split("|") if len(cell) > MOST
    ] == []


def test_counts_of_their_tests() -> None:
    """The table has the numbers and the reasons of the kept run. Mutant: a count of another run."""
    kept = json.loads((ROOT / "benchmarks/results/peer_suites.json").read_text(encoding="utf-8"))
    shown = {row["what came of it"]: (int(row["vLLM"]), int(row["SGLang"])) for row in rows("their-tests")}
    counts = [{"passed": kept[peer]["passed"], **kept[peer]["others"]} for peer in ("vllm", "sglang")]
    words = {"passed": "passed", **{reason.value: text for reason, text in REASONS.items()}}
    named = sorted(set().union(*counts))
    assert shown == {words[name]: tuple(count.get(name, 0) for count in counts) for name in named}
