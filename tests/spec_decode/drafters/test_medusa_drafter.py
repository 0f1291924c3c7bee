"""Medusa in the engine: its state against a fresh prefill, batches, hand-off, and the same text in every way."""

from __future__ import annotations

import pytest
import torch

from paceline.engine.model_runner import ModelRunner
from paceline.spec_decode.base import DraftBudget, DraftSampling, ExtendItem
from paceline.spec_decode.sequence import DraftState, Sequence
from tests.support.asked import Sampling
from tests.support.exactness import Outcome, run
from tests.support.medusa_drafting import (
    BUDGETS,
    COUPLED,
    HIDDEN,
    PROMPT,
    SAMPLED,
    drafter_of,
    make,
    prefill,
    tensors,
)
from tests.support.needs import needs_kernels
from tests.support.tiny_model import VOCAB, tiny_request, tiny_runner

# ---- state


def same(a: DraftState | None, b: DraftState | None) -> bool:
    assert a is not None
    assert b is not None
    pairs = ((a.proposal_ids, b.proposal_ids), (a.proposal_probs, b.proposal_probs), (a.hidden, b.hidden))
    return all(torch.equal(x, y) for x, y in pairs)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("sampling", [COUPLED, SAMPLED])
def test_state_after_rounds_equals_a_fresh_prefill(sampling: DraftSampling, temperature: float) -> None:
    runner = make("chain", sampling)
    seq = prefill(runner, PROMPT, steps=3, temperature=temperature)
    for _ in range(6):
        runner.decode([seq])
        fresh = prefill(runner, seq.token_ids[:-1], temperature=temperature)
        fresh.token_ids[-1] = seq.token_ids[-1]
        assert same(seq.draft, fresh.draft)
        assert seq.draft_rows == seq.num_computed == len(seq.token_ids) - 1
        fresh.table.release()


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_chunked_prefill_equals_whole(steps: int) -> None:
    runner = make()
    for length in (1, 2, 3, 9):
        tokens = [(13 * i + 5) % 190 + 3 for i in range(length)]
        assert same(prefill(runner, tokens).draft, prefill(runner, tokens, steps=steps).draft)


def test_chunks_before_the_last_leave_no_state() -> None:
    runner = make()
    seq = runner.new_sequence(tiny_request(PROMPT))
    drafter_of(runner).extend([ExtendItem(seq, 0, 4, torch.zeros(4, HIDDEN, dtype=runner.dtype), final=False)])
    assert seq.draft is None
    assert seq.draft_rows == 4


@pytest.mark.parametrize("sampling", DraftSampling)
def test_a_batch_equals_its_members(sampling: DraftSampling) -> None:
    runner = make("chain", sampling)
    prompts = [PROMPT, [7, 8, 9], [4] * 20, [11]]
    heat = [0.0, 1.0, 0.7, 1.0]

    def fill() -> list[Sequence]:
        return [prefill(runner, p, temperature=t) for p, t in zip(prompts, heat, strict=True)]

    alone, together = fill(), fill()
    for _ in range(4):
        runner.decode(together)
        for seq, other in zip(alone, together, strict=True):
            runner.decode([seq])
            assert same(seq.draft, other.draft)
            assert seq.token_ids == other.token_ids
    assert [seq.stats for seq in alone] == [seq.stats for seq in together]


@pytest.mark.parametrize("sampling", DraftSampling)
@pytest.mark.parametrize("shape", ["chain", "static", "dynamic"])
def test_state_alone_gives_the_same_proposals_elsewhere(shape: str, sampling: DraftSampling) -> None:
    """H1: another node that received nothing but the DraftState drafts the same, with the same q."""
    here, there = make(shape, sampling), make(shape, sampling)
    seq = prefill(here, PROMPT, temperature=1.0)
    assert seq.draft is not None
    moved = there.new_sequence(seq.request)
    moved.token_ids.append(seq.token_ids[-1])
    sent = seq.draft
    moved.draft = DraftState(sent.proposal_ids.clone(), sent.proposal_probs.clone(), sent.hidden.clone())
    trees = [drafter_of(r).propose([s], [BUDGETS[shape]])[0] for r, s in ((here, seq), (there, moved))]
    assert trees[0] == trees[1]
    assert trees[0].num_nodes > 1
    if sampling is SAMPLED:
        laws = [tree.draft_probs for tree in trees]
        assert laws[0] is not None
        assert laws[1] is not None
        assert list(laws[0]) == list(laws[1]) == list(range(trees[0].num_draft_tokens))
        assert all(torch.equal(laws[0][node], laws[1][node]) for node in laws[0])


def test_sampled_chains_carry_the_q_they_were_drawn_from() -> None:
    runner = make("static", SAMPLED)
    hot, cold = prefill(runner, PROMPT, temperature=0.6), prefill(runner, PROMPT, temperature=0.0)
    tree, greedy = drafter_of(runner).propose([hot, cold], [DraftBudget(3, 4)] * 2)
    assert tree.is_chain
    assert tree.drafter == "medusa"
    assert hot.draft is not None
    logits = drafter_of(runner).heads.logits(hot.draft.hidden)[:, 0]
    assert tree.draft_probs is not None
    for node in range(3):
        torch.testing.assert_close(tree.draft_probs[node], torch.softmax(logits[node] / 0.6, -1), atol=1e-6, rtol=1e-5)
        drawn = float(tree.draft_probs[node][tree.token_ids[node + 1]])
        assert drawn == pytest.approx(float(hot.draft.proposal_probs[node, 0]), rel=1e-5)
    assert greedy.draft_probs is None


# ---- in the engine


@pytest.fixture(scope="module")
def plain() -> dict[str, list[Outcome]]:
    return {dtype: outcomes(tiny_runner(dtype, drafter="none", prefix_cache=False)) for dtype in ("bf16", "fp32")}


def outcomes(runner: ModelRunner) -> list[Outcome]:
    extras: list[Sampling] = [
        {},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.8, "presence_penalty": 0.5},
        {"temperature": 1.0, "min_tokens": 5, "stop_token_ids": (5, 9, 11, 21, 33)},
    ]
    return run(runner, [tiny_request(index=i, **extra) for i, extra in enumerate(extras)], batch=3)


def assert_same_text(got: list[Outcome], expected: list[Outcome]) -> None:
    assert [(o.token_ids, o.logit_bits) for o in got] == [(o.token_ids, o.logit_bits) for o in expected]


@needs_kernels
@pytest.mark.parametrize("sampling", DraftSampling)
@pytest.mark.parametrize("shape", BUDGETS)
def test_the_text_never_depends_on_it(shape: str, sampling: DraftSampling, plain: dict[str, list[Outcome]]) -> None:
    dtype = "fp32" if shape == "dynamic" else "bf16"
    assert_same_text(outcomes(make(shape, sampling, dtype)), plain[dtype])


def test_rounds_accept_and_refuse() -> None:
    """The comparison above means something only if both kinds of rounds occur."""
    lengths = {n for o in outcomes(make("static", heads=tensors(4, vocab=None))) for n in o.accepted_per_round}
    assert 0 in lengths
    assert max(lengths) >= 1


@pytest.mark.parametrize("sampling", DraftSampling)
def test_a_reduced_vocabulary_is_mapped(sampling: DraftSampling, plain: dict[str, list[Outcome]]) -> None:
    """C6: a column is not a token id; tokens outside the map are never drafted, and have no q."""
    ids = torch.arange(3, 150, 3)
    heads = tensors(4, vocab=len(ids)) | {"token_map": ids}
    runner = make("static", sampling, heads=heads)
    assert_same_text(outcomes(runner), plain["bf16"])
    seq = prefill(runner, PROMPT, temperature=1.0)
    tree = drafter_of(runner).propose([seq], [DraftBudget(4, 4)])[0]
    assert set(tree.token_ids[1:]) <= set(ids.tolist())
    if sampling is SAMPLED:
        assert tree.draft_probs is not None
        outside = torch.ones(VOCAB).index_fill_(0, ids, 0.0).bool()
        for law in tree.draft_probs.values():
            assert float(law[outside].sum()) == 0.0
            assert float(law.sum()) == pytest.approx(1.0, abs=1e-5)


def test_a_padded_vocabulary_is_cut(plain: dict[str, list[Outcome]]) -> None:
    heads = tensors(4, vocab=VOCAB + 57)
    for head in range(4):
        heads[f"{head}.1.weight"][VOCAB:] = 40.0  # the padding would win every time
    runner = make("static", heads=heads)
    assert_same_text(outcomes(runner), plain["bf16"])
    assert all(max(tree.token_ids) < VOCAB for tree in drafter_of(runner).trees)
