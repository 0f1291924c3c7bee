"""Rows to tokens: independence of rows, history per node, the coupled draft proposal."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from paceline.request import SamplingParams
from paceline.sampling.params import process
from paceline.sampling.race import race_reference
from paceline.sampling.sampler import RowContext, perturbed_topk, sample_rows

GREEDY = SamplingParams(temperature=0.0)
VARIANTS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 1.5},
    {"top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"top_k": 9, "top_p": 0.9, "temperature": 0.5},
    {"repetition_penalty": 1.5},
    {"temperature": 0.0, "frequency_penalty": 1.0, "presence_penalty": 0.5},
    {"logit_bias": {3: 4.0}, "top_p": 0.8},
    {"min_tokens": 9, "stop_token_ids": (0, 1, 2, 3)},
    {"temperature": 0.0, "min_tokens": 9, "stop_token_ids": (0, 1, 2, 3)},
]


def random_logits(rows: int, vocab_size: int, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def context(position: int = 5, path: tuple[int, ...] = (), **params: Any) -> RowContext:
    return RowContext(SamplingParams(**{"seed": 11, **params}), position, [1, 2, 3], [4, 4], path)


def mixed_rows(count: int) -> list[RowContext]:
    return [
        context(position=i, path=(i % 7,) * (i % 3), seed=i % 5, **VARIANTS[i % len(VARIANTS)]) for i in range(count)
    ]


@pytest.mark.parametrize("vocab_size", [20, 6000])
def test_a_row_does_not_depend_on_its_companions(vocab_size: int) -> None:
    rows = mixed_rows(60)
    logits = random_logits(60, vocab_size)
    together = sample_rows(logits, rows)
    assert together == [sample_rows(logits[i : i + 1], rows[i : i + 1])[0] for i in range(60)]
    order = torch.randperm(60, generator=torch.Generator().manual_seed(1)).tolist()
    assert sample_rows(logits[order], [rows[i] for i in order]) == [together[i] for i in order]


@pytest.mark.parametrize("vocab_size", [20, 6000])
def test_tokens_are_the_race_over_the_processed_distribution(vocab_size: int) -> None:
    """sample_rows goes over candidate lists and unnormalised scores; the definition goes over ``process``."""
    rows = mixed_rows(60)
    logits = random_logits(60, vocab_size, seed=2)
    for token, values, row in zip(sample_rows(logits, rows), logits, rows, strict=True):
        log_probs = process(
            values, row.params, row.prompt_token_ids, [*row.output_token_ids, *row.path_token_ids]
        ).unsqueeze(0)
        expected = race_reference(log_probs, [1.0], [row.params.seed or 0], [row.position])
        assert token == int(expected)


def test_greedy_ties_take_the_lowest_id() -> None:
    logits = torch.zeros(2, 5000)
    logits[1, [17, 4000]] = 1.0
    row = RowContext(GREEDY, 0, [], [], ())
    assert sample_rows(logits, [row, row]) == [0, 17]


def test_greedy_ignores_seed_and_truncation() -> None:
    logits = random_logits(1, 50)
    best = int(logits.argmax())
    row = RowContext(SamplingParams(temperature=0.0, top_p=0.01, top_k=3, min_p=1.0), 3, [], [], ())
    assert sample_rows(logits, [row]) == [best]


def test_the_key_is_seed_and_position() -> None:
    logits = torch.zeros(1, 1000)
    rows = [context(seed=s, position=p) for s in range(20) for p in range(20)]
    tokens = sample_rows(logits.expand(400, -1), rows)
    assert tokens == sample_rows(logits.expand(400, -1), rows)
    assert len(set(tokens)) > 250  # of 1000 values, 400 draws hit 330 in the mean


def test_penalties_see_the_path_of_the_node() -> None:
    """algorithms.md B4, J9: an accepted draft token counts as output for the nodes below it, and for them alone."""
    logits = torch.tensor([[1.0, 0.9, 0.0]])
    params = SamplingParams(temperature=0.0, presence_penalty=0.5)
    rows = [RowContext(params, 3, [0], [], path) for path in ((), (0,), (1,), (0, 1))]
    assert sample_rows(logits.expand(4, -1), rows) == [0, 1, 0, 0]


def test_min_tokens_counts_the_path() -> None:
    logits = torch.tensor([[0.0, 1.0]])
    params = SamplingParams(temperature=0.0, min_tokens=3, stop_token_ids=(1,))
    rows = [RowContext(params, 3, [0], [0], path) for path in ((), (0,), (0, 0))]
    assert sample_rows(logits.expand(3, -1), rows) == [0, 0, 1]


def test_history_is_not_read_without_penalties() -> None:
    class Untouchable(list[int]):
        def __iter__(self) -> Any:
            raise AssertionError("history was walked")

        __getitem__ = __iter__  # type: ignore[assignment]

    history = Untouchable([1] * 10)
    params = SamplingParams(seed=1, logit_bias={0: 1.0}, min_tokens=99, stop_token_ids=(1,), top_p=0.9)
    sample_rows(random_logits(1, 8), [RowContext(params, 0, history, history, ())])
    with pytest.raises(AssertionError, match="walked"):
        sample_rows(random_logits(1, 8), [RowContext(replace(params, presence_penalty=1.0), 0, history, history, ())])


def test_logits_are_left_alone() -> None:
    logits = random_logits(12, 20)
    before = logits.clone()
    sample_rows(logits, mixed_rows(12))
    assert torch.equal(logits, before)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_do_not_become_text(poison: float, temperature: float) -> None:
    logits = random_logits(3, 10)
    logits[1, 4] = poison
    rows = [context(position=p, temperature=temperature) for p in (7, 8, 9)]
    with pytest.raises(FloatingPointError, match=r"row 1 \(position 8\)"):
        sample_rows(logits, rows)


def test_a_fully_masked_row_is_an_error() -> None:
    with pytest.raises(FloatingPointError, match="row 0"):
        sample_rows(torch.full((1, 4), -math.inf), [context()])


def test_bad_calls() -> None:
    assert sample_rows(torch.zeros(0, 4), []) == []
    with pytest.raises(ValueError, match="2 rows of logits for 1"):
        sample_rows(torch.zeros(2, 4), [context()])
    with pytest.raises(ValueError, match="seed"):
        sample_rows(torch.zeros(1, 4), [context(seed=None)])
    with pytest.raises(ValueError, match="number of rows"):
        perturbed_topk(torch.zeros(2, 4), [GREEDY], [0, 1], 1)


@pytest.mark.parametrize("vocab_size", [12, 6000])
@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 1.5])
def test_a_drafter_equal_to_the_target_is_always_right(vocab_size: int, temperature: float) -> None:
    count = 100
    logits = random_logits(count, vocab_size).round()  # ties, so that the rules on them must agree too
    rows = [context(position=i, seed=i // 2, temperature=temperature) for i in range(count)]
    for width in (1, 3):
        ids, _ = perturbed_topk(logits, [r.params for r in rows], [r.position for r in rows], width)
        assert ids[:, 0].tolist() == sample_rows(logits, rows)


def test_coupling_raises_acceptance() -> None:
    """A drafter near the target at temperature 1: coupled proposals hit more often than the likeliest tokens."""
    count = 2000
    target = random_logits(count, 64, seed=3)
    draft = target + 0.3 * random_logits(count, 64, seed=4, scale=1.0)
    rows = [context(position=i, seed=i) for i in range(count)]
    tokens = torch.tensor(sample_rows(target, rows))
    params, positions = [r.params for r in rows], [r.position for r in rows]
    hits = {
        coupled: int((perturbed_topk(draft, params, positions, 1, coupled=coupled)[0][:, 0] == tokens).sum())
        for coupled in (True, False)
    }
    assert hits[True] > 1.5 * hits[False]


def test_reduced_vocabulary_is_keyed_by_target_id() -> None:
    """The drafter knows every third token; where the target picks one of those, an exact drafter proposes it."""
    count, vocab_size = 200, 90
    token_map = torch.arange(0, vocab_size, 3)
    target = random_logits(count, vocab_size, seed=5)
    rows = [context(position=i, seed=i) for i in range(count)]
    ids, probs = perturbed_topk(
        target[:, token_map], [r.params for r in rows], [r.position for r in rows], 2, token_map=token_map
    )
    known = [i for i, token in enumerate(sample_rows(target, rows)) if token % 3 == 0]
    assert len(known) > 40
    assert ids[known, 0].tolist() == [sample_rows(target, rows)[i] for i in known]
    q = torch.softmax(target[:, token_map], dim=1)
    torch.testing.assert_close(probs, q.gather(1, ids // 3))


def test_proposals_of_mixed_rows_and_their_probabilities() -> None:
    logits = random_logits(4, 40, seed=6)
    temperatures = [0.0, 0.5, 0.0, 2.0]
    params = [SamplingParams(temperature=t, seed=1) for t in temperatures]
    ids, probs = perturbed_topk(logits, params, [3, 3, 4, 4], 4)
    assert ids.dtype == torch.int64
    assert probs.dtype == torch.float32
    for i, temperature in enumerate(temperatures):
        q = torch.softmax(logits[i] / (temperature or 1.0), dim=0)
        torch.testing.assert_close(probs[i], q[ids[i]])
        alone = perturbed_topk(logits[i : i + 1], [params[i]], [[3, 3, 4, 4][i]], 4)
        assert torch.equal(ids[i], alone[0][0])
        if temperature == 0.0:
            assert ids[i].tolist() == logits[i].topk(4).indices.tolist()
    uncoupled, _ = perturbed_topk(logits, params, [3, 3, 4, 4], 4, coupled=False)
    assert uncoupled.tolist() == logits.topk(4).indices.tolist()
