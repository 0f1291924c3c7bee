"""Bookkeeping of the MTP drafter against a fresh computation (algorithms.md E, J5) and against wrong variants."""

from __future__ import annotations

import pytest
import torch

from paceline.engine.colocated import ColocatedEngine
from paceline.engine.model_runner import ModelRunner, PrefillChunk
from paceline.kvcache.layout import LayerOwner
from paceline.layers.linear import Linear
from paceline.models.llama import LlamaModel
from paceline.spec_decode.drafters.mtp import MtpDrafter
from paceline.spec_decode.sequence import Sequence
from support.tiny import tiny_request, tiny_runner


def prefill(runner: ModelRunner, tokens: list[int], *, steps: int, **params: object) -> Sequence:
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
    defaults: dict[str, object] = {"dtype": "bf16", "drafter": "mtp", "prefix_cache": False}
    return tiny_runner(**(defaults | {"mtp_modules": modules, "num_draft_tokens": 3} | options))  # type: ignore[arg-type]


@pytest.mark.parametrize("modules", [1, 2, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_draft_kv_after_rounds_equals_a_fresh_prefill(modules: int, temperature: float) -> None:
    """After any number of rounds the draft KV is bit for bit that of a prefill over the committed tokens, and so are
    the proposals and the rows kept for the next round."""
    runner = make_runner(modules)
    seq = prefill(runner, [5, 9, 3, 44, 5, 9, 3, 61], steps=3, temperature=temperature)
    accepted = set()
    for _ in range(12):
        accepted.add(runner.decode([seq])[0].num_accepted)
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


@pytest.mark.parametrize("modules", [1, 3])
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


@pytest.mark.parametrize("modules", [1, 2, 3])
def test_a_drafter_that_knows_the_target_is_always_right(modules: int) -> None:
    """J4: a drafter whose head returns what the target will say has every draft accepted. The target here is a function
    of the token before alone (zeroed blocks), and so is the drafter, which reads its embedding half."""
    runner = make_runner(modules)
    make_markov(runner)
    for accepted in rounds(runner):
        full = accepted[:-1]  # the last round is cut by max_tokens
        assert full
        assert set(full) == {modules if modules > 1 else 3}


def make_markov(runner: ModelRunner) -> None:
    """Cut attention and MLP out of target and drafter: what remains predicts from the last token alone."""
    drafter = runner.drafter
    assert isinstance(drafter, MtpDrafter)
    for layer in runner.model.layers:  # type: ignore[attr-defined]
        layer.o_proj._packed.zero_()
        layer.down_proj._packed.zero_()
    model = runner.model
    assert isinstance(model, LlamaModel)
    model.lm_head = Linear(model.embedding.roll(1, 0), out_float32=True)  # token t is followed by t + 1
    hidden = runner.hidden_size
    for module in drafter.modules:
        module.block.o_proj._packed.zero_()
        module.block.down_proj._packed.zero_()
        join = torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), dim=1).to(runner.dtype)
        module.eh_proj = type(module.eh_proj)(join)  # embedding first: the token passes through


def test_dropping_the_shift_is_noticed() -> None:
    """Mutant of E1: rows built from t_i in place of t_{i+1}. The always-right drafter is then right no more."""
    runner = make_runner(1)
    make_markov(runner)
    drafter = runner.drafter
    assert isinstance(drafter, MtpDrafter)
    original = drafter._rows

    def unshifted(item, k, hidden, drafts):  # type: ignore[no-untyped-def]
        rows = original(item, k, hidden, drafts)
        tokens = item.seq.token_ids[rows.first : rows.first + len(rows.token_ids)]
        return type(rows)(rows.seq, rows.first, tokens, rows.hidden)

    drafter._rows = unshifted  # type: ignore[method-assign]
    assert any(set(accepted[:-1]) != {3} for accepted in rounds(runner))


def test_keeping_rows_of_approximated_hidden_states_is_noticed() -> None:
    """Mutant of E3: draft rows left as the draft steps wrote them, instead of rewritten with true hidden rows."""
    runner = make_runner(1)
    seq = prefill(runner, [5, 9, 3, 44, 5, 9, 3, 61], steps=100)
    make = runner.drafter.extend

    def keep_first(items):  # type: ignore[no-untyped-def]
        saved = [draft_rows(runner, i.seq, 1)[:, i.start : i.start + 1] for i in items if i.end - i.start > 1]
        make(items)
        for item, rows in zip([i for i in items if i.end - i.start > 1], saved, strict=True):
            layer = runner.kv.layout.layer_range(LayerOwner.DRAFT)[0]
            runner.kv.write(layer, item.seq.table.slots[item.start : item.start + 1].long(), *rows)

    make_agreeable(runner)
    runner.drafter.extend = keep_first  # type: ignore[method-assign]
    differs = False
    for _ in range(8):
        runner.decode([seq])
        fresh = prefill(runner, seq.token_ids[:-1], steps=100)
        differs |= not torch.equal(draft_rows(runner, seq, 1), draft_rows(runner, fresh, 1))
        fresh.table.release()
    assert differs


def make_agreeable(runner: ModelRunner) -> None:
    """Let the join take the embedding mostly, so that some drafts are accepted."""
    drafter = runner.drafter
    assert isinstance(drafter, MtpDrafter)
    hidden = runner.hidden_size
    for layer in runner.model.layers:  # type: ignore[attr-defined]
        layer.o_proj._packed.mul_(0.02)
        layer.down_proj._packed.mul_(0.02)
    for module in drafter.modules:
        module.block.o_proj._packed.mul_(0.02)
        module.block.down_proj._packed.mul_(0.02)
        join = torch.cat((torch.eye(hidden), 0.01 * torch.eye(hidden)), dim=1).to(runner.dtype)
        module.eh_proj = type(module.eh_proj)(join)
