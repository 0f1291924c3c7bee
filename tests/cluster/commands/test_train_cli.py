"""``paceline make-corpus`` as a command: light to import, clear when wrong, a corpus to train on when done."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from cluster.commands.cli import app
from draft_training.corpus import load_corpus
from paceline.errors import ConfigError
from tests.support.tiny_deepseek import FOLDER_VOCAB, write_folder


def make_corpus(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["make-corpus", *(str(a) for a in arguments)])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": text}) for text in ("Name a colour.", "Why?", "And now?")))
    return path


def test_nothing_heavy_is_imported_before_a_command_runs() -> None:
    code = "import sys, cluster.commands.train; "
    code += "print([m for m in ('torch', 'numpy', 'draft_training') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_a_corpus_from_files_and_from_the_model_itself(model: Path, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "corpus" / "out.jsonl"
    options = ["--model", model, "--prompts", prompts, "--self-made", 4, "--out", out, "--threads", 1]
    options += ["--batch", 3, "--max-answer-tokens", 12, "--seed", 3]
    result = make_corpus(*options)
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["source"] for line in lines] == 3 * ["prompts.jsonl"] + 4 * ["self-made"]
    answers = [line["answer_ids"] for line in lines if line["answer_ids"]]
    said = f"{len(answers)} answers, {sum(map(len, answers))} tokens, {7 - len(answers)} prompts left out"
    assert result.output.splitlines()[-1] == f"{out}: {said}"
    assert len(load_corpus(out, FOLDER_VOCAB, held_out=1).train) >= 2
    again = make_corpus(*options)
    assert again.output.splitlines()[-1] == result.output.splitlines()[-1]


@pytest.mark.parametrize(
    ("options", "key"),
    [
        (["--prompts", "absent.jsonl"], "prompts"),
        ([], "prompts"),
        (["--self-made", "1", "--model", "no-such-model"], "model"),
        (["--self-made", "1", "--device", "toaster"], "device"),
        (["--self-made", "1", "--max-answer-tokens", "100000"], "max_answer_tokens"),
        (["--self-made", "1", "--out", "."], "out"),
        (["--self-made", "1", "--out", "corpus.jsonl.xz"], "out"),
    ],
)
def test_what_is_wrong_is_said_by_name(options: list[str], key: str, model: Path, tmp_path: Path) -> None:
    result = make_corpus("--model", model, "--out", tmp_path / "out.jsonl", "--threads", 1, "--batch", 2, *options)
    assert isinstance(result.exception, ConfigError), result.output
    assert result.exception.key == key


def test_a_bad_prompt_is_named_by_file_and_line(model: Path, prompts: Path, tmp_path: Path) -> None:
    prompts.write_text(prompts.read_text() + '\n{"prompt": 7}\n')
    result = make_corpus("--model", model, "--out", tmp_path / "out.jsonl", "--prompts", prompts)
    assert isinstance(result.exception, ConfigError)
    assert f"{prompts}:4" in str(result.exception)
