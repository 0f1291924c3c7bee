"""A runner that samples, walks and compacts on its device gives what the host's path gives, round by round.

On the CPU the device's operations are torch's; tests/gpu has the kernels'.
"""

from __future__ import annotations

import pytest
import torch

from paceline.engine.colocated import ColocatedEngine
from paceline.engine.device_round import check_token
from paceline.engine.host_round import HostJudge
from paceline.engine.model_runner import ModelRunner
from paceline.engine.rounds import accepted_rows
from paceline.request import SequenceRequest
from tests.support.asked import Asked
from tests.support.tiny_model import tiny_request, tiny_runner

torch.set_num_threads(1)

VARIANTS: dict[str, dict[str, object]] = {
    "chain": {"drafter": "ngram", "num_draft_tokens": 6},
    "static tree": {"drafter": "mtp", "num_draft_tokens": 4, "tree": "static", "tree_width": 3},
    "dynamic tree": {"drafter": "mtp", "num_draft_tokens": 4, "tree": "dynamic", "tree_width": 3, "page_size": 1},
    "argmax for the drafter": {"drafter": "lookahead", "num_draft_tokens": 9, "tree": "static", "tree_nodes": 55},
    "no drafts": {"drafter": "mtp", "num_draft_tokens": 0},
}


def requests() -> list[SequenceRequest]:
    extras: list[Asked] = [
        {},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.8, "presence_penalty": 0.5, "frequency_penalty": 0.3},
        {"temperature": 1.0, "top_k": 9, "repetition_penalty": 1.3},
        {"temperature": 1.2, "min_p": 0.02, "logit_bias": {5: 4.0, 9: -100.0}, "top_logprobs": 2},
        {"temperature": 1.0, "min_tokens": 10, "stop_token_ids": (5, 9, 11, 21, 33)},
    ]
    return [tiny_request(index=i, **extra) for i, extra in enumerate(extras)]


def answers(runner: ModelRunner) -> list[object]:
    done = ColocatedEngine(runner, chunk_tokens=7, max_running=4).generate(requests())
    assert runner.allocator.check_integrity() == []
    return [(d.token_ids, d.logprobs, d.finish_reason, d.stats.accepted_per_round) for d in done]


@pytest.mark.parametrize("name", VARIANTS)
def test_the_devices_rounds_are_the_hosts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on_host = answers(tiny_runner(**VARIANTS[name]))
    runner = tiny_runner(**VARIANTS[name])
    runner.samples_on_device = True
    for method in ("judge", "first_tokens"):
        monkeypatch.setattr(HostJudge, method, None)  # nothing goes the other way
    assert answers(runner) == on_host


def test_other_rules_stay_on_the_host() -> None:
    options: dict[str, object] = {"drafter": "mtp", "acceptance": "typical", "num_draft_tokens": 3}
    on_host = answers(tiny_runner(**options))
    runner = tiny_runner(**options)
    runner.samples_on_device = True
    assert answers(runner) == on_host


def test_accepted_rows() -> None:
    rows = torch.arange(10.0).view(5, 2)
    assert accepted_rows(rows, (1, 2)).data_ptr() == rows.data_ptr()
    for path in ((), (1,), (1, 2), (2,), (1, 4)):
        assert torch.equal(accepted_rows(rows, path), rows[[0, *path]])


def test_logits_that_are_not_finite_stop_the_round() -> None:
    check_token(0, 5)
    with pytest.raises(FloatingPointError, match="position 5"):
        check_token(-1, 5)
    runner = tiny_runner(drafter="ngram")
    runner.samples_on_device = True
    model = runner.model
    plain = model.logits
    model.logits = lambda hidden: plain(hidden) * float("nan")  # type: ignore[method-assign]
    with pytest.raises(FloatingPointError, match="not finite"):
        ColocatedEngine(runner, chunk_tokens=100, max_running=1).generate(requests()[:1])
