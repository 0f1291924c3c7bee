"""Programs that measure servers: guidellm and aiperf without an error, lm-eval with both kinds of tasks."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.other_clients import KEY, run_program

TOKENIZER = Path.home() / ".cache/paceline/models/smollm2-135m-instruct"
SCHEMATHESIS_S = "60"
QUESTIONS = [
    {"question": "The capital of France is", "choices": [" Paris", " Rome"], "gold": 0},
    {"question": "1, 2, 3,", "choices": [" 9", " 4"], "gold": 1},
]
KINDS: dict[str, dict[str, Any]] = {
    "multiple_choice": {
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{gold}}",
        "metric_list": [{"metric": "acc"}],
    },
    "generate_until": {
        "doc_to_target": "{{choices[gold]}}",
        "generation_kwargs": {"max_gen_toks": 8, "do_sample": False, "until": ["\n"]},
        "metric_list": [{"metric": "exact_match"}],
    },
}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs run with their own modules, and fetch nothing."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("PYTHONPATH", raising=False)


@pytest.mark.program("guidellm")
def test_guidellm(url: str, tmp_path: Path) -> None:
    run_program(
        "guidellm", "run", "--backend", f"kind=openai_http,target={url},api_key={KEY}",
        "--profile", "kind=concurrent,streams=2",
        "--constraint", "kind=max_requests,count=6", "--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}",
        "--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=16", "--output", "kind=json,path=out.json",
        "--disable-console", folder=tmp_path,
    )  # fmt: skip
    (done,) = json.loads((tmp_path / "out.json").read_text())["benchmarks"]
    assert done["metrics"]["request_totals"] == {"successful": 6, "errored": 0, "incomplete": 0, "total": 6}


@pytest.mark.program("aiperf")
def test_aiperf(url: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a network it reads tokenizers from the hub's cache alone."""
    cached = tmp_path / "hub/models--local--tokenizer"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs/main").write_text("one")
    (cached / "snapshots").mkdir()
    (cached / "snapshots/one").symlink_to(TOKENIZER)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    run_program(
        "aiperf", "profile", "--model", model, "--url", url, "--endpoint-type", "chat", "--streaming", "--api-key", KEY,
        "--request-count", "6", "--concurrency", "2", "--tokenizer", "local/tokenizer",
        "--synthetic-input-tokens-mean", "32", "--output-tokens-mean", "16", "--ui", "none", folder=tmp_path,
    )  # fmt: skip
    (found,) = tmp_path.rglob("profile_export_aiperf.json")
    done = json.loads(found.read_text())
    assert done["request_count"]["avg"] == 6
    assert not done.get("error_summary")


@pytest.mark.program("schemathesis")
def test_schemathesis(url: str, tmp_path: Path) -> None:
    """It ends by its time. Its phase ``coverage`` would take minutes by itself, for bodies at each bound of each of a
    hundred fields, some above all that a server reads. A body that the document allows may be wrong by what no schema
    says, such as a token id. Two operations are left out: without a bound of their own, answers fill the context."""
    authority = os.environ.get("SSL_CERT_FILE") if url.startswith("https") else None
    run_program(
        "schemathesis", "run", f"{url}/openapi.json", "--header", f"Authorization:Bearer {KEY}", "--workers", "2",
        "--phases", "fuzzing", "--max-time", SCHEMATHESIS_S, "--exclude-checks", "positive_data_acceptance",
        "--exclude-path", "/v1/responses", "--exclude-path", "/v1/messages", "--request-timeout", "60",
        *(("--tls-verify", authority) if authority else ()), folder=tmp_path,
    )  # fmt: skip


@pytest.mark.program("lm_eval")
@pytest.mark.parametrize("kind", KINDS)
def test_lm_eval(url: str, model: str, tmp_path: Path, kind: str) -> None:
    (tmp_path / "questions.json").write_text(json.dumps(QUESTIONS))
    task = {
        "task": "questions", "dataset_path": "json", "test_split": "test", "output_type": kind,
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "questions.json")}},
        "doc_to_text": "{{question}}", "target_delimiter": "", **KINDS[kind],
    }  # fmt: skip
    (tmp_path / "task.yaml").write_text(json.dumps(task))  # JSON is YAML
    where = f"model={model},base_url={url}/v1/completions,tokenizer={TOKENIZER},num_concurrent=2,max_retries=1"
    run_program(
        "lm_eval", "run", "--model", "local-completions", "--model_args", where, "--include_path", tmp_path,
        "--tasks", "questions", "--output_path", tmp_path / "out", folder=tmp_path,
    )  # fmt: skip
    (found,) = (tmp_path / "out").rglob("results_*.json")
    scores = json.loads(found.read_text())["results"]["questions"]
    assert scores.get("acc,none", scores.get("exact_match,none")) is not None
    if kind == "multiple_choice":
        assert scores["acc,none"] == 1.0
