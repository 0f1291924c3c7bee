"""What a tiny request may say of sampling, by the names of SamplingParams: a typed dictionary for lists of cases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

from paceline.request import Grammar


class Sampling(TypedDict, total=False):
    """Options of a request whose length is given apart."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float]
    seed: int | None
    stop_token_ids: tuple[int, ...]
    min_tokens: int
    bad_token_ids: tuple[tuple[int, ...], ...]
    ignore_eos: bool
    prompt_logprobs: int | None
    top_logprobs: int | None
    grammar: Grammar | None


class Asked(Sampling, total=False):
    """The length too."""

    max_tokens: int
