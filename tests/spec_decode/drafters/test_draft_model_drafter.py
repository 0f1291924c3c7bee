"""The draft model: C1's off-by-one, trees against paths run alone, and the same text in every way."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager

import pytest
import torch

from paceline.engine.model_runner import ModelRunner
from paceline.spec_decode.base import DraftBudget, DraftSampling, TreeKind
from paceline.spec_decode.drafters.draft_model import DraftModelDrafter, Written
from paceline.spec_decode.sequence import Sequence
from paceline.spec_decode.trees.tree import DraftTree
from tests.support.asked import Sampling
from tests.support.draft_model_drafting import (
    BUDGETS,
    COUPLED,
    GREEDY,
    PROMPT,
    SAMPLED,
    check_rows_against_fresh_prefill,
    drafter_of,
    full_rounds,
    make,
    model_of,
    plain_logits,
    prefill,
)
from tests.support.exactness import Outcome, run
from tests.support.needs import needs_kernels
from tests.support.tiny_model import VOCAB, tiny_request, tiny_runner

# ---- a draft model that is the target


@pytest.mark.parametrize("shape", ["zero", "one", "chain", "long chain", "comb"])
@pytest.mark.parametrize(("temperature", "sampling"), [(0.0, GREEDY), (0.0, SAMPLED), (0.0, COUPLED), (1.0, COUPLED)])
def test_the_target_itself_is_always_right(shape: str, temperature: float, sampling: DraftSampling) -> None:
    """J4: accept is K every round, tau exactly K + 1."""
    assert full_rounds(make(shape, sampling), temperature) == {BUDGETS[shape].num_draft_tokens}


def test_a_trees_first_path_is_right_too() -> None:
    accepted = full_rounds(make("static"), 1.0)
    assert min(accepted) >= 2  # as deep as the first path of the tree goes


def test_greedy_drafts_of_a_sampled_request_are_not() -> None:
    assert min(full_rounds(make("chain", GREEDY), 1.0)) == 0


def test_after_a_full_accept_two_tokens_are_fed() -> None:
    """C1: d_K has no row yet. After a refusal the root alone is missing."""
    for noise in (0.0, 0.02):
        runner = make("chain", noise=noise)
        seq = prefill(runner, PROMPT, temperature=1.0)
        rows, accepted = model_of(runner).rows, 0
        assert rows == [[8]]
        seen = set()
        for i in range(24):
            rows.clear()
            now = runner.decode([seq])[0].round.num_accepted
            first = 1 if i == 0 or accepted < 3 else 2
            assert rows == [[first], [1], [1]]
            accepted = now
            seen.add(now)
        assert seen == {3} if noise == 0.0 else len(seen) > 2


@contextmanager
def kept_too_much() -> Iterator[None]:
    """Mutant of C1: K + 1 rows are kept after a full accept, as if d_K had been fed; one token is fed next."""
    make_rows = DraftModelDrafter.propose

    def propose(self: DraftModelDrafter, seqs: Seq[Sequence], budgets: Seq[DraftBudget]) -> list[DraftTree]:
        trees = make_rows(self, seqs, budgets)
        for seq, tree in zip(seqs, trees, strict=True):
            written = seq.memory.get("draft_model")
            if isinstance(written, Written):
                seq.memory["draft_model"] = Written(written.start, (*written.token_ids, tree.token_ids[-1]))
        return trees

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DraftModelDrafter, "propose", propose)
        yield


def test_feeding_one_token_after_a_full_accept_is_noticed() -> None:
    with kept_too_much():
        assert full_rounds(make("chain"), 0.0) != {3}
        with pytest.raises(AssertionError):
            check_rows_against_fresh_prefill("chain", 0.0, 0.0)


# ---- trees against their paths run alone


@needs_kernels
@pytest.mark.parametrize("shape", ["chain", "comb", "static", "dynamic"])
def test_children_are_what_the_path_alone_proposes(shape: str) -> None:
    """D1, J5: every node's row sees the committed text and its own ancestors, nothing of its siblings."""
    runner = make(shape, GREEDY, noise=0.02)
    seq = prefill(runner, PROMPT)
    widths = set()
    for _ in range(6):
        runner.decode([seq])
        tree = drafter_of(runner).propose([seq], [DraftBudget(8, 4)])[0]
        for node in set(tree.parents) - {-1}:
            path = [tree.token_ids[n] for n in tree.path(node)[1:]]
            children = [t for t, parent in zip(tree.token_ids, tree.parents, strict=True) if parent == node]
            logits = plain_logits(runner, [*seq.token_ids, *path])[-1]
            assert children == logits.topk(len(children)).indices.tolist()
            widths.add(len(children))
        seq.memory.clear()
    assert len(widths) > 1 or shape in ("chain", "comb")


@pytest.mark.parametrize("shape", ["chain", "comb", "static", "dynamic"])
def test_sampled_trees_carry_the_q_they_were_drawn_from(shape: str) -> None:
    """B6; a dynamic tree would prune what was drawn, so it is a comb here."""
    runner = make(shape, SAMPLED, noise=0.02)
    hot, cold = prefill(runner, PROMPT, temperature=0.7), prefill(runner, PROMPT, temperature=0.0)
    tree, greedy = drafter_of(runner).propose([hot, cold], [DraftBudget(8, 4)] * 2)
    assert greedy.draft_probs is None
    assert tree.draft_probs is not None
    assert set(tree.draft_probs) == set(tree.parents) - {-1}
    assert tree.drafter == "draft_model"
    for node, law in tree.draft_probs.items():
        path = [tree.token_ids[n] for n in tree.path(node)[1:]]
        expected = torch.softmax(plain_logits(runner, [*hot.token_ids, *path])[-1] / 0.7, -1)
        torch.testing.assert_close(law, expected, atol=1e-6, rtol=1e-5)
    if shape == "dynamic":
        spine = [0, 1, 4, 7]
        assert tree.parents == (-1, *(spine[level] for level in range(4) for _ in range(3)))


@pytest.mark.parametrize("sampling", DraftSampling)
def test_drafting_stops_below_the_confidence(sampling: DraftSampling) -> None:
    """The first unsure candidate is the last one. Sampled drafts ask the law, not what was drawn from it (B7)."""
    lengths = set()
    for least in (0.0, 0.3, 0.999):
        runner = make(DraftBudget(6, 1, TreeKind.CHAIN, 0, least), sampling, noise=0.02)
        for index in range(8):
            seq = prefill(runner, [*PROMPT, index + 20], temperature=1.0)
            tree = drafter_of(runner).propose([seq], [DraftBudget(8, 4)])[0]
            lengths.add((least, tree.num_draft_tokens))
            if sampling is not COUPLED:
                laws = torch.softmax(plain_logits(runner, [*seq.token_ids, *tree.token_ids[1:]]), -1)
                sure = laws[-tree.num_nodes : -1].amax(-1) >= least
                assert sure[:-1].all()
                assert tree.num_draft_tokens == 6 or not sure[-1]
            seq.table.release()
    assert {n for least, n in lengths if least == 0.0} == {6}
    assert len({n for least, n in lengths if least == 0.3}) > 1


# ---- the text


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
    dtype = "fp32" if shape == "comb" else "bf16"
    assert_same_text(outcomes(make(shape, sampling, dtype, noise=0.02)), plain[dtype])


@pytest.mark.parametrize("vocab_size", [VOCAB + 57, VOCAB - 60])
@pytest.mark.parametrize("sampling", DraftSampling)
def test_vocabularies_may_differ_by_padding(
    vocab_size: int, sampling: DraftSampling, plain: dict[str, list[Outcome]]
) -> None:
    """Ids past the target's are never proposed; a committed id past the draft's own does no harm."""
    runner = make("comb", sampling, draft={"vocab_size": vocab_size})
    assert_same_text(outcomes(runner), plain["bf16"])
    seq = prefill(runner, [*PROMPT, VOCAB - 1, VOCAB - 1], temperature=1.0)
    tree = drafter_of(runner).propose([seq], [DraftBudget(8, 4)])[0]
    assert tree.num_draft_tokens == 9
    assert max(tree.token_ids[1:]) < min(VOCAB, vocab_size)
    if tree.draft_probs is not None:
        assert {law.shape for law in tree.draft_probs.values()} == {(VOCAB,)}


def test_beyond_the_drafts_window_there_are_no_drafts(plain: dict[str, list[Outcome]]) -> None:
    """Its rope table ends there; the target goes on."""
    for window in (1, 12, 33):
        runner = make("chain", draft={"max_position_embeddings": window})
        assert_same_text(outcomes(runner), plain["bf16"])
        seq = prefill(runner, PROMPT, steps=3)
        assert seq.draft_rows == min(window, 8)
        for _ in range(30):
            reach = max(window - seq.num_computed, 0)  # the last drafted row stands at m + K - 1
            accepted = runner.decode([seq])[0].round.num_accepted
            assert accepted == drafter_of(runner).trees[0].num_draft_tokens == min(3, reach)
        assert seq.draft_rows <= window
        assert seq.num_computed > 33
