"""Rows of the feature drafter's trees: each sees the text and its own path alone (algorithms.md D, E, J5)."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

import pytest
import torch

from paceline.attention.base import Segment
from paceline.engine.model_runner import ModelRunner
from paceline.spec_decode.base import DraftBudget, DraftSampling, TreeKind
from paceline.spec_decode.drafters.feature import Draft
from paceline.spec_decode.sequence import Sequence
from paceline.spec_decode.trees.static_trees import EAGLE_TREE
from tests.support.feature_drafting import (
    BUDGETS,
    COUPLED,
    GREEDY,
    Recorder,
    committed_alone,
    drafter_of,
    head_rows,
    make,
    ragged,
    state_is_exact,
)
from tests.support.needs import needs_kernels


def node_rows(recorder: Recorder, seq: Sequence) -> dict[tuple[int, ...], torch.Tensor]:
    """Outputs of the draft rows of ``seq`` by their path of tokens, from what the head was asked during a propose."""
    m, slots = len(seq.token_ids) - 1, seq.table.slots.tolist()
    token_at: dict[int, int] = {}
    rows: dict[tuple[int, ...], torch.Tensor] = {}
    for batch, outputs in recorder.calls:
        for segment, span in zip(batch.segments, batch.row_ranges(), strict=True):
            if segment.slots.data_ptr() != seq.table.slots.data_ptr():
                continue
            token_at |= dict(zip(segment.write_slots, segment.token_ids, strict=True))
            for i, row in enumerate(span):
                seen = segment.tails[i] if segment.tails else slots[m : segment.positions[i] + 1]
                assert list(segment.prefix_lens)[i] == (m if segment.tails else segment.positions[i] + 1)
                rows[tuple(token_at[slot] for slot in seen)] = outputs[row]
    return rows


def nodes_are_exact(runner: ModelRunner, seqs: Seq[Sequence], budgets: Seq[DraftBudget]) -> bool:
    """Whether every expanded node's output equals, in bits, its path drafted alone; checks slots on the way."""
    drafter = drafter_of(runner)
    head = drafter.head
    drafter.head = recorder = Recorder(head)
    trees = drafter.propose(seqs, budgets)
    drafter.head = head
    exact = True
    for seq, budget, tree in zip(seqs, budgets, trees, strict=True):
        rows, m = node_rows(recorder, seq), seq.num_computed
        writable = set(seq.table.slots[m : m + drafter.draft_slots(budget)].tolist())
        written = [slot for batch, _ in recorder.calls for slot in batch.write_slots.tolist()]
        assert len(written) == len(set(written))
        own = set(seq.table.slots.tolist()) & set(written)
        assert own <= writable
        assert len(own) == len(rows)
        assert tree.num_nodes <= budget.max_nodes
        assert max(tree.depths) <= budget.num_draft_tokens
        for path, output in rows.items():
            with committed_alone(runner, seq.token_ids) as (table, outputs):
                hidden = outputs[-1:]
                for s, token in enumerate(path):
                    hidden = head_rows(runner, Segment.linear([token], m + s, table.slots), hidden)
            exact = exact and torch.equal(hidden[0], output)
    return exact


MIXED = [BUDGETS["dynamic"], BUDGETS["static"], BUDGETS["chain"], DraftBudget(2, 4, TreeKind.DYNAMIC, tree_nodes=5)]


@needs_kernels
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("expand_above", [None, 0.02])
def test_every_node_sees_the_text_and_its_own_path_alone(dtype: str, expand_above: float | None) -> None:
    """The draft-side mask and positions, four shapes in one batch of ragged sequences."""
    runner = make(dtype, expand_above=expand_above)
    drafter_of(runner).choices = EAGLE_TREE
    seqs = ragged(runner)
    assert nodes_are_exact(runner, seqs, MIXED)
    assert nodes_are_exact(runner, seqs, MIXED[::-1])
    shapes = {tree.is_chain for tree in drafter_of(runner).trees}
    assert shapes == {True, False}


def test_a_single_node_whose_path_is_not_all_there_is() -> None:
    """The last level expands one node, but rows of another path lie between its ancestors'."""
    runner = make()
    drafter_of(runner).choices = ((0,), (1,), (0, 0), (1, 0), (1, 0, 0))
    assert nodes_are_exact(runner, ragged(runner), [DraftBudget(3, 2)] * 4)
    assert drafter_of(runner).trees[0].parents == (-1, 0, 0, 1, 2, 4)


def test_draft_slots_are_what_may_be_expanded() -> None:
    drafter = drafter_of(make())
    slots = {name: drafter.draft_slots(budget) for name, budget in BUDGETS.items()}
    assert slots == {"chain": 3, "comb": 2, "static": 3, "dynamic": 9}  # static without choices: a comb of depth 4
    assert drafter.draft_slots(DraftBudget(4, 3, TreeKind.DYNAMIC, tree_nodes=2)) == 6
    drafter.expand_above = 0.1
    assert drafter.draft_slots(BUDGETS["dynamic"]) == 12


@pytest.mark.parametrize("sampling", [COUPLED, GREEDY])
def test_a_batch_of_ragged_sequences_equals_each_alone(sampling: DraftSampling) -> None:
    runner = make(sampling=sampling)
    seqs = ragged(runner)
    together = drafter_of(runner).propose(seqs, MIXED)
    for seq, budget, tree in zip(seqs, MIXED, together, strict=True):
        assert drafter_of(runner).propose([seq], [budget]) == [tree]
        assert tree.drafter == "mtp"
        assert state_is_exact(runner, seq)


def test_wrong_positions_of_draft_rows_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node's row one position late; siblings that see each other."""
    runner = make()
    seqs = ragged(runner)
    assert nodes_are_exact(runner, seqs, MIXED)
    segment = Draft.segment

    def late(draft: Draft, nodes: Seq[int]) -> Segment:
        right = segment(draft, nodes)
        return replace(right, positions=[p + 1 for p in right.positions])

    def sociable(draft: Draft, nodes: Seq[int]) -> Segment:
        right = segment(draft, nodes)
        return replace(right, tails=[[*right.write_slots[:i], *tail] for i, tail in enumerate(right.tails)])

    for wrong in (late, sociable):
        monkeypatch.setattr(Draft, "segment", wrong)
        try:
            noticed = not nodes_are_exact(runner, seqs, MIXED)
        except AssertionError:
            noticed = True
        assert noticed
