"""The digest of a node's bits: alike on nodes that give one text, another for a build that gives another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch

from kv_transfer.layout.compat import differing_fields
from paceline.engine.fingerprint import fingerprint_of
from paceline.models.decoder import DecoderModel
from paceline.sampling.noise import exponential_noise
from tests.support.needs import needs_kernels
from tests.support.tiny_model import tiny_prefill_runner, tiny_runner

pytestmark = needs_kernels


def test_nodes_of_one_text_have_it_alike() -> None:
    """Mutant: the size of a page is in the digest."""
    own = fingerprint_of(tiny_runner("bf16", drafter="ngram"))
    assert len(own.results) == 16
    for other in (tiny_runner("bf16", drafter="none", page_size=32), tiny_prefill_runner("bf16", drafter="ngram")):
        assert fingerprint_of(other).results == own.results


def other_logits(model: DecoderModel[Any], hidden: torch.Tensor) -> torch.Tensor:
    return torch.nextafter(LOGITS(model, hidden), torch.tensor(torch.inf))


def other_noise(seeds: Sequence[int], *rest: Any) -> torch.Tensor:
    return exponential_noise([seed + 1 for seed in seeds], *rest)


LOGITS = DecoderModel.logits


@pytest.mark.parametrize(
    ("part", "other"),
    [
        ("paceline.models.decoder.DecoderModel.logits", other_logits),
        ("paceline.sampling.race.exponential_noise", other_noise),
    ],
    ids=["a bit of the logits", "the noise"],
)
def test_a_build_that_gives_other_bits_pairs_with_none_of_before(part: str, other: Any) -> None:
    """Nothing else tells the two builds apart. Mutants: a digest of the tokens alone, and of the logits alone."""
    before = fingerprint_of(tiny_runner())
    with mock.patch(part, other):
        after = fingerprint_of(tiny_runner())
    assert differing_fields(before, after) == ["results"]


def logits_of_more_bits(rows: range) -> Any:
    """A product whose bits are others for batches of ``rows``."""

    def logits(model: DecoderModel[Any], hidden: torch.Tensor) -> torch.Tensor:
        return (other_logits if len(hidden) in rows else LOGITS)(model, hidden)

    return logits


@pytest.mark.parametrize("rows", [range(1, 2), range(2, 17), range(17, 34)], ids=["one row", "a few", "a tile's"])
def test_bits_that_depend_on_the_batch_are_found(rows: range) -> None:
    """Mutants: the text is run at once alone, or in chunks alone."""
    with mock.patch("paceline.models.decoder.DecoderModel.logits", logits_of_more_bits(rows)):
        assert not tiny_runner().bit_exact
    assert tiny_runner().bit_exact
