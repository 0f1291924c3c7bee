"""Bookkeeping of the feature drafter against plain recomputation, and against wrong variants (algorithms.md D, E, J5).

The references below are written from the formulas: the target over whole texts, then rows (t_{i+1}, h_i) at position i
through the head, then a path alone, row m + s = (its s-th token, the output of the row before).
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from paceline.attention.base import ForwardBatch, Segment
from paceline.engine.colocated import ColocatedEngine
from paceline.engine.model_runner import ModelRunner, PrefillChunk
from paceline.errors import ConfigError
from paceline.kvcache.layout import LayerOwner
from paceline.kvcache.table import PageTable
from paceline.layers.linear import Linear
from paceline.layers.ops import rms_norm
from paceline.models.base import ForwardContext
from paceline.models.llama import LlamaModel
from paceline.request import SequenceRequest
from paceline.sampling.race import race
from paceline.spec_decode.base import DraftBudget, DraftSampling, ExtendItem, TreeKind
from paceline.spec_decode.candidates import DRAFT_STREAM, choose
from paceline.spec_decode.choices import EAGLE_TREE
from paceline.spec_decode.confidence import log_values
from paceline.spec_decode.drafters import feature
from paceline.spec_decode.drafters.feature import Draft, FeatureDrafter
from paceline.spec_decode.drafters.none import NoDrafter
from paceline.spec_decode.heads.base import DraftHead
from paceline.spec_decode.heads.mtp import MtpHead
from paceline.spec_decode.sequence import Sequence
from paceline.spec_decode.tree import DraftTree
from support.exactness import Outcome, run
from support.tiny import VOCAB, tiny_request, tiny_runner

COUPLED, GREEDY, SAMPLED = DraftSampling.COUPLED, DraftSampling.GREEDY, DraftSampling.SAMPLED
PROMPT = [5, 9, 3, 44, 5, 9, 3, 61]
BUDGETS = {
    "chain": DraftBudget(4, 4, TreeKind.CHAIN),
    "comb": DraftBudget(3, 3),
    "static": DraftBudget(4, 4, tree_nodes=15),
    "dynamic": DraftBudget(4, 3, TreeKind.DYNAMIC),
}
SERVED = [(b, s) for b in BUDGETS for s in DraftSampling if (b, s) != ("dynamic", SAMPLED)]


class Shaped(FeatureDrafter):
    """Trees of one shape whatever the runner asks for, but never deeper; keeps them."""

    shape: DraftBudget | None = None
    trees: list[DraftTree]

    def propose(self, seqs: Seq[Sequence], budgets: Seq[DraftBudget]) -> list[DraftTree]:
        """See Drafter."""
        shape = self.shape
        if shape is not None:
            budgets = [
                replace(shape, num_draft_tokens=min(b.num_draft_tokens, shape.num_draft_tokens)) for b in budgets
            ]
        self.trees = super().propose(seqs, budgets)
        return self.trees


class Recorder(DraftHead):
    """A head that keeps what it is asked and answers."""

    def __init__(self, head: DraftHead) -> None:
        self.head, self.calls = head, list[tuple[ForwardBatch, torch.Tensor]]()
        self.kv_layers, self.hidden_size = head.kv_layers, head.hidden_size

    def forward(self, token_ids: torch.Tensor, hidden: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """See DraftHead."""
        self.calls.append((context.batch, self.head.forward(token_ids, hidden, context)))
        return self.calls[-1][1]

    def logits(self, output: torch.Tensor) -> torch.Tensor:
        """See DraftHead."""
        return self.head.logits(output)


def make(dtype: str = "bf16", shape: str | DraftBudget | None = None, **options: Any) -> ModelRunner:
    """A runner with an untrained MTP head and trees of ``shape``."""
    choices = EAGLE_TREE if shape == "static" else ()
    sampling = options.pop("sampling", COUPLED)
    expand_above = options.pop("expand_above", None)
    defaults: dict[str, Any] = {
        "prefix_cache": False,
        "num_draft_tokens": 4,
        "tree": "static",
        "tree_width": 4,
        "tree_nodes": 64,
    }
    runner = tiny_runner(dtype, drafter="mtp", **(defaults | options))
    assert isinstance(runner.drafter, FeatureDrafter)
    runner.drafter = Shaped(
        "mtp", runner.model, runner.drafter.head, runner.kv, runner.attention, 4, sampling, choices, expand_above
    )  # fmt: skip
    runner.drafter.shape = BUDGETS[shape] if isinstance(shape, str) else shape
    return runner


def drafter_of(runner: ModelRunner) -> Shaped:
    assert isinstance(runner.drafter, Shaped)
    return runner.drafter


def make_agreeable(runner: ModelRunner) -> None:
    """Target and drafter look at little but their last token, and not quite alike: all accepted lengths occur."""
    head = drafter_of(runner).head
    assert isinstance(head, MtpHead)
    for block in (*runner.model.layers, head.module.block):  # type: ignore[attr-defined]
        block.o_proj._packed.mul_(0.02)
        block.down_proj._packed.mul_(0.02)
    join = torch.cat((torch.eye(runner.hidden_size), 0.1 * torch.eye(runner.hidden_size)), dim=1)
    head.module.eh_proj = Linear(join.to(runner.dtype))
    assert isinstance(runner.model, LlamaModel)
    runner.model.lm_head = Linear(runner.model.embedding.roll(1, 0) * 0.25, out_float32=True)


def prefill(runner: ModelRunner, tokens: list[int], *, steps: int = 100, index: int = 0, **params: Any) -> Sequence:
    seq = runner.new_sequence(tiny_request(tokens, index=index, max_tokens=200, **params))
    seq.table.ensure(seq.num_prefill + 200 + runner.spec_slots)
    for start in range(seq.num_computed, seq.num_prefill, steps):
        runner.prefill([PrefillChunk(seq, start, min(start + steps, seq.num_prefill))])
    return seq


def draft_kv(runner: ModelRunner, slots: torch.Tensor) -> torch.Tensor:
    (layer,) = runner.kv.layout.layer_range(LayerOwner.DRAFT)
    return torch.stack(runner.kv.read(layer, slots.long()))


def head_rows(runner: ModelRunner, segment: Segment, hidden: torch.Tensor) -> torch.Tensor:
    batch = ForwardBatch.build([segment])
    head = drafter_of(runner).head
    return head.forward(batch.token_ids, hidden, ForwardContext.build(batch, runner.kv, runner.attention))


@contextmanager
def committed_alone(runner: ModelRunner, tokens: Seq[int]) -> Iterator[tuple[PageTable, torch.Tensor]]:
    """The draft rows of a text by formula, in pages of their own, and the head's outputs. t_m is the last token."""
    table, m = PageTable(runner.allocator, runner.page_size), len(tokens) - 1
    table.ensure(m + 16)
    batch = ForwardBatch.build([Segment.linear(tokens[:m], 0, table.slots)])
    hidden = runner.model.forward(ForwardContext.build(batch, runner.kv, runner.attention))
    yield table, head_rows(runner, Segment.linear(tokens[1:], 0, table.slots), hidden)
    table.release()


def state_is_exact(runner: ModelRunner, seq: Sequence) -> bool:
    """Whether the draft KV of all m rows, a_{m-1} and the candidates are those of a fresh draft prefill, in bits."""
    assert seq.draft is not None
    drafter, m = drafter_of(runner), seq.num_computed
    assert (seq.draft_rows, m) == (m, len(seq.token_ids) - 1)
    with committed_alone(runner, seq.token_ids) as (table, outputs):
        logits = drafter.head.logits(outputs[-1:])
        want = choose(logits, [seq.request.params], [m + 1], drafter.width, drafter.sampling, VOCAB)
        return (
            torch.equal(draft_kv(runner, seq.table.slots[:m]), draft_kv(runner, table.slots[:m]))
            and torch.equal(seq.draft.hidden, outputs[-1:])
            and torch.equal(seq.draft.proposal_ids, want.ids)
            and torch.equal(seq.draft.proposal_probs, want.probs)
        )


def rounds_stay_exact(runner: ModelRunner, rounds: int = 10, temperature: float = 0.0) -> tuple[bool, set[int]]:
    """Over some rounds: whether the state stays exact, and the accepted lengths seen."""
    seq, accepted, exact = prefill(runner, PROMPT, steps=3, temperature=temperature), set(), True
    for _ in range(rounds):
        exact = exact and state_is_exact(runner, seq)
        accepted.add(runner.decode([seq])[0].round.num_accepted)
    exact = exact and state_is_exact(runner, seq)
    seq.table.release()
    assert runner.allocator.check_integrity() == []
    return exact, accepted


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("shape", BUDGETS)
def test_state_after_rounds_is_that_of_a_fresh_prefill(dtype: str, shape: str) -> None:
    """E1, E3: whatever was drafted and refused, in bits."""
    seen: set[int] = set()
    for temperature, sampling in ((0.0, GREEDY), (1.0, COUPLED)):
        runner = make(dtype, shape, sampling=sampling)
        make_agreeable(runner)
        exact, accepted = rounds_stay_exact(runner, temperature=temperature)
        assert exact
        seen |= accepted
    assert 0 in seen
    assert max(seen) >= 2  # an extend of several rows over rows of drafts


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_chunked_extends_equal_whole(steps: int) -> None:
    """E6: a chunk's last row takes the next prompt token; nothing else crosses the border."""
    runner = make()
    for length in (1, 2, 3, 9):
        tokens = [(13 * i + 5) % 190 + 3 for i in range(length)]
        whole, chunked = prefill(runner, tokens), prefill(runner, tokens, steps=steps)
        assert whole.draft is not None
        assert chunked.draft is not None
        assert torch.equal(whole.draft.hidden, chunked.draft.hidden)
        assert torch.equal(whole.draft.proposal_ids, chunked.draft.proposal_ids)
        rows = [draft_kv(runner, seq.table.slots[:length]) for seq in (whole, chunked)]
        assert torch.equal(*rows)


def test_a_chunk_before_the_last_leaves_rows_and_no_candidates() -> None:
    runner = make()
    seq = runner.new_sequence(tiny_request(PROMPT, max_tokens=8))
    seq.table.ensure(40)
    seq.draft = prefill(runner, PROMPT).draft  # of an earlier row: not to be drafted from
    runner.prefill([PrefillChunk(seq, 0, 5)])
    assert (seq.draft, seq.draft_rows) == (None, 5)


def test_rows_found_in_the_prefix_cache_are_kept() -> None:
    runner = make(prefix_cache=True, page_size=4)
    prompt = [*range(3, 20)]
    runner.release(prefill(runner, prompt))
    seq = prefill(runner, prompt)
    assert seq.cached_tokens >= 12
    assert state_is_exact(runner, seq)


# ---- one row of a tree


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


def ragged(runner: ModelRunner) -> list[Sequence]:
    prompts = [PROMPT, PROMPT[:2], [*range(10, 31)], [7]]
    return [prefill(runner, p, index=i, temperature=[0.0, 1.0, 0.7, 1.0][i]) for i, p in enumerate(prompts)]


MIXED = [BUDGETS["dynamic"], BUDGETS["static"], BUDGETS["chain"], DraftBudget(2, 4, TreeKind.DYNAMIC, tree_nodes=5)]


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


# ---- wrong variants


def test_hidden_off_by_one_is_noticed() -> None:
    """E1, the naming trap: row i built from h_{i-1}."""
    runner = make(shape="comb")
    extend = runner.drafter.extend
    runner.drafter.extend = lambda items: extend(  # type: ignore[method-assign]
        [replace(item, hidden=item.hidden.roll(1, 0)) for item in items]
    )
    assert not rounds_stay_exact(runner, 1)[0]


def test_rows_of_drafts_left_in_place_are_noticed() -> None:
    """E3: after a round only the last row is made from a true hidden row."""
    runner = make(shape="chain")
    make_agreeable(runner)
    extend = runner.drafter.extend

    def last_only(items: Seq[ExtendItem]) -> None:
        decode = items[0].start >= len(PROMPT)
        extend([replace(i, start=i.end - 1, hidden=i.hidden[-1:]) if decode else i for i in items])

    runner.drafter.extend = last_only  # type: ignore[method-assign]
    exact, accepted = rounds_stay_exact(runner)
    assert max(accepted) >= 1
    assert not exact


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

EXTRAS: list[dict[str, Any]] = [{"temperature": 0.0}, {}, {"top_k": 9, "repetition_penalty": 1.3}, {"top_p": 0.8}]


def requests() -> list[SequenceRequest]:
    return [tiny_request(index=i, max_tokens=12, **extra) for i, extra in enumerate(EXTRAS)]


@pytest.fixture(scope="module")
def plain() -> list[Outcome]:
    torch.set_num_threads(1)
    runner = make()
    make_agreeable(runner)
    runner.drafter = NoDrafter()
    return run(runner, requests())


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
