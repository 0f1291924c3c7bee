"""Bookkeeping of chained MTP modules against a fresh computation (algorithms.md E, J5) and against wrong variants."""

from __future__ import annotations

from typing import Unpack

import pytest
import torch

from paceline.engine.colocated import ColocatedEngine
from paceline.engine.model_runner import ModelRunner, PrefillChunk
from paceline.errors import ConfigError
from paceline.kvcache.layout import LayerOwner
from paceline.layers.linear import Linear
from paceline.models.llama import DecoderLayer, LlamaModel
from paceline.spec_decode.base import DraftBudget, DraftSampling, TreeKind
from paceline.spec_decode.drafters.mtp import MtpDrafter
from paceline.spec_decode.sequence import Sequence
from tests.support.asked import Sampling
from tests.support.pool_rows import write_rows
from tests.support.tiny_model import primary_of, tiny_request, tiny_runner


def prefill(runner: ModelRunner, tokens: list[int], *, steps: int, **params: Unpack[Sampling]) -> Sequence:
    seq = runner.new_sequence(tiny_request(tokens, max_tokens=200, **params))
    seq.table.ensure(seq.num_prefill + 200 + runner.spec_slots)
    for start in range(seq.num_computed, seq.num_prefill, steps):
        runner.prefill([PrefillChunk(seq, start, min(start + steps, seq.num_prefill))])
    return seq


def draft_rows(runner: ModelRunner, seq: Sequence, k: int) -> torch.Tensor:
    """Exact KV rows of module k (1-based): those whose tokens are all committed."""
    layer = runner.kv.layout.layer_range(LayerOwner.DRAFT)[k - 1]
    rows = max(seq.num_computed - k + 1, 0)
    return torch.stack(runner.kv.read(layer, seq.table.slots[:rows].long()))


def make_runner(modules: int, **options: object) -> ModelRunner:
    defaults: dict[str, object] = {
        "drafter": "mtp",
        "prefix_cache": False,
        "mtp_modules": modules,
        "num_draft_tokens": 3,
    }
    return tiny_runner("bf16", **(defaults | options))


@pytest.mark.parametrize("modules", [2, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_draft_kv_after_rounds_equals_a_fresh_prefill(modules: int, temperature: float) -> None:
    """After any number of rounds the draft KV is bit for bit that of a prefill over the committed tokens, and so are
    the proposals and the rows kept for the next round."""
    runner = make_runner(modules)
    seq = prefill(runner, [5, 9, 3, 44, 5, 9, 3, 61], steps=3, temperature=temperature)
    accepted = set()
    for _ in range(12):
        accepted.add(runner.decode([seq])[0].round.num_accepted)
        fresh = prefill(runner, seq.token_ids[:-1], steps=100, temperature=temperature)
        fresh.token_ids[-1] = seq.token_ids[-1]
        assert fresh.token_ids == seq.token_ids
        for k in range(1, modules + 1):
            assert torch.equal(draft_rows(runner, seq, k), draft_rows(runner, fresh, k)), k
        assert seq.draft is not None
        assert fresh.draft is not None
        assert torch.equal(seq.draft.proposal_ids, fresh.draft.proposal_ids)
        assert torch.equal(seq.draft.proposal_probs, fresh.draft.proposal_probs)
        assert torch.equal(seq.draft.hidden, fresh.draft.hidden)
        fresh.table.release()


@pytest.mark.parametrize("modules", [2, 3])
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_chunked_prefill_equals_whole(modules: int, steps: int) -> None:
    """E6: nothing but the known next token crosses a chunk border."""
    runner = make_runner(modules)
    for length in (1, 2, 3, 4, 9):
        tokens = [(13 * i + 5) % 190 + 3 for i in range(length)]
        whole, chunked = prefill(runner, tokens, steps=100), prefill(runner, tokens, steps=steps)
        assert whole.draft is not None
        assert chunked.draft is not None
        assert torch.equal(whole.draft.hidden, chunked.draft.hidden)
        assert torch.equal(whole.draft.proposal_ids, chunked.draft.proposal_ids)
        for k in range(1, modules + 1):
            assert torch.equal(draft_rows(runner, whole, k), draft_rows(runner, chunked, k))


def rounds(runner: ModelRunner) -> list[list[int]]:
    requests = [tiny_request(index=i, temperature=i % 2, max_tokens=40) for i in range(6)]
    return [done.stats.accepted_per_round for done in ColocatedEngine(runner, chunk_tokens=4).generate(requests)]


@pytest.mark.parametrize("modules", [2, 3])
def test_a_drafter_that_knows_the_target_is_always_right(modules: int) -> None:
    """J4: a drafter whose head returns what the target will say has every draft accepted. The target here is a function
    of the token before alone (zeroed blocks), and so is the drafter, which reads its embedding half."""
    runner = make_runner(modules)
    make_markov(runner)
    for accepted in rounds(runner):
        full = accepted[:-1]  # the last round is cut by max_tokens
        assert full
        assert set(full) == {modules}


def make_markov(runner: ModelRunner) -> None:
    """Cut attention and MLP out of target and drafter: what remains predicts from the last token alone."""
    drafter = primary_of(runner)
    assert isinstance(drafter, MtpDrafter)
    model = runner.model
    assert isinstance(model, LlamaModel)
    for layer in model.layers:
        layer.o_proj._packed.zero_()
        layer.down_proj._packed.zero_()
    model.lm_head = Linear(model.embedding.roll(1, 0), out_float32=True)  # token t is followed by t + 1
    hidden = runner.model.spec.hidden_size
    for module in drafter.modules:
        assert isinstance(module.block, DecoderLayer)
        module.block.o_proj._packed.zero_()
        module.block.down_proj._packed.zero_()
        join = torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), dim=1).to(runner.dtype)
        module.eh_proj = Linear(join)  # embedding first: the token passes through


def test_dropping_the_shift_is_noticed() -> None:
    """Mutant of E1: rows built from t_{i+k-1} in place of t_{i+k}. The always-right drafter is then right no more."""
    runner = make_runner(2)
    make_markov(runner)
    drafter = primary_of(runner)
    assert isinstance(drafter, MtpDrafter)
    original = drafter._rows

    def unshifted(item, k, hidden, drafts):  # type: ignore[no-untyped-def]
        rows = original(item, k, hidden, drafts)
        first = rows.first + k - 1
        tokens = item.seq.token_ids[first : first + len(rows.token_ids)]
        return type(rows)(rows.seq, rows.first, tokens, rows.hidden[: len(tokens)])

    drafter._rows = unshifted  # type: ignore[method-assign]
    assert any(set(accepted[:-1]) != {2} for accepted in rounds(runner))


def test_keeping_rows_that_rest_on_drafts_is_noticed() -> None:
    """Mutant of E9: module 2's last row, written from d_1, left in place when t_{m+1} is another token."""
    runner = make_runner(2)
    seq = prefill(runner, [5, 9, 3, 44, 5, 9, 3, 61], steps=100)
    make = runner.drafter.extend

    def keep_first(items):  # type: ignore[no-untyped-def]
        layer = runner.kv.layout.layer_range(LayerOwner.DRAFT)[1]
        slots = [item.seq.table.slots[item.start - 1 : item.start].long() for item in items]
        saved = [runner.kv.read(layer, slot) for slot in slots]
        make(items)
        for slot, rows in zip(slots, saved, strict=True):
            write_rows(runner.kv, layer, slot, *rows)

    runner.drafter.extend = keep_first  # type: ignore[method-assign]
    runner.decode([seq])
    fresh = prefill(runner, seq.token_ids[:-1], steps=100)
    assert not torch.equal(draft_rows(runner, seq, 2), draft_rows(runner, fresh, 2))


def chained(runner: ModelRunner, sampling: DraftSampling = DraftSampling.COUPLED) -> MtpDrafter:
    drafter = primary_of(runner)
    assert isinstance(drafter, MtpDrafter)
    return MtpDrafter(runner.model, drafter.modules, runner.kv, runner.attention, 3, sampling)


def test_trees_are_chains_or_combs() -> None:
    runner = make_runner(3, tree="static", tree_width=3)
    seq = prefill(runner, [5, 9, 3, 44], steps=100)
    drafter = chained(runner)
    chain = drafter.propose([seq], [DraftBudget(3, 3, TreeKind.CHAIN)])[0]
    assert (chain.is_chain, chain.num_draft_tokens, chain.drafter) == (True, 3, "mtp")
    for kind in (TreeKind.STATIC, TreeKind.DYNAMIC):
        comb = drafter.propose([seq], [DraftBudget(3, 3, kind)])[0]
        assert comb.parents == (-1, 0, 0, 0, 1, 1, 1, 4, 4, 4)
    assert drafter.draft_slots(DraftBudget(3, 3)) == 0
    unsure = drafter.propose([seq], [DraftBudget(3, 3, min_confidence=1.01)])[0]
    assert unsure.parents == (-1, 0, 0, 0)
    assert drafter.propose([seq], [DraftBudget(3, 3, min_confidence=1e-9)])[0].num_draft_tokens == 9


def test_confidence_is_asked_of_the_modules_there_are() -> None:
    """A budget deeper than the modules are many."""
    runner = make_runner(2)
    seq = prefill(runner, [5, 9, 3, 44], steps=100, temperature=1.0)
    deep = DraftBudget(6, 1, TreeKind.CHAIN, min_confidence=1e-9)
    assert chained(runner).propose([seq], [deep])[0].num_draft_tokens == 2


def test_greedy_drafts_of_a_sampled_request_are_the_best_of_q() -> None:
    """And coupled ones are not: they follow the target's noise."""
    runner = make_runner(2, tree="static", tree_width=3)
    runner.drafter = chained(runner, DraftSampling.GREEDY)
    greedy = prefill(runner, [5, 9, 3, 44], steps=100, temperature=1.0)
    runner.drafter = chained(runner)
    coupled = prefill(runner, [5, 9, 3, 44], steps=100, temperature=1.0)
    assert greedy.draft is not None
    assert coupled.draft is not None
    assert bool((greedy.draft.proposal_probs.diff(dim=1) <= 0).all())
    assert not torch.equal(greedy.draft.proposal_ids, coupled.draft.proposal_ids)


def test_options_are_checked() -> None:
    runner = make_runner(2)
    with pytest.raises(ConfigError, match="draft_sampling"):
        chained(runner, DraftSampling.SAMPLED)
    drafter = chained(runner)
    with pytest.raises(ConfigError, match="mtp_modules"):
        MtpDrafter(runner.model, drafter.modules[:1], runner.kv, runner.attention, 1)
