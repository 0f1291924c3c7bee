"""Draft state that was lost comes back between rounds, and is then that of a stream that never lost it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any, Unpack

import pytest
import torch

from paceline.attention.base import Segment
from paceline.engine.model_runner import ModelRunner, PrefillChunk
from paceline.kvcache.layout import LayerOwner
from paceline.spec_decode.sequence import Sequence
from tests.support.asked import Sampling
from tests.support.exactness import run
from tests.support.head_files import at_layer, mtp_config, mtp_module, put
from tests.support.tiny_model import tiny_request, tiny_runner
from tests.support.untrained_heads import write_tiny_head

CASES: dict[str, dict[str, Any]] = {
    "mtp": {"drafter": "mtp"},
    "mtp x3": {"drafter": "mtp", "mtp_modules": 3},
    "mtp x3 auto": {"drafter": "auto", "mtp_modules": 3},
    "eagle3": {"drafter": "eagle3"},
    "eagle3 patient": {"drafter": "eagle3", "adaptive": "goodput"},
    "draft model": {"drafter": "draft_model"},
}
PROMPT = [5, 9, 3, 44, 5, 9, 3, 61, 70, 71, 5, 9]


def make(case: str, folder: Path) -> ModelRunner:
    options = {"num_draft_tokens": 3, "prefix_cache": False} | CASES[case]
    if case == "mtp x3 auto":
        del options["mtp_modules"]
        options["drafter_path"] = str(write_modules(folder))
    if options["drafter"] in ("eagle3", "draft_model"):
        write_tiny_head(folder / "heads", options["drafter"])
        options["drafter_path"] = str(folder / "heads")
    return tiny_runner("bf16", **options)


def write_modules(folder: Path) -> Path:
    tensors = {name: t for k in range(3) for name, t in at_layer(2 + k, mtp_module(k)).items()}
    return put(folder / "modules", tensors, mtp_config(2, num_nextn_predict_layers=3))


def prefill(runner: ModelRunner, tokens: list[int], **params: Unpack[Sampling]) -> Sequence:
    seq = runner.new_sequence(tiny_request(tokens, max_tokens=40, **params))
    seq.table.ensure(seq.num_prefill + 40 + runner.spec_slots)
    runner.prefill([PrefillChunk(seq, 0, seq.num_prefill)])
    return seq


def lose(runner: ModelRunner, seq: Sequence) -> None:
    """As handed over without draft rows: what lies in their place is another's."""
    layers = runner.kv.layout.layer_range(LayerOwner.DRAFT)
    slots = seq.table.slots[: seq.num_prefill]
    runner.kv.scatter(layers, slots, torch.ones_like(runner.kv.gather(layers, slots)))
    seq.draft, seq.draft_rows = None, 0


def kv(runner: ModelRunner, seq: Sequence, owner: LayerOwner, rows: int) -> torch.Tensor:
    return runner.kv.gather(runner.kv.layout.layer_range(owner), seq.table.slots[:rows]).clone()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_it_is_the_state_of_a_fresh_prefill(case: str, temperature: float, tmp_path: Path) -> None:
    """Chunks of 3 rows and rounds take turns, so the text moves on meanwhile, also past the prompt."""
    runner = make(case, tmp_path)
    primary = runner.drafter.primary
    seq = prefill(runner, PROMPT, temperature=temperature)
    lose(runner, seq)
    at = 0
    while at < seq.num_computed:
        before = kv(runner, seq, LayerOwner.TARGET, seq.num_computed)
        at = runner.recover_draft(seq, at, 3)
        assert torch.equal(kv(runner, seq, LayerOwner.TARGET, seq.num_computed), before)
        if at < seq.num_computed:
            runner.decode([seq])
            assert case == "draft model" or seq.stats.rounds_by_drafter.get(primary.name, 0) == 0
    assert seq.num_computed > len(PROMPT)
    recovered = seq.stats.rounds
    fresh = prefill(runner, seq.token_ids[:-1], temperature=temperature)
    assert fresh.token_ids[-1] == seq.token_ids[-1]
    if primary.state_width:
        assert seq.draft is not None
        assert fresh.draft is not None
        assert torch.equal(seq.draft.hidden, fresh.draft.hidden)
        assert torch.equal(seq.draft.proposal_ids, fresh.draft.proposal_ids)
        exact = seq.num_computed - primary.lookahead + 1
        assert torch.equal(kv(runner, seq, LayerOwner.DRAFT, exact), kv(runner, fresh, LayerOwner.DRAFT, exact))
    if runner.policy.costs is None or not case.endswith(("auto", "patient")):
        runner.decode([seq])
        assert seq.stats.rounds_by_drafter[primary.name] >= seq.stats.rounds - recovered
    while seq.finish_reason is None:
        runner.decode([seq])
    plain = run(tiny_runner("bf16", drafter="none"), [tiny_request(PROMPT, max_tokens=40, temperature=temperature)])
    assert tuple(seq.output_token_ids) == plain[0].token_ids


def test_a_stream_near_its_end_has_little_room_and_writes_no_committed_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = tiny_runner("bf16", drafter="mtp", num_draft_tokens=2, prefix_cache=False, page_size=4)
    seq = runner.new_sequence(tiny_request([*range(3, 43)], max_tokens=2))
    seq.table.ensure(seq.num_prefill + 2 + runner.spec_slots)
    runner.prefill([PrefillChunk(seq, 0, seq.num_prefill)])
    lose(runner, seq)
    room = seq.table.capacity - seq.num_computed
    written: list[int] = []
    forward = runner.forward

    def watched(segments: Seq[Segment]) -> tuple[torch.Tensor, torch.Tensor]:
        written.extend(segments[0].write_slots)
        return forward(segments)

    monkeypatch.setattr(runner, "forward", watched)
    assert runner.recover_draft(seq, 0, 256) == room < seq.num_computed
    assert len(written) == room
    assert not {*written} & {*seq.table.slots[: seq.num_computed].tolist()}
    assert not seq.has_candidates
