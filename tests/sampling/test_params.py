"""Processing against a straightforward reference in plain Python."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.request import SamplingParams
from paceline.sampling.params import adjust, needs_adjust, needs_truncate, process, truncate


def reference(
    logits: Sequence[float], params: SamplingParams, prompt: Sequence[int], output: Sequence[int]
) -> list[float]:
    """Probabilities, token by token, in the documented order."""
    values = [np.float32(x) for x in logits]
    for token, bias in params.logit_bias.items():
        values[token] += np.float32(bias)
    for token in set(prompt) | set(output):
        penalty = np.float32(params.repetition_penalty)
        values[token] = values[token] / penalty if values[token] > 0 else values[token] * penalty
    for token in set(output):
        values[token] -= np.float32(params.frequency_penalty * output.count(token) + params.presence_penalty)
    if len(output) < params.min_tokens:
        for token in params.stop_token_ids:
            values[token] = np.float32(-math.inf)
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    if params.temperature == 0:
        return [float(i == order[0]) for i in range(len(values))]
    top = float(values[order[0]])
    weights = [math.exp((float(v) - top) / params.temperature) for v in values]
    kept = order[: params.top_k] if params.top_k else order
    total, before = math.fsum(weights[i] for i in kept), 0.0
    nucleus: list[int] = []
    for i in kept:
        if before < params.top_p - 1e-9 or not nucleus or params.top_p == 1:
            nucleus.append(i)
        before += weights[i] / total
    nucleus = [i for i in nucleus if weights[i] >= params.min_p * (1 - 1e-9)]
    total = math.fsum(weights[i] for i in nucleus)
    return [weights[i] / total if i in nucleus else 0.0 for i in range(len(values))]


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[float], SamplingParams, list[int], list[int]]:
    size = draw(st.integers(3, 30))
    tokens = st.integers(0, size - 1)
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.3, 1.0, 1.5, 50.0])),
        top_k=draw(st.sampled_from([0, 1, 2, 5, 100])),
        top_p=draw(st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.1, 1e-10])),
        min_p=draw(st.sampled_from([0.0, 0.01, 0.1, 0.5, 1.0])),
        presence_penalty=draw(st.sampled_from([0.0, 0.5, -2.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.25, -1.0])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3, 2.0, 0.5])),
        logit_bias=draw(st.dictionaries(tokens, st.sampled_from([-100.0, -0.5, 2.0, 100.0]), max_size=3)),
        stop_token_ids=tuple(draw(st.lists(tokens, max_size=2))),
        min_tokens=draw(st.integers(0, 4)),
    )
    logits = draw(st.lists(st.integers(-12, 12).map(lambda i: i / 4), min_size=size, max_size=size))  # ties are common
    return logits, params, draw(st.lists(tokens, max_size=6)), draw(st.lists(tokens, max_size=6))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(cases())
def test_process_equals_the_reference(case: tuple[list[float], SamplingParams, list[int], list[int]]) -> None:
    logits, params, prompt, output = case
    got = process(torch.tensor(logits), params, prompt, output).exp()
    expected = torch.tensor(reference(logits, params, prompt, output), dtype=torch.float64)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)
    assert torch.equal(got > 0, expected > 0)


@pytest.mark.parametrize("scale", [0.0, 0.5, 3.0, 8.0])
def test_wide_rows_equal_the_reference(scale: float) -> None:
    """From flat (top-p must keep thousands) to peaked (a handful), with ties."""
    generator = torch.Generator().manual_seed(2)
    logits = (torch.randn(2, 3000, generator=generator) * scale * 8).round() / 8
    cuts: list[dict[str, Any]] = [
        {"top_p": 0.9},
        {"top_p": 0.99999999},
        {"min_p": 0.02},
        {"top_k": 40, "top_p": 0.8},
        {"top_k": 2999},
    ]
    for cut in [*cuts, {"top_p": 0.7, "min_p": 0.3}]:
        params = replace(SamplingParams(temperature=0.8), **cut)
        got = process(logits, params).exp()
        for row, values in zip(got, logits.tolist(), strict=True):
            expected = torch.tensor(reference(values, params, [], []), dtype=torch.float64)
            torch.testing.assert_close(row, expected, rtol=1e-9, atol=1e-12)


def test_top_p_keeps_the_token_that_crosses() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    kept = [int((process(logits, SamplingParams(top_p=p)) > -math.inf).sum()) for p in (0.4, 0.6, 0.85, 0.96, 1.0)]
    assert kept == [1, 2, 3, 4, 4]


def test_top_p_on_its_edge_and_among_equals() -> None:
    """A mass that reaches p up to rounding has reached it; equals are taken by the lowest id."""
    kept = process(torch.zeros(8), SamplingParams(top_p=0.5)).exp()
    assert kept.tolist() == pytest.approx([0.25] * 4 + [0.0] * 4)
    kept = process(torch.zeros(10), SamplingParams(top_p=0.3)).exp()
    assert kept.tolist() == pytest.approx([1 / 3] * 3 + [0.0] * 7)


def test_top_k_among_equals_takes_the_lowest_ids() -> None:
    assert process(torch.zeros(5), SamplingParams(top_k=2)).exp().tolist() == [0.5, 0.5, 0.0, 0.0, 0.0]


def test_top_p_mass_is_taken_after_top_k() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    kept = process(logits, SamplingParams(top_k=2, top_p=0.55)).exp()
    assert (kept > 0).tolist() == [True, False, False, False]  # 0.4 / 0.7 crosses 0.55


def test_repetition_penalty_counts_a_token_once_and_shrinks_both_signs() -> None:
    params = SamplingParams(repetition_penalty=2.0)
    got = adjust(torch.tensor([3.0, -3.0, 3.0, -3.0]), params, [0, 0, 1], [0])
    assert got.tolist() == [1.5, -6.0, 3.0, -3.0]


def test_frequency_and_presence_look_at_output_alone() -> None:
    params = SamplingParams(frequency_penalty=0.5, presence_penalty=0.25)
    got = adjust(torch.zeros(4), params, prompt_token_ids=[0, 0], output_token_ids=[1, 2, 2])
    assert got.tolist() == [0.0, -0.75, -1.25, 0.0]


def test_min_tokens_masks_stop_tokens_until_reached() -> None:
    params = SamplingParams(min_tokens=2, stop_token_ids=(1, 3))
    assert adjust(torch.zeros(4), params, [], [0]).tolist() == [0.0, -math.inf, 0.0, -math.inf]
    assert needs_adjust(params, 1)
    assert not needs_adjust(params, 2)
    assert adjust(torch.zeros(4), params, [], [0, 0]).tolist() == [0.0] * 4


def test_inputs_are_left_alone() -> None:
    logits = torch.randn(6, generator=torch.Generator().manual_seed(3))
    before = logits.clone()
    params = SamplingParams(logit_bias={1: 5.0}, repetition_penalty=2.0, top_p=0.5)
    process(logits, params, [0], [1, 2])
    assert torch.equal(logits, before)


def test_greedy_never_needs_truncation() -> None:
    assert not needs_truncate(SamplingParams(temperature=0, top_k=1, top_p=0.1, min_p=0.5))
    assert needs_truncate(SamplingParams(temperature=1, min_p=0.5))


def test_truncation_of_a_row_does_not_depend_on_the_others() -> None:
    spike = torch.zeros(2000)
    spike[7] = 30.0
    logits = torch.stack((torch.zeros(2000), torch.linspace(0, 200, 2000), spike))
    for limits in ((0, 0.9, 0.0), (0, 1.0, 0.1), (5, 0.9, 0.0)):
        ids, scaled = truncate(logits, [1.0, 0.5, 2.0], *limits)
        for i, temperature in enumerate((1.0, 0.5, 2.0)):
            alone_ids, alone = truncate(logits[i : i + 1], [temperature], *limits)
            kept, alone_kept = scaled[i] > -math.inf, alone[0] > -math.inf
            assert ids[i][kept].tolist() == alone_ids[0][alone_kept].tolist()
            assert scaled[i][kept].tolist() == alone[0][alone_kept].tolist()
