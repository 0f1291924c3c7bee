"""The feature drafter's state against a fresh prefill, and against wrong variants (algorithms.md D, E, J5)."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

import pytest
import torch

from paceline.engine.model_runner import PrefillChunk
from paceline.spec_decode.base import ExtendItem
from paceline.spec_decode.drafters import feature
from tests.support.feature_drafting import (
    BUDGETS,
    COUPLED,
    GREEDY,
    PROMPT,
    draft_kv,
    make,
    make_agreeable,
    prefill,
    rounds_stay_exact,
    state_is_exact,
)
from tests.support.needs import needs_kernels
from tests.support.tiny_model import tiny_request


@needs_kernels
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


@pytest.mark.parametrize("left_out", [-1000, 1000])
def test_it_is_so_whichever_outputs_are_left_out(left_out: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature, "WORTH_LEAVING_OUT", left_out)
    exact, accepted = rounds_stay_exact(make("bf16", "chain", sampling=GREEDY), temperature=0.0)
    assert exact
    assert accepted


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


def test_prompts_that_end_together_keep_one_row_each() -> None:
    """A hand-off sends all of ``hidden``."""
    runner = make()
    seqs = [runner.new_sequence(tiny_request(PROMPT[: 6 + i], index=i, max_tokens=8)) for i in range(3)]
    for seq in seqs:
        seq.table.ensure(40)
    runner.prefill([PrefillChunk(seq, 0, seq.num_prefill) for seq in seqs])
    for i, seq in enumerate(seqs):
        alone = prefill(runner, PROMPT[: 6 + i], index=i)
        assert seq.draft is not None
        assert alone.draft is not None
        assert seq.draft.hidden.shape == (1, runner.drafter.state_width)
        assert torch.equal(seq.draft.hidden, alone.draft.hidden)
        assert torch.equal(seq.draft.proposal_ids, alone.draft.proposal_ids)


def test_rows_found_in_the_prefix_cache_are_kept() -> None:
    runner = make(prefix_cache=True, page_size=4)
    prompt = [*range(3, 20)]
    runner.release(prefill(runner, prompt))
    seq = prefill(runner, prompt)
    assert seq.cached_tokens >= 12
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
        for item in items if decode else ():
            item.seq.draft_rows = item.end - 1  # claims the others, else it would be left out
        extend([replace(i, start=i.end - 1, hidden=i.hidden[-1:]) if decode else i for i in items])

    runner.drafter.extend = last_only  # type: ignore[method-assign]
    exact, accepted = rounds_stay_exact(runner)
    assert max(accepted) >= 1
    assert not exact
