"""Several drafters behind one: order, routing, unions of what they need, and the same text as ever."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

import pytest
import torch

from paceline.engine.model_runner import ModelRunner, PrefillChunk
from paceline.errors import ConfigError
from paceline.kvcache.layout import LayerOwner
from paceline.request import SequenceRequest, SpeculationParams
from paceline.spec_decode.base import DraftBudget, Drafter, ExtendItem
from paceline.spec_decode.drafters.auto import AutoChooser
from paceline.spec_decode.drafters.ngram import NgramDrafter
from paceline.spec_decode.drafters.none import NoDrafter
from paceline.spec_decode.drafters.select import MAX_HELD_ROWS, Held, SelectingDrafter
from paceline.spec_decode.length.adaptive import LengthPolicy
from paceline.spec_decode.length.cost import CostTable
from paceline.spec_decode.sequence import DraftState, Sequence
from paceline.spec_decode.trees.tree import DraftTree
from tests.support.exactness import Outcome, run
from tests.support.needs import needs_kernels
from tests.support.simulated_rounds import bare_sequence, chain_tree
from tests.support.tiny_model import VOCAB, tiny_request, tiny_runner


class Recording(Drafter):
    """Chains of as many tokens as allowed (or none, for the sequences in ``silent``); notes every call."""

    def __init__(self, name: str, silent: Seq[int] = (), **attributes: object) -> None:
        self.name, self.silent = name, set(silent)
        self.calls: list[tuple[str, list[str]]] = []
        for key, value in attributes.items():
            setattr(self, key, value)

    def note(self, what: str, seqs: Seq[Sequence]) -> None:
        self.calls.append((what, [seq.request.request_id for seq in seqs]))

    def extend(self, items: Seq[ExtendItem]) -> None:
        self.note("extend", [item.seq for item in items])
        for item in items:
            item.seq.draft_rows = item.end

    def propose(self, seqs: Seq[Sequence], budgets: Seq[DraftBudget]) -> list[DraftTree]:
        self.note("propose", seqs)
        return [
            chain_tree(seq, 0 if int(seq.request.request_id[1:]) in self.silent else budget.num_draft_tokens)
            for seq, budget in zip(seqs, budgets, strict=True)
        ]

    def draft_slots(self, budget: DraftBudget) -> int:
        return budget.max_nodes + len(self.name)

    def observe(self, seq: Sequence, tree: DraftTree, argmax: Seq[int]) -> None:
        self.note("observe", [seq])

    def finish(self, seq: Sequence) -> None:
        self.note("finish", [seq])


def chooser(primary: str = "head", copies: Seq[str] = ("copy",)) -> AutoChooser:
    return AutoChooser(CostTable.assumed(0.01), primary, copies)


def parts(silent: Seq[int] = ()) -> tuple[Recording, Recording, SelectingDrafter]:
    head = Recording("head", needs_extend=True, lookahead=2, state_width=64)
    copy = Recording("copy", silent)
    return head, copy, SelectingDrafter(head, {"copy": copy}, "head", chooser())


def test_results_come_back_in_order() -> None:
    head, copy, both = parts()
    asked = ["copy", "head", None, "none", "copy", "unknown"]
    seqs = [bare_sequence(i, drafter=name) for i, name in enumerate(asked)]
    trees = both.propose(seqs, [DraftBudget(i + 1) for i in range(6)])
    assert [tree.drafter for tree in trees] == ["copy", "head", "head", "none", "copy", "head"]
    assert [tree.num_draft_tokens for tree in trees] == [1, 2, 3, 0, 5, 6]
    assert head.calls == [("propose", ["r1", "r2", "r5"])]
    assert copy.calls == [("propose", ["r0", "r4"])]
    assert both.propose([], []) == []


def test_extend_skips_those_that_never_use_it() -> None:
    head, copy, both = parts()
    seqs = [bare_sequence(i, drafter=name) for i, name in enumerate(["copy", "head", "auto", "none", None])]
    both.extend([ExtendItem(seq, 0, 3, torch.zeros(3, 4), True) for seq in seqs])
    assert head.calls == [("extend", ["r1", "r2", "r4"])]
    assert copy.calls == []  # it needs no rows
    assert [seq.draft_rows for seq in seqs] == [0, 3, 3, 0, 3]
    copying = Recording("copy", needs_extend=True)
    SelectingDrafter(NoDrafter(), {"copy": copying}, "copy").extend(
        [ExtendItem(seq, 0, 3, torch.zeros(3, 4), True) for seq in seqs[:2]]
    )
    assert copying.calls == [("extend", ["r0", "r1"])]  # r1 asked for one that is not here: the default


def decoded(seq: Sequence, num_rows: int) -> ExtendItem:
    """The next rows of a sequence that decodes, each with its number in it."""
    seq.token_ids += range(3, 3 + num_rows)
    start = max([seq.num_prefill, *(item.end for item in Held.of(seq).items), seq.draft_rows])
    rows = torch.arange(start, start + num_rows, dtype=torch.float32)[:, None].repeat(1, 4)
    return ExtendItem(seq, start, start + num_rows, rows, final=True)


class Digesting(Recording):
    """Notes the rows that it is given."""

    def extend(self, items: Seq[ExtendItem]) -> None:
        for item in items:
            assert item.hidden[:, 0].tolist() == list(range(item.start, item.end))
            assert item.start < item.seq.num_prefill or item.start == max(item.seq.draft_rows, item.seq.num_prefill)
        super().extend(items)


def held_back(silent: Seq[int] = (), **attributes: object) -> tuple[Digesting, SelectingDrafter, Sequence]:
    """A sequence whose tokens repeat, handed over with its draft state: a copy is the best arm."""
    head = Digesting("head", (), needs_extend=True, state_width=64, **attributes)
    both = SelectingDrafter(head, {"copy": Recording("copy", silent)}, "head", chooser())
    seq = bare_sequence(prompt=[*range(10, 30), *range(10, 24)], drafter="auto")
    seq.draft = DraftState(torch.zeros(1, 2), torch.zeros(1, 2), torch.zeros(1, 64))
    return head, both, seq


def test_rows_wait_until_the_primary_is_to_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AutoChooser, "_trial", lambda *_: None)
    head, both, seq = held_back()
    for rows in (1, 3, 2):
        item = decoded(seq, rows)
        both.extend([item])
        item.hidden.zero_()  # its memory is the next round's
    assert head.calls == []
    plan = (("copy", DraftBudget(2)), ("head", DraftBudget(3)))
    monkeypatch.setattr(both, "_plans", lambda seqs, budgets: [plan])
    both.propose([seq], [DraftBudget(4)])
    assert head.calls == []
    monkeypatch.setattr(both, "_plans", lambda seqs, budgets: [plan[1:]])
    both.propose([seq], [DraftBudget(4)])
    assert head.calls == [("extend", ["r0"]), ("propose", ["r0"])]
    assert seq.draft_rows == seq.num_prefill + 6
    both.propose([seq], [DraftBudget(4)])
    assert head.calls[2:] == [("propose", ["r0"])]  # nothing is digested twice


def test_a_copy_that_finds_nothing_lets_the_primary_digest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    head, both, seq = held_back(silent=[0])
    both.extend([decoded(seq, 2)])
    plan = (("copy", DraftBudget(2)), ("head", DraftBudget(3)))
    monkeypatch.setattr(both, "_plans", lambda seqs, budgets: [plan])
    both.propose([seq], [DraftBudget(4)])
    assert head.calls == [("extend", ["r0"]), ("propose", ["r0"])]


def test_held_rows_are_bounded_and_settled_at_the_end() -> None:
    head, both, seq = held_back(kv_layers=("rows",))
    for _ in range(MAX_HELD_ROWS):
        both.extend([decoded(seq, 1)])
    assert head.calls == []
    both.extend([decoded(seq, 1)])
    assert head.calls == [("extend", ["r0"])]
    assert seq.draft_rows == seq.num_prefill + MAX_HELD_ROWS + 1
    both.extend([decoded(seq, 1)])
    both.finish(seq)  # its pages go to the prefix cache: all of their rows are exact
    assert seq.draft_rows == seq.num_prefill + MAX_HELD_ROWS + 2
    assert Held.of(seq).items == []


def test_a_primary_without_kv_digests_nothing_for_a_sequence_that_ends() -> None:
    head, both, seq = held_back()
    both.extend([decoded(seq, 1)])
    both.finish(seq)
    assert [what for what, _ in head.calls] == ["finish"]


def test_where_lengths_go_down_to_0_plain_steps_do_not_pay_for_the_primary() -> None:
    head = Digesting("head", (), needs_extend=True, state_width=64)
    both = SelectingDrafter(head, {}, "head", patient=True)
    seqs = [bare_sequence(i) for i in range(2)]
    for seq in seqs:
        seq.draft = DraftState(torch.zeros(1, 2), torch.zeros(1, 2), torch.zeros(1, 64))
    for _ in range(3):
        both.extend([decoded(seq, 1) for seq in seqs])
        both.propose(seqs, [DraftBudget(0), DraftBudget(0)])
    assert [what for what, _ in head.calls] == ["propose"] * 3
    both.propose(seqs, [DraftBudget(0), DraftBudget(2)])
    assert head.calls[3:] == [("extend", ["r1"]), ("propose", ["r0", "r1"])]
    assert seqs[1].draft_rows == seqs[1].num_prefill + 3
    both.propose_unread(seqs, [DraftBudget(1), DraftBudget(1)])
    assert head.calls[5] == ("extend", ["r0"])


def test_prompts_and_those_that_name_the_primary_are_digested_at_once() -> None:
    head, both, seq = held_back()
    both.extend([ExtendItem(seq, 0, 2, torch.arange(2.0)[:, None].expand(-1, 4), final=False)])
    named = bare_sequence(1, drafter="head")
    named.draft = seq.draft
    named.draft_rows = named.num_prefill
    both.extend([decoded(named, 1)])
    assert [seqs for _, seqs in head.calls] == [["r0"], ["r1"]]


def test_observe_and_finish_go_where_they_belong() -> None:
    head = Recording("head")
    copy = Recording("copy", needs_argmax=True)
    both = SelectingDrafter(head, {"copy": copy}, "head", chooser())
    assert both.needs_argmax
    seq = bare_sequence(drafter="copy")
    both.observe(seq, chain_tree(seq, 2, "copy"), [1, 2, 3])
    both.observe(seq, chain_tree(seq, 2, "head"), [1, 2, 3])
    both.finish(seq)
    both.finish(bare_sequence(1, drafter="auto"))
    assert copy.calls == [("observe", ["r0"]), ("finish", ["r0"]), ("finish", ["r1"])]
    assert head.calls == [("finish", ["r1"])]


def repeating(index: int, drafter: str | None = "auto") -> Sequence:
    """A sequence that ends as it went before, so that a copy is worth trying."""
    seq = bare_sequence(index, [*range(10, 30), *range(10, 20)], drafter)
    seq.token_ids[-1] = 20
    seq.draft = DraftState(torch.zeros(1, 2), torch.zeros(1, 2), torch.zeros(1, 64))
    return seq


def test_where_a_copy_finds_nothing_the_primary_drafts_in_the_same_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """And all of the primary's sequences in one call, so that they share its draft steps."""
    monkeypatch.setattr(AutoChooser, "_trial", lambda *_: None)
    head, copy, both = parts(silent=[1])
    seqs = [repeating(0), repeating(1), bare_sequence(2, drafter="head")]
    trees = both.propose(seqs, [DraftBudget(4)] * 3)
    assert [tree.drafter for tree in trees] == ["copy", "head", "head"]
    assert copy.calls == [("propose", ["r0", "r1"])]
    assert head.calls == [("propose", ["r1", "r2"])]


def test_auto_asks_a_primary_that_keeps_state_only_when_it_is_there() -> None:
    stateful = parts()[2]
    model = SelectingDrafter(Recording("head", needs_extend=True), {"copy": Recording("copy")}, "head", chooser())
    asked = [both.propose([bare_sequence(0, drafter="auto")], [DraftBudget(4)])[0] for both in (stateful, model)]
    assert [tree.drafter for tree in asked] == ["none", "head"]  # a draft model keeps tokens and KV alone


def test_unions() -> None:
    head, _, both = parts()
    assert (both.name, both.lookahead, both.needs_extend, both.needs_argmax) == ("head", 2, True, False)
    assert (both.state_width, both.kv_layers, both.aux_layers) == (64, (), ())
    budget = DraftBudget(3)
    assert both.draft_slots(budget) == head.draft_slots(budget)
    assert (
        SelectingDrafter(Recording("h"), {"a longer name": Recording("a longer name")}, "h").draft_slots(budget) == 17
    )
    assert both.choices == ("head", "copy", "none", "auto")


@pytest.mark.parametrize(
    "attributes", [{"lookahead": 1}, {"state_width": 8}, {"aux_layers": (1,)}, {"kv_layers": (1,)}]
)
def test_only_the_primary_may_keep_state(attributes: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="only the primary"):
        SelectingDrafter(NoDrafter(), {"copy": Recording("copy", (), **attributes)}, "copy")


def test_wrong_wiring_is_refused() -> None:
    with pytest.raises(ConfigError, match="given twice"):
        SelectingDrafter(Recording("head"), {"head": Recording("head")}, "head")
    with pytest.raises(ConfigError, match="head, none"):
        SelectingDrafter(Recording("head"), {}, "auto")
    with pytest.raises(ConfigError, match="copy, which"):
        SelectingDrafter(Recording("head"), {}, "auto", chooser())
    with pytest.raises(ConfigError, match="for the primary"):
        SelectingDrafter(NoDrafter(), {"head": Recording("head"), "copy": Recording("copy")}, "auto", chooser())


def test_copies_alone_are_asked_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A primary without draft steps is one copy among others."""
    monkeypatch.setattr(AutoChooser, "_trial", lambda *_: None)
    first, second = Recording("first", silent=[0]), Recording("second")
    both = SelectingDrafter(first, {"second": second}, "auto", chooser("none", ["first", "second"]))
    trees = both.propose([repeating(0), repeating(1)], [DraftBudget(4)] * 2)
    assert [tree.drafter for tree in trees] == ["second", "first"]


# ---- with a real runner


def mixed(choices: Seq[str | None]) -> list[SequenceRequest]:
    """Greedy and sampled requests, each with its drafter."""
    return [
        replace(
            tiny_request(index=i, max_tokens=40, temperature=(i % 3) / 2), speculation=SpeculationParams(drafter=choice)
        )
        for i, choice in enumerate(choices)
    ]


def plain(requests: Seq[SequenceRequest]) -> list[Outcome]:
    return run(tiny_runner("bf16", drafter="none", prefix_cache=False), requests)


def same(got: Seq[Outcome], expected: Seq[Outcome]) -> bool:
    return [(o.token_ids, o.logit_bits) for o in got] == [(o.token_ids, o.logit_bits) for o in expected]


def test_ngram_and_none_in_one_batch() -> None:
    requests = mixed(["ngram", "none", None, "ngram", "nonsense", "none"])
    runner = tiny_runner("bf16", drafter="none", num_draft_tokens=4)
    runner.drafter = SelectingDrafter(NoDrafter(), {"ngram": NgramDrafter(VOCAB)}, "ngram")
    got = run(runner, requests, batch=6)
    assert same(got, plain(requests))
    assert sum(sum(got[i].accepted_per_round) for i in (0, 2, 3, 4)) > 0
    assert sum(got[1].accepted_per_round) == sum(got[5].accepted_per_round) == 0


def selecting_mtp(width: int) -> ModelRunner:
    """MTP, n-gram, none and auto over one tiny model."""
    runner = tiny_runner("bf16", drafter="mtp", num_draft_tokens=4, tree="static", tree_width=width)
    others = {"ngram": NgramDrafter(VOCAB)}
    runner.drafter = SelectingDrafter(runner.drafter, others, "auto", chooser("mtp", ["ngram"]))
    return runner


@needs_kernels
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("width", [1, 3])
def test_a_batch_of_mixed_drafters_gives_the_same_text(batch: int, width: int) -> None:
    requests = mixed(["auto", "mtp", "ngram", "none", None, "auto", "mtp", "ngram"])
    runner = selecting_mtp(width)
    expected = plain(requests)
    assert same(run(runner, requests, batch=batch, chunk_tokens=5), expected)
    assert same(run(runner, requests, batch=batch), expected)  # from the prefix cache


def test_requests_with_their_own_drafter_are_as_if_alone() -> None:
    """The MTP rounds of a mixed batch accept what they accept without the others (J6)."""
    requests = mixed(["mtp", "ngram", "mtp", "none"])
    alone = run(tiny_runner("bf16", drafter="mtp", num_draft_tokens=4, tree_width=1), requests)
    together = run(selecting_mtp(1), requests, batch=4)
    assert [o.accepted_per_round for o in together[::2]] == [o.accepted_per_round for o in alone[::2]]


def test_draft_rows_of_a_skipped_sequence_stay_behind() -> None:
    runner = selecting_mtp(1)
    assert runner.kv.layout.layer_range(LayerOwner.DRAFT)
    rows = {}
    for request in mixed(["mtp", "none"]):
        seq = runner.new_sequence(request)
        seq.table.ensure(seq.num_prefill + 64)
        runner.prefill([PrefillChunk(seq, 0, seq.num_prefill)])
        runner.decode([seq])
        rows[request.speculation.drafter] = (seq.num_computed - seq.draft_rows, seq.draft is None)
        runner.release(seq)
    assert rows["mtp"] == (0, False)
    assert rows["none"][0] > 0
    assert rows["none"][1]
    assert runner.allocator.check_integrity() == []


class Scheduled(LengthPolicy):
    """Plain steps, and every fourth round a draft."""

    def _decide(self, seqs: Seq[Sequence], caps: Seq[DraftBudget]) -> list[DraftBudget]:
        drafts = [seq.stats.rounds % 4 == 3 for seq in seqs]
        return [cap if d else replace(cap, num_draft_tokens=0) for cap, d in zip(caps, drafts, strict=True)]


@pytest.mark.parametrize("modules", [1, 2])
def test_rows_digested_late_and_together_are_those_digested_round_by_round(modules: int) -> None:
    """The same rounds, the same draft KV bit for bit, and as much of it for the prefix cache."""
    found = []
    for adaptive in ("off", "goodput"):
        runner = tiny_runner("bf16", drafter="mtp", mtp_modules=modules, num_draft_tokens=3, adaptive=adaptive)
        runner.policy = Scheduled()
        seq = runner.new_sequence(tiny_request(max_tokens=60))
        seq.table.ensure(seq.num_prefill + 128)
        runner.prefill([PrefillChunk(seq, 0, seq.num_prefill)])
        behind = 0
        for _ in range(14):
            runner.decode([seq])
            behind = max(behind, seq.num_computed - seq.draft_rows)
        runner.drafter.finish(seq)
        assert seq.draft_rows == seq.num_computed
        layers = runner.kv.layout.layer_range(LayerOwner.DRAFT)
        rows = runner.kv.gather(layers, torch.tensor(list(seq.table.slots[: seq.draft_rows])))
        runner.release(seq)
        assert runner.prefix is not None
        found.append((seq.stats.accepted_per_round, rows.view(torch.uint8).tolist(), runner.prefix.num_pages))
        assert (behind > 0) == (adaptive == "goodput")
    assert found[0] == found[1]
