"""A tokenizer as it makes the text of one answer."""

from __future__ import annotations

from typing import TypeVar

from cluster.contract.generation import GenerationRequest
from cluster.contract.tools import markers
from paceline.text.markers import Source, keeping, showing_specials

S = TypeVar("S", bound=Source)


def text_source(tokenizer: S, admitted: GenerationRequest) -> S:
    """``tokenizer``, of whose special tokens those are part of the text that the request wants to see, or by which the
    answer is read."""
    if not admitted.sampling.skip_special_tokens:
        return showing_specials(tokenizer)
    form = admitted.answer_format
    return tokenizer if form is None else keeping(tokenizer, markers(form))
