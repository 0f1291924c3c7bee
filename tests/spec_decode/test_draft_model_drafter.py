"""The draft model: its KV against a fresh prefill, C1's off-by-one, trees against paths run alone, odd pairs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from paceline.attention.base import ForwardBatch, Segment
from paceline.engine.colocated import ColocatedEngine
from paceline.engine.model_runner import ModelRunner, PrefillChunk
from paceline.errors import ConfigError
from paceline.kvcache.layout import KvLayout, LayerOwner
from paceline.kvcache.pool import KvPool
from paceline.models.base import AuxCapture, ForwardContext
from paceline.models.config import ModelSpec
from paceline.models.llama import LlamaModel
from paceline.models.loader import WeightBag
from paceline.spec_decode.base import DraftBudget, DraftSampling, ExtendItem, TreeKind
from paceline.spec_decode.choices import EAGLE_TREE
from paceline.spec_decode.drafters import draft_model
from paceline.spec_decode.drafters.draft_model import Draft, DraftModelDrafter, Written
from paceline.spec_decode.heads.draft_model import load_draft_model
from paceline.spec_decode.sequence import Sequence
from paceline.spec_decode.tree import DraftTree
from support.exactness import Outcome, run
from support.tiny import VOCAB, tiny_request, tiny_runner, tiny_spec, tiny_weights

COUPLED, GREEDY, SAMPLED = DraftSampling.COUPLED, DraftSampling.GREEDY, DraftSampling.SAMPLED
PROMPT = [5, 9, 3, 44, 5, 9, 3, 61]
LAYERS = 2  # of the tiny target
BUDGETS = {
    "zero": DraftBudget(0, 4),
    "one": DraftBudget(1, 4, TreeKind.CHAIN),
    "chain": DraftBudget(3, 4, TreeKind.CHAIN),
    "long chain": DraftBudget(8, 1),
    "comb": DraftBudget(3, 3),
    "static": DraftBudget(4, 4, tree_nodes=15),
    "dynamic": DraftBudget(4, 3, TreeKind.DYNAMIC),
}


class Shaped(DraftModelDrafter):
    """Trees of one shape whatever the runner asks for, but never deeper; keeps them."""

    shape = BUDGETS["chain"]
    trees: list[DraftTree]

    def propose(self, seqs: Seq[Sequence], budgets: Seq[DraftBudget]) -> list[DraftTree]:
        """See Drafter."""
        depths = [min(b.num_draft_tokens, self.shape.num_draft_tokens) for b in budgets]
        own = [replace(self.shape, num_draft_tokens=depth) for depth in depths]
        self.trees = super().propose(seqs, own)
        for seq, budget, tree in zip(seqs, own, self.trees, strict=True):
            assert tree.num_nodes <= budget.max_nodes
            assert max(tree.depths) <= budget.num_draft_tokens
            assert tree.token_ids[0] == seq.token_ids[-1]
        return self.trees


class CountingModel(LlamaModel):
    """Keeps how many rows each sequence had in each forward."""

    rows: list[list[int]]

    def forward(self, context: ForwardContext, aux: AuxCapture | None = None) -> torch.Tensor:
        """See TargetModel."""
        self.rows.append([len(segment.token_ids) for segment in context.batch.segments])
        return super().forward(context, aux)


def build_draft(dtype: torch.dtype, noise: float = 0.0, **changes: Any) -> CountingModel:
    """The target's own weights, blurred by ``noise``; ``changes`` are ModelSpec's."""
    spec = replace(tiny_spec(), **changes)
    tensors = dict(tiny_weights(spec, torch.float32)._tensors)
    generator = torch.Generator().manual_seed(11)
    for name, value in tensors.items():
        if value.dim() == 2:
            value = value + noise * torch.randn(value.shape, generator=generator)
        tensors[name] = value.to(dtype)
    model = CountingModel(spec, WeightBag(tensors), dtype, torch.device("cpu"), LAYERS, LayerOwner.DRAFT)
    model.rows = []
    return model


def make(
    shape: str | DraftBudget = "chain",
    sampling: DraftSampling = COUPLED,
    dtype: str = "bf16",
    noise: float = 0.0,
    draft: dict[str, Any] | None = None,
    **options: Any,
) -> ModelRunner:
    """A tiny runner with a draft model: the target itself unless ``noise`` or ``draft`` (ModelSpec's) say otherwise."""
    defaults: dict[str, Any] = {
        "drafter": "none",
        "num_draft_tokens": 8,
        "tree": "static",
        "tree_width": 4,
        "tree_nodes": 64,
        "prefix_cache": False,
    }
    runner = tiny_runner(dtype, **(defaults | options))
    model = build_draft(runner.dtype, noise, **(draft or {}))
    layout = KvLayout((*runner.model.kv_layers, *model.kv_layers), runner.dtype)
    runner.kv = KvPool(layout, runner.kv.num_pages, runner.kv.page_size)
    tree = EAGLE_TREE if shape == "static" else ()
    drafter = Shaped(runner.model, model, runner.kv, runner.attention, LAYERS, 4, sampling, tree)
    drafter.shape = BUDGETS[shape] if isinstance(shape, str) else shape
    runner.drafter = drafter
    return runner


def drafter_of(runner: ModelRunner) -> Shaped:
    assert isinstance(runner.drafter, Shaped)
    return runner.drafter


def model_of(runner: ModelRunner) -> CountingModel:
    model = drafter_of(runner).draft
    assert isinstance(model, CountingModel)
    return model


def prefill(runner: ModelRunner, tokens: list[int], *, steps: int = 100, **params: Any) -> Sequence:
    seq = runner.new_sequence(tiny_request(tokens, max_tokens=200, **params))
    seq.table.ensure(seq.num_prefill + 200 + runner.spec_slots)
    for start in range(seq.num_computed, seq.num_prefill, steps):
        runner.prefill([PrefillChunk(seq, start, min(start + steps, seq.num_prefill))])
    return seq


def draft_kv(runner: ModelRunner, seq: Sequence, rows: int) -> torch.Tensor:
    """[layers, 2, rows, heads, dim] of the sequence's first rows."""
    slots = seq.table.slots[:rows].long()
    layers = runner.kv.layout.layer_range(LayerOwner.DRAFT)
    return torch.stack([torch.stack(runner.kv.read(layer, slots)) for layer in layers])


def plain_logits(runner: ModelRunner, token_ids: Seq[int]) -> torch.Tensor:
    """Logits after each token, of the draft model over the text alone, in a pool of its own. float32 [len, V]."""
    model = model_of(runner)
    kv = KvPool(runner.kv.layout, 1, len(token_ids))
    segment = Segment.linear(token_ids, 0, torch.arange(len(token_ids), dtype=torch.int32))
    batch = ForwardBatch.build([segment])
    return model.logits(model.forward(ForwardContext.build(batch, kv, runner.attention)))


def full_rounds(runner: ModelRunner, temperature: float, **how: int) -> set[int]:
    """Accepted per round, the last rounds (cut by max_tokens) left out."""
    requests = [tiny_request(index=i, temperature=temperature, max_tokens=40) for i in range(4)]
    engine = ColocatedEngine(runner, **({"chunk_tokens": 4} | how))
    return {n for done in engine.generate(requests) for n in done.stats.accepted_per_round[:-1]}


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
            written = seq.scratch.get("draft_model")
            if isinstance(written, Written):
                seq.scratch["draft_model"] = Written(written.start, (*written.token_ids, tree.token_ids[-1]))
        return trees

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DraftModelDrafter, "propose", propose)
        yield


def test_feeding_one_token_after_a_full_accept_is_noticed() -> None:
    with kept_too_much():
        assert full_rounds(make("chain"), 0.0) != {3}
        with pytest.raises(AssertionError):
            check_rows_against_fresh_prefill("chain", 0.0, 0.0)


# ---- its KV


def check_rows_against_fresh_prefill(shape: str, temperature: float, noise: float) -> set[int]:
    """J5 after every round: the rows called exact, and after the next propose all m. Returns accepted lengths."""
    runner = make(shape, noise=noise)
    seq = prefill(runner, PROMPT, steps=3, temperature=temperature)
    accepted = set()
    for _ in range(14):
        before = seq.num_computed
        accepted.add(runner.decode([seq])[0].round.num_accepted)
        fresh = prefill(runner, seq.token_ids[:-1], temperature=temperature)
        m = seq.num_computed
        assert fresh.draft_rows == m == len(seq.token_ids) - 1
        assert before < seq.draft_rows <= m  # t_m of the round before is always kept
        assert torch.equal(draft_kv(runner, seq, seq.draft_rows), draft_kv(runner, fresh, seq.draft_rows))
        drafter_of(runner).propose([seq], [DraftBudget(8, 4)])
        assert seq.draft_rows == m
        assert torch.equal(draft_kv(runner, seq, m), draft_kv(runner, fresh, m))
        fresh.table.release()
    return accepted


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


# ---- trees against their paths run alone


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
        seq.scratch.clear()
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
        runner.kv.write(layer, slots, *(torch.full_like(t, 3.0) for t in runner.kv.read(layer, slots)))
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
        runner.kv.write(owned, past, *(torch.full_like(t, 3.0) for t in runner.kv.read(owned, past)))
    drafter.propose([seq], [DraftBudget(8, 4)])
    key, _ = runner.kv.read(layer, past)
    written = int((key != 3.0).flatten(1).any(1).nonzero().max()) + 1 if budget.num_draft_tokens else 0
    assert written <= drafter.draft_slots(budget) <= budget.max_nodes
    if budget.num_draft_tokens:
        assert written >= budget.num_draft_tokens - (shape == "static")  # that tree is shallower than its budget


# ---- pairs and folders


def test_models_that_do_not_fit_are_refused_by_name() -> None:
    runner = make()
    target, kv, attention = runner.model, runner.kv, runner.attention

    def pair(draft: LlamaModel, first_layer: int = LAYERS, **options: Any) -> DraftModelDrafter:
        return DraftModelDrafter(target, draft, kv, attention, first_layer, 4, **options)

    with pytest.raises(ConfigError, match=r"vocab_size 1400 \(target 199\)"):
        pair(build_draft(runner.dtype, vocab_size=1400))
    with pytest.raises(ConfigError, match=r"bos_token_id 7 \(target 1\), eos_token_ids \(3, 4\)"):
        pair(build_draft(runner.dtype, bos_token_id=7, eos_token_ids=(3, 4)))
    with pytest.raises(ConfigError, match=r"dtype torch\.float32"):
        pair(build_draft(torch.float32))
    with pytest.raises(ConfigError, match="layers from 1 on"):
        pair(build_draft(runner.dtype), first_layer=1)
    with pytest.raises(ConfigError, match="layers from 2 on"):
        pair(build_draft(runner.dtype, num_layers=3))
    with pytest.raises(ConfigError, match="tree_width"):
        pair(build_draft(runner.dtype), static_tree=[(rank,) for rank in range(5)])
    assert pair(build_draft(runner.dtype, bos_token_id=None, eos_token_ids=())).kv_layers == kv.layout.layers[LAYERS:]


def folder_of(path: Path, spec: ModelSpec) -> Path:
    save_file(dict(tiny_weights(spec, torch.float32)._tensors), path / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "num_hidden_layers": spec.num_layers,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
    }
    same = ("vocab_size", "hidden_size", "intermediate_size", "head_dim", "rms_norm_eps", "rope_theta")
    config |= {name: getattr(spec, name) for name in (*same, "max_position_embeddings", "bos_token_id")}
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_a_folder_is_loaded_onto_the_draft_layers(tmp_path: Path) -> None:
    runner = make()
    folder = folder_of(tmp_path, tiny_spec())
    model, digest = load_draft_model(str(folder), runner.model, LAYERS)
    assert len(digest) == 32
    assert [layer.kv_layer for layer in model.layers] == [LAYERS, LAYERS + 1]
    assert {layer.owner for layer in model.kv_layers} == {LayerOwner.DRAFT}
    assert model.dtype == runner.dtype
    drafter = Shaped(runner.model, model, runner.kv, runner.attention, LAYERS, 4)
    runner.drafter = drafter
    assert full_rounds(runner, 0.0) == {3}


def test_a_draft_model_must_be_named() -> None:
    with pytest.raises(ConfigError, match="drafter_path"):
        load_draft_model("", make().model, LAYERS)
