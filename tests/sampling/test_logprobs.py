"""What a client is told about a token."""

from __future__ import annotations

import math

import pytest
import torch

from paceline.sampling.logprobs import token_logprobs


def test_values_and_order() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, 3.0])
    total = math.log(sum(math.exp(x) for x in logits.tolist()))
    result = token_logprobs(logits, token_id=2, top=3)
    assert result.logprob == pytest.approx(2.0 - total, abs=1e-12)
    assert result.top_ids == (1, 3, 2)  # equals by the lowest id
    assert result.top_logprobs == pytest.approx((3.0 - total, 3.0 - total, 2.0 - total), abs=1e-12)


def test_zero_gives_the_token_alone_and_large_is_cut() -> None:
    logits = torch.tensor([0.0, 1.0])
    assert token_logprobs(logits, 0, 0).top_ids == ()
    assert token_logprobs(logits, 0, 20).top_ids == (1, 0)


def test_a_masked_token_has_minus_infinity() -> None:
    assert token_logprobs(torch.tensor([0.0, -math.inf]), 1, 1).logprob == -math.inf
