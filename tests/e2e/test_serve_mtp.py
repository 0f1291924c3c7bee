"""A deployment with chained MTP modules in fp32, options from a YAML file and the environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.client import Client
from tests.support.prompts import QUESTIONS
from tests.support.server import serve

pytestmark = [pytest.mark.e2e, pytest.mark.real_model, pytest.mark.timeout(300)]

MESSAGES = [{"role": "user", "content": QUESTIONS[0]}]
ANSWER = "The capital of France is Paris. It's a city steeped in history and culture"


def test_options_from_file_and_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, smollm2_folder: Path
) -> None:
    file = tmp_path / "paceline.yaml"
    file.write_text("drafter: mtp\nmtp_modules: 3\nnum_draft_tokens: 8\ndtype: bf16\n")
    monkeypatch.setenv("PACELINE_DTYPE", "fp32")  # the environment wins over the file
    with serve("--config", str(file), "--num-draft-tokens", "3") as server, Client(server.grpc) as client:
        info = client.model_info()
        assert (info.dtype, info.drafter, info.num_draft_tokens) == ("fp32", "mtp", 3)
        done = client.chat(MESSAGES, max_tokens=16, temperature=0.0).choices[0]
        assert ANSWER.startswith(done.text.strip()[:40])
        completion = done.completion
        # H4: one row of KV in 30 target layers and 3 draft layers a token; a window row for modules 2 and 3.
        row = 2 * 3 * 64 * 4
        assert completion.handoff.target_kv == completion.usage.prompt_tokens * 30 * row
        assert completion.handoff.draft_kv == completion.usage.prompt_tokens * 3 * row
        assert completion.handoff.hidden == 2 * 576 * 4
        assert completion.speculation.draft_tokens > 0
        assert len(completion.speculation.accepted_per_round) == completion.speculation.rounds
