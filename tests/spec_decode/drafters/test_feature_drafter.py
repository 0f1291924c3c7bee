"""What the feature drafter proposes, and the same text in every way."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from paceline.engine.colocated import ColocatedEngine
from paceline.engine.model_runner import ModelRunner
from paceline.errors import ConfigError
from paceline.layers.linear import Linear
from paceline.layers.ops import rms_norm
from paceline.models.base import ForwardContext
from paceline.models.llama import LlamaModel
from paceline.request import SequenceRequest
from paceline.sampling.race import race
from paceline.spec_decode.base import DraftBudget, DraftSampling, ExtendItem, TreeKind
from paceline.spec_decode.drafters import feature
from paceline.spec_decode.drafters.candidates import DRAFT_STREAM, choose
from paceline.spec_decode.drafters.confidence import log_values
from paceline.spec_decode.drafters.feature import FeatureDrafter
from paceline.spec_decode.drafters.none import NoDrafter
from paceline.spec_decode.heads.base import DraftHead
from paceline.spec_decode.trees.static_trees import EAGLE_TREE
from tests.support.asked import Sampling
from tests.support.exactness import Outcome, run
from tests.support.feature_drafting import (
    BUDGETS,
    COUPLED,
    GREEDY,
    PROMPT,
    SAMPLED,
    SERVED,
    Recorder,
    drafter_of,
    make,
    make_agreeable,
    prefill,
    ragged,
    state_is_exact,
)
from tests.support.needs import needs_kernels
from tests.support.tiny_model import VOCAB, tiny_request

# ---- what it proposes


class Oracle(DraftHead):
    """The target itself, where the target reads its last token alone: a row is that token's hidden row."""

    def __init__(self, runner: ModelRunner) -> None:
        inner = drafter_of(runner).head
        self.model, self.kv_layers, self.hidden_size = runner.model, inner.kv_layers, inner.hidden_size

    def forward(self, token_ids: torch.Tensor, hidden: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """See DraftHead."""
        assert isinstance(self.model, LlamaModel)
        return rms_norm(self.model.embed(token_ids), self.model.norm, self.model.spec.rms_norm_eps)

    def logits(self, output: torch.Tensor) -> torch.Tensor:
        """See DraftHead."""
        return self.model.logits(output)


def oracle_runner(shape: str, sharpness: float, **options: Any) -> ModelRunner:
    runner = make("fp32", shape, **options)
    model = runner.model
    assert isinstance(model, LlamaModel)
    for layer in model.layers:
        layer.o_proj._packed.zero_()
        layer.down_proj._packed.zero_()
    model.lm_head = Linear(model.embedding.roll(1, 0) * sharpness, out_float32=True)  # t is mostly followed by t + 1
    drafter_of(runner).head = Oracle(runner)
    return runner


@pytest.mark.parametrize(
    ("shape", "sampling", "temperature"), [*((*case, 0.0) for case in SERVED), *((b, COUPLED, 1.0) for b in BUDGETS)]
)
def test_a_head_that_is_the_target_is_always_right(shape: str, sampling: DraftSampling, temperature: float) -> None:
    """J4: accepted == K in every round, sampled or not. Where coupled drafts are sampled the law is broad for chains
    and static trees: any other noise than the target's own would fail. A dynamic tree goes deep where it is sure."""
    broad = temperature > 0.0 and shape != "dynamic"
    runner = oracle_runner(shape, 0.3 if broad else 1.0, sampling=sampling)
    requests = [tiny_request(index=i, temperature=temperature, max_tokens=30) for i in range(4)]
    depth = BUDGETS[shape].num_draft_tokens
    for done in ColocatedEngine(runner, chunk_tokens=4).generate(requests):
        full = done.stats.accepted_per_round[:-1]  # the last round is cut by max_tokens
        assert full
        assert set(full) == {depth}


def test_race_values_lead_dynamic_trees_of_sampled_requests_deeper(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same broad oracle: trees grown by the value of the race accept more than trees grown by q."""

    def accepted() -> int:
        runner = oracle_runner("dynamic", 0.3)
        requests = [tiny_request(index=i, temperature=1.0, max_tokens=40) for i in range(8)]
        return sum(sum(d.stats.accepted_per_round) for d in ColocatedEngine(runner).generate(requests))

    by_race = accepted()
    monkeypatch.setattr(feature, "log_values", lambda *a, coupled: log_values(*a, coupled=False))
    assert by_race > 1.1 * accepted()


@pytest.mark.parametrize("shape", ["chain", "static", "comb"])
def test_sampled_trees_carry_the_law_they_were_drawn_from(shape: str) -> None:
    """q of every node with children, over the whole vocabulary, and its children are the first draws from it."""
    runner = make(sampling=SAMPLED)
    drafter, seqs = drafter_of(runner), ragged(runner)
    drafter.choices = EAGLE_TREE if shape == "static" else ()
    trees = drafter.propose(seqs, [BUDGETS[shape]] * 4)
    assert trees[0].draft_probs is None  # greedy: a function of the context
    for seq, tree in zip(seqs[1:], trees[1:], strict=True):
        assert tree.draft_probs is not None
        assert seq.draft is not None
        assert set(tree.draft_probs) == set(tree.parents[1:])
        temperature = seq.request.params.temperature
        root = torch.softmax(drafter.head.logits(seq.draft.hidden)[0] / temperature, dim=0)
        assert torch.equal(tree.draft_probs[0], root)
        for node, q in tree.draft_probs.items():
            assert float(q.sum()) == pytest.approx(1.0)
            children = [t for t, parent in zip(tree.token_ids, tree.parents, strict=True) if parent == node]
            seed = (seq.request.params.seed or 0) ^ DRAFT_STREAM
            position = seq.num_computed + tree.depths[node] + 1
            assert children == race(q.log()[None], [1.0], [seed], [position], len(children))[0].tolist()
    with pytest.raises(ConfigError, match="tree"):
        drafter.propose(seqs, [BUDGETS["dynamic"]] * 4)


@pytest.mark.parametrize(("shape", "sampling"), SERVED)
def test_an_unsure_node_is_not_drafted_from(shape: str, sampling: DraftSampling) -> None:
    """I3d: its candidates cost nothing more and stay; nobody is ever as sure as 1.01."""
    runner = make(sampling=sampling)
    drafter, seqs = drafter_of(runner), ragged(runner)
    sizes = []
    for floor in (0.0, 0.05, 1.01):
        trees = drafter.propose(seqs, [replace(BUDGETS[shape], min_confidence=floor)] * 4)
        sizes.append([max(tree.depths) for tree in trees])
    assert sizes[2] == [1] * 4
    assert all(a >= b >= 1 for a, b in zip(sizes[0], sizes[1], strict=True))
    assert min(sizes[0]) >= 2


def test_an_unlucky_draw_is_no_lack_of_confidence() -> None:
    """B7: what was drawn must not decide whether it is kept and drafted from; the law it was drawn from may."""
    runner = make(sampling=SAMPLED)
    unlucky = 0
    for index in range(8):
        seq = prefill(runner, PROMPT, index=index, temperature=1.0)
        assert seq.draft is not None
        most = float(drafter_of(runner).head.logits(seq.draft.hidden).softmax(1).max())
        unlucky += float(seq.draft.proposal_probs[0, 0]) < 0.9 * most
        budget = replace(BUDGETS["chain"], num_draft_tokens=2)
        for floor, depth in ((0.99 * most, 2), (1.01 * most, 1)):
            (tree,) = drafter_of(runner).propose([seq], [replace(budget, min_confidence=floor)])
            assert tree.num_draft_tokens == depth
    assert unlucky > 0


def test_nothing_to_draft_from() -> None:
    """No draft state (nothing was handed over), or K = 0: the root alone, and the state stays fit for later (E5)."""
    runner = make(shape="comb")
    seq = prefill(runner, PROMPT)
    seq.draft, kept = None, seq.draft
    assert drafter_of(runner).propose([seq], [BUDGETS["dynamic"]])[0].token_ids == (seq.token_ids[-1],)
    seq.draft = kept
    for budget in (DraftBudget(0), DraftBudget(0, 3, TreeKind.DYNAMIC), DraftBudget(0, tree=TreeKind.CHAIN)):
        drafter_of(runner).shape = budget
        assert runner.decode([seq])[0].round.num_draft_tokens == 0
        assert drafter_of(runner).draft_slots(budget) == 0
        assert state_is_exact(runner, seq)


class OddHead(Recorder):
    """A reduced vocabulary (every second token) and a fused input twice as wide."""

    def __init__(self, head: DraftHead) -> None:
        super().__init__(head)
        self.aux_layers, self.token_map = (0, 1), torch.arange(0, VOCAB, 2)

    def fuse(self, hidden: torch.Tensor) -> torch.Tensor:
        """See DraftHead."""
        assert hidden.shape[1] == 2 * self.hidden_size
        return hidden[:, self.hidden_size :]

    def logits(self, output: torch.Tensor) -> torch.Tensor:
        """See DraftHead."""
        return self.head.logits(output)[:, ::2]


@pytest.mark.parametrize("sampling", [COUPLED, GREEDY, SAMPLED])
def test_fused_rows_and_a_reduced_vocabulary(sampling: DraftSampling) -> None:
    """C6: committed rows are fused, drafted ones are fed back as they come; ids are the target's."""
    runner = make(sampling=sampling)
    inner = drafter_of(runner).head
    odd = FeatureDrafter("eagle3", runner.model, OddHead(inner), runner.kv, runner.attention, 4, sampling)
    assert (odd.aux_layers, odd.kv_layers, odd.state_width) == ((0, 1), inner.kv_layers, 64)
    seq, m = prefill(runner, PROMPT, temperature=1.0), len(PROMPT)
    hidden = torch.randn(m, 64).to(runner.dtype)
    wide = torch.cat((torch.full_like(hidden, torch.nan), hidden), dim=1)
    odd.extend([ExtendItem(seq, 0, m, wide, final=True)])
    assert seq.draft is not None
    ids = seq.draft.proposal_ids
    want = choose(
        inner.logits(seq.draft.hidden)[:, ::2], [seq.request.params], [m + 1], 4, sampling, VOCAB,
        torch.arange(0, VOCAB, 2),
    )  # fmt: skip
    assert torch.equal(ids, want.ids)
    tree = odd.propose([seq], [BUDGETS["comb"]])[0]
    assert tree.num_nodes == 10
    assert all(token % 2 == 0 for token in tree.token_ids[1:])
    for q in (tree.draft_probs or {}).values():
        assert q.shape == (VOCAB,)
        assert float(q[1::2].sum()) == 0.0
        assert float(q.sum()) == pytest.approx(1.0)


def test_options_are_checked() -> None:
    runner = make()
    parts = ("mtp", runner.model, drafter_of(runner).head, runner.kv, runner.attention)
    with pytest.raises(ConfigError, match="tree_width"):
        FeatureDrafter(*parts, 2, static_tree=EAGLE_TREE)
    with pytest.raises(ConfigError, match="static_tree"):
        FeatureDrafter(*parts, 2, static_tree=((1,),))
    for bad in (0.0, 1.5):
        with pytest.raises(ConfigError, match="expand_above"):
            FeatureDrafter(*parts, 2, expand_above=bad)


# ---- the text

EXTRAS: list[Sampling] = [{"temperature": 0.0}, {}, {"top_k": 9, "repetition_penalty": 1.3}, {"top_p": 0.8}]


def requests() -> list[SequenceRequest]:
    return [tiny_request(index=i, max_tokens=12, **extra) for i, extra in enumerate(EXTRAS)]


@pytest.fixture(scope="module")
def plain() -> list[Outcome]:
    torch.set_num_threads(1)
    runner = make()
    make_agreeable(runner)
    runner.drafter = NoDrafter()
    return run(runner, requests())


@needs_kernels
@pytest.mark.parametrize("depth", [0, 1, 3, 8])
@pytest.mark.parametrize(("shape", "sampling"), [*SERVED, ("threshold", COUPLED), ("threshold", GREEDY)])
def test_tokens_and_logit_bits_equal_plain_decoding(
    shape: str, sampling: DraftSampling, depth: int, plain: list[Outcome]
) -> None:
    budget = replace(BUDGETS["dynamic" if shape == "threshold" else shape], num_draft_tokens=depth)
    expand_above = 0.05 if shape == "threshold" else None
    runner = make(shape=budget, sampling=sampling, expand_above=expand_above, num_draft_tokens=depth, page_size=4)
    drafter_of(runner).choices = EAGLE_TREE
    make_agreeable(runner)
    got = run(runner, requests(), batch=3, chunk_tokens=5)
    assert [(o.token_ids, o.logit_bits) for o in got] == [(o.token_ids, o.logit_bits) for o in plain]
    if depth == 0:
        assert {n for o in got for n in o.accepted_per_round} == {0}
    elif sampling is COUPLED:
        assert max(n for o in got for n in o.accepted_per_round) >= 1
