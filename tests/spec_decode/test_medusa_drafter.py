"""Medusa: heads against plain torch, the off-by-one of C3, products, hand-off, and the same text in every way."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from paceline.engine.colocated import ColocatedEngine
from paceline.engine.model_runner import ModelRunner, PrefillChunk
from paceline.errors import ConfigError
from paceline.layers.linear import Linear
from paceline.models.llama import LlamaModel
from paceline.spec_decode.base import DraftBudget, DraftSampling, ExtendItem, TreeKind
from paceline.spec_decode.candidates import Candidates, choose
from paceline.spec_decode.choices import RankPath
from paceline.spec_decode.drafters import medusa
from paceline.spec_decode.drafters.medusa import MedusaDrafter, MedusaHeads
from paceline.spec_decode.sequence import DraftState, Sequence
from paceline.spec_decode.tree import DraftTree
from support.exactness import Outcome, run
from support.tiny import VOCAB, tiny_request, tiny_runner

COUPLED, GREEDY, SAMPLED = DraftSampling.COUPLED, DraftSampling.GREEDY, DraftSampling.SAMPLED
HIDDEN = 64
PROMPT = [5, 9, 3, 44, 5, 9, 3, 61]
TENSOR = dict[str, torch.Tensor]
BUDGETS = {
    "zero": DraftBudget(0, 4),
    "one": DraftBudget(1, 4),
    "chain": DraftBudget(3, 4, TreeKind.CHAIN),
    "static": DraftBudget(4, 4, TreeKind.STATIC, 16),
    "dynamic": DraftBudget(4, 4, TreeKind.DYNAMIC, 16),
    "deeper than the heads": DraftBudget(8, 2),
}


def tensors(num_heads: int = 4, blocks: int = 1, vocab: int | None = VOCAB, seed: int = 5) -> TENSOR:
    """Random heads in FasterDecoding's names; ``vocab`` None has no vocabulary matrices."""
    generator = torch.Generator().manual_seed(seed)
    found: TENSOR = {}
    for head in range(num_heads):
        for block in range(blocks):
            found[f"{head}.{block}.linear.weight"] = torch.randn(HIDDEN, HIDDEN, generator=generator) * 0.1
            found[f"{head}.{block}.linear.bias"] = torch.randn(HIDDEN, generator=generator) * 0.1
        if vocab is not None:
            found[f"{head}.{blocks}.weight"] = torch.randn(vocab, HIDDEN, generator=generator) * 0.35
    return found


class Shaped(MedusaDrafter):
    """Trees of one shape whatever the runner asks for, but never deeper; keeps them."""

    shape = BUDGETS["chain"]
    trees: list[DraftTree]

    def propose(self, seqs: Seq[Sequence], budgets: Seq[DraftBudget]) -> list[DraftTree]:
        """See Drafter."""
        depths = [min(b.num_draft_tokens, self.shape.num_draft_tokens) for b in budgets]
        self.trees = super().propose(seqs, [replace(self.shape, num_draft_tokens=d) for d in depths])
        return self.trees


def make(
    shape: str = "chain",
    sampling: DraftSampling = COUPLED,
    dtype: str = "bf16",
    heads: TENSOR | None = None,
    width: int | None = None,
    choices: Seq[RankPath] | None = None,
    **options: Any,
) -> ModelRunner:
    """A tiny runner whose drafter is Medusa."""
    defaults: dict[str, Any] = {
        "drafter": "none",
        "num_draft_tokens": 8,
        "tree": "static",
        "tree_width": 4,
        "tree_nodes": 64,
        "prefix_cache": False,
    }
    runner = tiny_runner(dtype, **(defaults | options))
    if width is None:
        width = 1 if sampling is SAMPLED else 4
    built = MedusaHeads(runner.model, tensors() if heads is None else heads)
    drafter = Shaped(runner.model, built, width, choices, sampling)
    drafter.shape = BUDGETS[shape]
    runner.drafter = drafter
    return runner


def drafter_of(runner: ModelRunner) -> Shaped:
    assert isinstance(runner.drafter, Shaped)
    return runner.drafter


def prefill(runner: ModelRunner, tokens: list[int], *, steps: int = 100, **params: Any) -> Sequence:
    seq = runner.new_sequence(tiny_request(tokens, max_tokens=200, **params))
    seq.table.ensure(seq.num_prefill + 200 + runner.spec_slots)
    for start in range(seq.num_computed, seq.num_prefill, steps):
        runner.prefill([PrefillChunk(seq, start, min(start + steps, seq.num_prefill))])
    return seq


# ---- heads


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("own", [True, False])
def test_heads_equal_plain_torch(blocks: int, own: bool) -> None:
    """J7: y = x + SiLU(W x + b), then the head's own vocabulary matrix or the target's LM head."""
    model = tiny_runner("fp32", drafter="none").model
    given = tensors(3, blocks, VOCAB if own else None)
    hidden = torch.randn(5, HIDDEN)
    got = MedusaHeads(model, given).logits(hidden)
    assert got.shape == (3, 5, VOCAB)
    for head in range(3):
        y = hidden
        for block in range(blocks):
            z = y @ given[f"{head}.{block}.linear.weight"].T + given[f"{head}.{block}.linear.bias"]
            y = y + z / (1 + torch.exp(-z))
        expected = y @ given[f"{head}.{blocks}.weight"].T if own else model.logits(y)
        torch.testing.assert_close(got[head], expected, atol=1e-5, rtol=1e-5)


def test_heads_are_counted_from_the_names() -> None:
    model = tiny_runner("fp32", drafter="none").model
    for count in (1, 3, 5, 11):  # 11: numbers, not strings, are counted
        assert MedusaHeads(model, tensors(count, vocab=None)).num_heads == count


def without(*names: str) -> TENSOR:
    return {name: value for name, value in tensors().items() if name not in names}


def small(ids: list[int] | torch.Tensor) -> TENSOR:
    return tensors(vocab=len(ids)) | {"token_map": torch.as_tensor(ids)}


BROKEN: dict[str, tuple[TENSOR, str]] = {
    "no heads": ({}, "found none"),
    "a gap": ({n: t for n, t in tensors().items() if not n.startswith("1.")}, r"heads \[0, 2, 3\]"),
    "no bias": (without("2.0.linear.bias"), r"2\.0\.linear\.bias is missing"),
    "a stranger": (tensors() | {"0.norm.weight": torch.ones(HIDDEN)}, r"0\.norm\.weight"),
    "wrong width": (tensors() | {"0.0.linear.weight": torch.ones(HIDDEN, 8)}, r"0\.0\.linear\.weight has shape"),
    "one vocabulary missing": (without("2.1.weight"), "differ in their vocabulary"),
    "vocabularies of two sizes": (tensors() | {"3.1.weight": torch.ones(VOCAB + 1, HIDDEN)}, "differ in their vocab"),
    "reduced without a map": (tensors(vocab=50), "need a token_map"),
    "map without matrices": (tensors(vocab=None) | {"token_map": torch.arange(9)}, "token_map must be int64"),
    "map too short": (tensors(vocab=50) | {"token_map": torch.arange(49)}, "token_map must be int64"),
    "map of floats": (small(torch.arange(50).float()), "token_map must be int64"),
    "map outside": (small([*range(49), VOCAB]), "different token ids"),
    "map twice": (small([*range(49), 3]), "different token ids"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_heads_are_refused_by_name(case: str) -> None:
    given, message = BROKEN[case]
    with pytest.raises(ConfigError, match=message):
        MedusaHeads(tiny_runner("fp32", drafter="none").model, given)


# ---- the off-by-one of C3


def shifted_heads(table: torch.Tensor, extra: int = 0) -> TENSOR:
    """Heads that pass h through and look k + 2 + extra tokens ahead in a text that counts upwards."""
    found = tensors(4)
    for head in range(4):
        for what in ("weight", "bias"):
            found[f"{head}.0.linear.{what}"].zero_()
        found[f"{head}.1.weight"] = table.roll(head + 2 + extra, 0)
    return found


def count_upwards(runner: ModelRunner) -> torch.Tensor:
    """Cut attention and MLP out of the target, so that t is followed by t + 1. Returns the embedding."""
    model = runner.model
    assert isinstance(model, LlamaModel)
    for layer in model.layers:
        layer.o_proj._packed.zero_()
        layer.down_proj._packed.zero_()
    model.lm_head = Linear(model.embedding.roll(1, 0), out_float32=True)
    return model.embedding


def full_rounds(runner: ModelRunner, temperature: float, requests: int = 4) -> set[int]:
    """Accepted per round, the last rounds (cut by max_tokens) left out."""
    asked = [tiny_request(index=i, temperature=temperature, max_tokens=40) for i in range(requests)]
    done = ColocatedEngine(runner, chunk_tokens=4).generate(asked)
    return {n for d in done for n in d.stats.accepted_per_round[:-1]}


@pytest.mark.parametrize("shape", ["chain", "static", "one"])
@pytest.mark.parametrize("temperature", [0.0, 0.05])
def test_perfect_heads_are_always_right(shape: str, temperature: float) -> None:
    """Head k says t_{i+k+2} from h_i: a head built to know it has every draft accepted (J4)."""
    runner = make(shape)
    drafter_of(runner).heads = MedusaHeads(runner.model, shifted_heads(count_upwards(runner)))
    assert full_rounds(runner, temperature) == {min(BUDGETS[shape].num_draft_tokens, 4)}


@pytest.mark.parametrize("extra", [-1, 1])
def test_heads_that_look_one_token_off_are_never_right(extra: int) -> None:
    """Mutant: head k read as t_{i+k+1} (the LM head's own place for k = 0) or t_{i+k+3}."""
    runner = make()
    drafter_of(runner).heads = MedusaHeads(runner.model, shifted_heads(count_upwards(runner), extra))
    assert full_rounds(runner, 0.0) == {0}


def memoryless(sampling: DraftSampling) -> ModelRunner:
    """Every token has the same law whatever came before, and the heads know it: only noise tells tokens apart."""
    runner = make("chain", sampling)
    embedding = count_upwards(runner)
    table = embedding.clone()
    embedding[:] = embedding[7].clone()
    assert isinstance(runner.model, LlamaModel)
    runner.model.lm_head = Linear(table * 0.4, out_float32=True)
    heads = shifted_heads(table)
    for head in range(4):
        heads[f"{head}.1.weight"] = table * 0.4
    drafter_of(runner).heads = MedusaHeads(runner.model, heads)
    return runner


def test_coupled_noise_is_that_of_the_position() -> None:
    """With q equal to p a coupled draft is always right at temperature 1, if it is drawn for its own position."""
    assert full_rounds(memoryless(COUPLED), 1.0) == {3}
    assert min(full_rounds(memoryless(GREEDY), 1.0)) == 0


@pytest.mark.parametrize("shift", [-1, 1])
def test_noise_of_the_next_position_is_noticed(shift: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant of the position of the first candidate, m + 1."""

    def off(logits: torch.Tensor, params: Any, positions: Seq[int], *rest: Any) -> Candidates:
        return choose(logits, params, [p + shift for p in positions], *rest)

    monkeypatch.setattr(medusa, "choose", off)
    assert full_rounds(memoryless(COUPLED), 1.0) != {3}


# ---- trees


def state_of(ids: list[list[int]], probs: list[list[float]] | None = None) -> DraftState:
    shape = torch.tensor(ids)
    chances = torch.tensor(probs) if probs is not None else torch.full(shape.shape, 0.1)
    return DraftState(shape, chances.float(), torch.zeros(1, HIDDEN))


def tree_of(
    state: DraftState, budget: DraftBudget, choices: Seq[RankPath] | None = None, width: int = 4, **params: Any
) -> DraftTree:
    """The tree that a sequence with ``state`` gets."""
    runner = make(width=width, sampling=GREEDY, choices=choices)
    seq = runner.new_sequence(tiny_request(PROMPT, **params))
    seq.token_ids.append(77)
    seq.draft = state
    drafter = drafter_of(runner)
    return MedusaDrafter.propose(drafter, [seq], [budget])[0]


def test_worked_mask_of_the_cartesian_product() -> None:
    """C3: two tokens of head 0, three of head 1: 8 nodes and the root, 6 paths."""
    choices = [(0,), (1,), *product(range(2), range(3))]
    state = state_of([[10, 11, 12], [20, 21, 22]])
    tree = tree_of(state, DraftBudget(2, 3, tree_nodes=8), choices, width=3)
    assert tree.token_ids == (77, 10, 11, 20, 21, 22, 20, 21, 22)
    sees = [[int(other in tree.path(node)) for other in range(9)] for node in range(9)]
    assert sees == [
        [1, 0, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 1, 0, 0, 0],
        [1, 0, 1, 0, 0, 0, 1, 0, 0],
        [1, 0, 1, 0, 0, 0, 0, 1, 0],
        [1, 0, 1, 0, 0, 0, 0, 0, 1],
    ]
    leaves = [node for node in range(9) if node not in tree.parents]
    paths = {tuple(tree.token_ids[n] for n in tree.path(leaf)[1:]) for leaf in leaves}
    assert paths == set(product((10, 11), (20, 21, 22)))
    assert tree.draft_probs is None


@pytest.mark.parametrize("nodes", [1, 4, 9, 16])
def test_a_dynamic_tree_is_the_best_of_the_product(nodes: int) -> None:
    probs = [[0.6, 0.2, 0.1], [0.5, 0.3, 0.1], [0.9, 0.04, 0.01]]
    state = state_of([[10, 11, 12], [20, 21, 22], [30, 31, 32]], probs)
    tree = tree_of(state, DraftBudget(3, 3, TreeKind.DYNAMIC, nodes), temperature=0.0)
    value: dict[tuple[int, ...], float] = {}
    for depth in (1, 2, 3):
        for ranks in product(range(3), repeat=depth):
            chance = 1.0
            for level, rank in enumerate(ranks):
                chance *= probs[level][rank]
            value[tuple(10 * (level + 1) + rank for level, rank in enumerate(ranks))] = chance
    found = sorted(tuple(tree.token_ids[n] for n in tree.path(node)[1:]) for node in range(1, tree.num_nodes))
    best = sorted(value, key=lambda path: (-value[path], len(path), path))[:nodes]
    assert found == sorted(best)


def test_the_default_tree_is_cut_to_the_budget() -> None:
    state = state_of([[10 * (d + 1) + r for r in range(4)] for d in range(4)])
    whole = tree_of(state, DraftBudget(4, 4, tree_nodes=64))
    assert 15 <= whole.num_draft_tokens <= 26
    assert max(whole.depths) == 4
    for budget in (DraftBudget(4, 4, tree_nodes=6), DraftBudget(2, 4, tree_nodes=64), DraftBudget(4, 2, tree_nodes=9)):
        tree = tree_of(state, budget)
        paths = {tuple(tree.token_ids[n] for n in tree.path(node)) for node in range(tree.num_nodes)}
        assert paths < {tuple(whole.token_ids[n] for n in whole.path(node)) for node in range(whole.num_nodes)}
        assert 3 <= tree.num_nodes <= budget.max_nodes
        assert max(tree.depths) <= budget.num_draft_tokens
        assert all(token % 10 < budget.tree_width for token in tree.token_ids[1:])


def test_drafting_stops_below_the_confidence() -> None:
    """The candidate that is unsure is still there, what rests on it is not."""
    state = state_of([[10, 11], [20, 21], [30, 31]], [[0.9, 0.1], [0.3, 0.2], [0.9, 0.1]])
    for kind in TreeKind:
        depths = {
            least: max(tree_of(state, DraftBudget(3, 2, kind, 14, least), temperature=0.0).depths)
            for least in (0.0, 0.2, 0.5, 0.95)
        }
        assert depths == {0.0: 3, 0.2: 3, 0.5: 2, 0.95: 1}


def test_sampled_chains_stop_where_the_law_is_unsure() -> None:
    """B7: not where what was drawn from it is unlikely."""
    runner = make("chain", SAMPLED)
    lengths = set()
    for index in range(12):
        seq = prefill(runner, [*PROMPT, index + 20], temperature=1.0)
        assert seq.draft is not None
        logits = drafter_of(runner).heads.logits(seq.draft.hidden)[:, 0]
        sure = (torch.softmax(logits, -1).amax(-1) >= 0.3).tolist()
        expected = 1 + sure.index(False) if False in sure else 4
        tree = MedusaDrafter.propose(drafter_of(runner), [seq], [DraftBudget(4, 1, min_confidence=0.3)])[0]
        assert tree.num_draft_tokens == expected
        lengths.add(expected)
    assert len(lengths) > 1


def test_without_state_there_is_the_root_alone() -> None:
    runner = make("static")
    seq = prefill(runner, PROMPT)
    seq.draft = None
    assert drafter_of(runner).propose([seq], [DraftBudget(4, 4)])[0].num_nodes == 1
    assert drafter_of(runner).draft_slots(BUDGETS["dynamic"]) == 0


def test_impossible_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="tree_width"):
        make(sampling=SAMPLED, width=2)
    with pytest.raises(ConfigError, match="needs 3 candidates"):
        make(width=2, choices=[(0,), (1,), (2,)])
    with pytest.raises(ConfigError, match="before its parent"):
        make(choices=[(0, 0), (0,)])
    make(width=2)  # the default tree is cut to the width


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
    extras: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.8, "presence_penalty": 0.5},
        {"temperature": 1.0, "min_tokens": 5, "stop_token_ids": (5, 9, 11, 21, 33)},
    ]
    return run(runner, [tiny_request(index=i, **extra) for i, extra in enumerate(extras)], batch=3)


def assert_same_text(got: list[Outcome], expected: list[Outcome]) -> None:
    assert [(o.token_ids, o.logit_bits) for o in got] == [(o.token_ids, o.logit_bits) for o in expected]


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
