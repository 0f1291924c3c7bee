"""The draft model's KV against a fresh prefill, and the rows it owes."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import pytest
import torch

from paceline.attention.base import Segment
from paceline.engine.model_runner import ModelRunner
from paceline.kvcache.layout import LayerOwner
from paceline.spec_decode.base import DraftBudget, DraftSampling, ExtendItem
from paceline.spec_decode.drafters import draft_model
from paceline.spec_decode.drafters.draft_model import Draft
from paceline.spec_decode.sequence import Sequence
from tests.support.draft_model_drafting import (
    BUDGETS,
    COUPLED,
    LAYERS,
    PROMPT,
    SAMPLED,
    check_rows_against_fresh_prefill,
    draft_kv,
    drafter_of,
    full_rounds,
    make,
    model_of,
    prefill,
)
from tests.support.pool_rows import write_rows

# ---- its KV


@pytest.mark.parametrize("shape", ["one", "chain", "comb", "static", "dynamic"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_draft_kv_after_rounds_equals_a_fresh_prefill(shape: str, temperature: float) -> None:
    accepted = check_rows_against_fresh_prefill(shape, temperature, 0.02)
    assert len(accepted) > 1


def test_keeping_rows_of_other_branches_is_noticed() -> None:
    """Mutant: the rows of a tree are kept as if they lay at their own positions' slots."""

    def segment(self: Draft, nodes: Seq[int]) -> Segment:
        found = honest(self, nodes)
        if len(self.in_place) == self.growth.pool.depth(nodes[0]):
            self.in_place.append(self.growth.pool.token_ids[nodes[0]])
        return found

    honest = Draft.segment
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Draft, "segment", segment)
        with pytest.raises(AssertionError):
            check_rows_against_fresh_prefill("dynamic", 0.0, 0.0)


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_chunked_prefill_equals_whole(steps: int) -> None:
    runner = make()
    for length in (1, 2, 3, 9):
        tokens = [(13 * i + 5) % 190 + 3 for i in range(length)]
        whole, chunked = prefill(runner, tokens), prefill(runner, tokens, steps=steps)
        assert whole.draft_rows == chunked.draft_rows == length
        assert whole.draft is None
        assert torch.equal(draft_kv(runner, whole, length), draft_kv(runner, chunked, length))


@pytest.mark.parametrize("shape", ["chain", "static", "dynamic"])
@pytest.mark.parametrize("sampling", [COUPLED, SAMPLED])
def test_a_batch_equals_its_members(shape: str, sampling: DraftSampling) -> None:
    runner = make(shape, sampling, noise=0.02)
    prompts, heat = [PROMPT, [7, 8, 9], [4] * 20, [11]], [0.0, 1.0, 0.7, 1.0]

    def fill() -> list[Sequence]:
        return [prefill(runner, p, temperature=t) for p, t in zip(prompts, heat, strict=True)]

    alone, together = fill(), fill()
    for _ in range(6):
        runner.decode(together)
        for seq in alone:
            runner.decode([seq])
    for seq, other in zip(alone, together, strict=True):
        assert seq.token_ids == other.token_ids
        assert seq.stats == other.stats
        assert seq.draft_rows == other.draft_rows
        assert torch.equal(draft_kv(runner, seq, seq.draft_rows), draft_kv(runner, other, seq.draft_rows))


def test_rows_from_the_prefix_cache_are_as_good() -> None:
    runner = make("chain", prefix_cache=True, page_size=4)
    for _ in range(2):
        assert full_rounds(runner, 0.0) == {3}
    assert runner.prefix is not None
    assert runner.prefix.hit_tokens > 0


# ---- rows that are owed


def test_a_sequence_without_draft_kv_catches_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Handed over without draft rows: a bounded number of them a round, the root alone until they are there."""
    monkeypatch.setattr(draft_model, "CATCH_UP_ROWS", 16)
    runner = make("chain")
    tokens = [(13 * i + 5) % 190 + 3 for i in range(40)]
    seq, ready = prefill(runner, tokens), prefill(runner, tokens)
    seq.draft_rows = 0
    for layer in runner.kv.layout.layer_range(LayerOwner.DRAFT):
        slots = seq.table.slots[:60].long()
        write_rows(runner.kv, layer, slots, *(torch.full_like(t, 3.0) for t in runner.kv.read(layer, slots)))
    rows = model_of(runner).rows
    accepted = []
    for _ in range(6):
        rows.clear()
        results = runner.decode([seq, ready])
        accepted.append([result.round.num_accepted for result in results])
        assert max(n for forward in rows for n in forward) <= 16
    assert accepted == [[0, 3], [0, 3], [3, 3], [3, 3], [3, 3], [3, 3]]
    fresh = prefill(runner, seq.token_ids[:-1])
    assert torch.equal(draft_kv(runner, seq, seq.draft_rows), draft_kv(runner, fresh, seq.draft_rows))


def test_rounds_without_drafts_owe_a_bounded_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """E5: K = 0 for a while (adaptive, or another drafter's rounds), then drafts as good as ever."""
    monkeypatch.setattr(draft_model, "MAX_OWED_ROWS", 4)
    runner = make("zero")
    seq = prefill(runner, PROMPT)
    owed = set()
    for _ in range(20):
        runner.decode([seq])
        owed.add(seq.num_computed - seq.draft_rows)
    assert owed == {0, 1, 2, 3, 4}
    drafter_of(runner).shape = BUDGETS["chain"]
    assert {runner.decode([seq])[0].round.num_accepted for _ in range(5)} == {3}


def extended(runner: ModelRunner, token: int | None, known_rows: int) -> int:
    """Draft rows after a drafted round of which another drafter's tree committed one token: ``token``, or d_1."""
    seq = prefill(runner, PROMPT)
    tree = drafter_of(runner).propose([seq], [DraftBudget(8, 4)])[0]
    seq.token_ids.append(tree.token_ids[1] if token is None else token)
    seq.num_computed += 1
    seq.draft_rows = known_rows
    hidden = torch.zeros(1, 64, dtype=runner.dtype)
    drafter_of(runner).extend([ExtendItem(seq, 8, 9, hidden, final=True)])
    return seq.draft_rows


def test_only_committed_rows_count() -> None:
    """Row 8 is the root's. Row 9 may be right already, but its token has no KV in the target: it is the next root."""
    runner = make("chain")
    assert extended(runner, 7, 8) == 9
    assert extended(runner, None, 8) == 9
    assert extended(runner, None, 5) == 5  # rows 5..7 were lost: what was written after them is no use


@pytest.mark.parametrize("shape", BUDGETS)
def test_rows_stay_within_the_announced_slots(shape: str) -> None:
    """Drafter.draft_slots is what the scheduler reserves."""
    runner = make(shape, noise=0.02)
    drafter, budget = drafter_of(runner), BUDGETS[shape]
    seq = prefill(runner, PROMPT)
    m, layer = 8, LAYERS
    past = seq.table.slots[m : m + 40].long()
    for owned in runner.kv.layout.layer_range(LayerOwner.DRAFT):
        write_rows(runner.kv, owned, past, *(torch.full_like(t, 3.0) for t in runner.kv.read(owned, past)))
    drafter.propose([seq], [DraftBudget(8, 4)])
    key, _ = runner.kv.read(layer, past)
    written = int((key != 3.0).flatten(1).any(1).nonzero().max()) + 1 if budget.num_draft_tokens else 0
    assert written <= drafter.draft_slots(budget) <= budget.max_nodes
    if budget.num_draft_tokens:
        assert written >= budget.num_draft_tokens - (shape == "static")  # that tree is shallower than its budget
