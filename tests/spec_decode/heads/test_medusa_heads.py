"""Medusa's heads against plain torch, broken ones refused, and the off-by-one of C3."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import pytest
import torch

from paceline.engine.colocated import ColocatedEngine
from paceline.engine.model_runner import ModelRunner
from paceline.errors import ConfigError
from paceline.layers.linear import Linear
from paceline.layers.quantized import LinearWeight
from paceline.models.llama import LlamaModel
from paceline.models.quantization.round_to_nearest import round_to_nearest
from paceline.spec_decode.base import DraftSampling
from paceline.spec_decode.drafters import medusa
from paceline.spec_decode.drafters.candidates import Candidates, choose
from paceline.spec_decode.drafters.medusa import MedusaHeads
from tests.support.medusa_drafting import (
    BUDGETS,
    COUPLED,
    GREEDY,
    HIDDEN,
    TENSOR,
    drafter_of,
    make,
    tensors,
)
from tests.support.tiny_model import VOCAB, tiny_request, tiny_runner

# ---- heads


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("own", [True, False])
def test_heads_equal_plain_torch(blocks: int, own: bool) -> None:
    """J7: y = x + SiLU(W x + b), then the head's own vocabulary matrix or the target's LM head."""
    model = tiny_runner("fp32", drafter="none").model
    given = tensors(3, blocks, VOCAB if own else None)
    hidden = torch.randn(5, HIDDEN)
    got = MedusaHeads(model, given).logits(hidden)
    assert got.shape == (3, 5, VOCAB)
    for head in range(3):
        y = hidden
        for block in range(blocks):
            z = y @ given[f"{head}.{block}.linear.weight"].T + given[f"{head}.{block}.linear.bias"]
            y = y + z / (1 + torch.exp(-z))
        expected = y @ given[f"{head}.{blocks}.weight"].T if own else model.logits(y)
        torch.testing.assert_close(got[head], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("scheme", "of_vocabulary"), [("w8a8", "w8a8"), ("w4a16", "w8a16")])
def test_heads_are_rounded_as_their_target_is(scheme: str, of_vocabulary: str) -> None:
    """Mutants: heads stay floats; their vocabulary matrices have the 4 bits of other layers, unlike an LM head."""
    model, hidden = tiny_runner("bf16", drafter="none").model, torch.randn(5, HIDDEN).bfloat16()
    given: dict[str, LinearWeight] = dict(tensors(2, 1, VOCAB))
    rounded = dict(given)
    for name, weight in given.items():
        if isinstance(weight, torch.Tensor) and name.endswith("weight"):
            kept = weight.bfloat16()
            rounded[name] = round_to_nearest(kept, scheme if "linear" in name else of_vocabulary)
    expected = MedusaHeads(model, rounded).logits(hidden)
    model = tiny_runner("bf16", drafter="none", quantize=scheme).model
    assert torch.equal(MedusaHeads(model, given).logits(hidden), expected)


def test_heads_are_counted_from_the_names() -> None:
    model = tiny_runner("fp32", drafter="none").model
    for count in (1, 3, 5, 11):  # 11: numbers, not strings, are counted
        assert MedusaHeads(model, tensors(count, vocab=None)).num_heads == count


def without(*names: str) -> TENSOR:
    return {name: value for name, value in tensors().items() if name not in names}


def small(ids: list[int] | torch.Tensor) -> TENSOR:
    return tensors(vocab=len(ids)) | {"token_map": torch.as_tensor(ids)}


BROKEN: dict[str, tuple[TENSOR, str]] = {
    "no heads": ({}, "found none"),
    "a gap": ({n: t for n, t in tensors().items() if not n.startswith("1.")}, r"heads \[0, 2, 3\]"),
    "no bias": (without("2.0.linear.bias"), r"2\.0\.linear\.bias is missing"),
    "a stranger": (tensors() | {"0.norm.weight": torch.ones(HIDDEN)}, r"0\.norm\.weight"),
    "wrong width": (tensors() | {"0.0.linear.weight": torch.ones(HIDDEN, 8)}, r"0\.0\.linear\.weight has shape"),
    "one vocabulary missing": (without("2.1.weight"), "differ in their vocabulary"),
    "vocabularies of two sizes": (tensors() | {"3.1.weight": torch.ones(VOCAB + 1, HIDDEN)}, "differ in their vocab"),
    "reduced without a map": (tensors(vocab=50), "need a token_map"),
    "map without matrices": (tensors(vocab=None) | {"token_map": torch.arange(9)}, "token_map must be int64"),
    "map too short": (tensors(vocab=50) | {"token_map": torch.arange(49)}, "token_map must be int64"),
    "map of floats": (small(torch.arange(50).float()), "token_map must be int64"),
    "map outside": (small([*range(49), VOCAB]), "different token ids"),
    "map twice": (small([*range(49), 3]), "different token ids"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_heads_are_refused_by_name(case: str) -> None:
    given, message = BROKEN[case]
    with pytest.raises(ConfigError, match=message):
        MedusaHeads(tiny_runner("fp32", drafter="none").model, given)


# ---- the off-by-one of C3


def shifted_heads(table: torch.Tensor, extra: int = 0) -> TENSOR:
    """Heads that pass h through and look k + 2 + extra tokens ahead in a text that counts upwards."""
    found = tensors(4)
    for head in range(4):
        for what in ("weight", "bias"):
            found[f"{head}.0.linear.{what}"].zero_()
        found[f"{head}.1.weight"] = table.roll(head + 2 + extra, 0)
    return found


def count_upwards(runner: ModelRunner) -> torch.Tensor:
    """Cut attention and MLP out of the target, so that t is followed by t + 1. Returns the embedding."""
    model = runner.model
    assert isinstance(model, LlamaModel)
    for layer in model.layers:
        layer.o_proj._packed.zero_()
        layer.down_proj._packed.zero_()
    model.lm_head = Linear(model.embedding.roll(1, 0), out_float32=True)
    return model.embedding


def full_rounds(runner: ModelRunner, temperature: float, requests: int = 4) -> set[int]:
    """Accepted per round, the last rounds (cut by max_tokens) left out."""
    asked = [tiny_request(index=i, temperature=temperature, max_tokens=40) for i in range(requests)]
    done = ColocatedEngine(runner, chunk_tokens=4).generate(asked)
    return {n for d in done for n in d.stats.accepted_per_round[:-1]}


@pytest.mark.parametrize("shape", ["chain", "static", "one"])
@pytest.mark.parametrize("temperature", [0.0, 0.05])
def test_perfect_heads_are_always_right(shape: str, temperature: float) -> None:
    """Head k says t_{i+k+2} from h_i: a head built to know it has every draft accepted (J4)."""
    runner = make(shape)
    drafter_of(runner).heads = MedusaHeads(runner.model, shifted_heads(count_upwards(runner)))
    assert full_rounds(runner, temperature) == {min(BUDGETS[shape].num_draft_tokens, 4)}


@pytest.mark.parametrize("extra", [-1, 1])
def test_heads_that_look_one_token_off_are_never_right(extra: int) -> None:
    """Mutant: head k read as t_{i+k+1} (the LM head's own place for k = 0) or t_{i+k+3}."""
    runner = make()
    drafter_of(runner).heads = MedusaHeads(runner.model, shifted_heads(count_upwards(runner), extra))
    assert full_rounds(runner, 0.0) == {0}


def memoryless(sampling: DraftSampling) -> ModelRunner:
    """Every token has the same law whatever came before, and the heads know it: only noise tells tokens apart."""
    runner = make("chain", sampling)
    embedding = count_upwards(runner)
    table = embedding.clone()
    embedding[:] = embedding[7].clone()
    assert isinstance(runner.model, LlamaModel)
    runner.model.lm_head = Linear(table * 0.4, out_float32=True)
    heads = shifted_heads(table)
    for head in range(4):
        heads[f"{head}.1.weight"] = table * 0.4
    drafter_of(runner).heads = MedusaHeads(runner.model, heads)
    return runner


def test_coupled_noise_is_that_of_the_position() -> None:
    """With q equal to p a coupled draft is always right at temperature 1, if it is drawn for its own position."""
    assert full_rounds(memoryless(COUPLED), 1.0) == {3}
    assert min(full_rounds(memoryless(GREEDY), 1.0)) == 0


@pytest.mark.parametrize("shift", [-1, 1])
def test_noise_of_the_next_position_is_noticed(shift: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant of the position of the first candidate, m + 1."""

    def off(logits: torch.Tensor, params: Any, positions: Seq[int], *rest: Any) -> Candidates:
        return choose(logits, params, [p + shift for p in positions], *rest)

    monkeypatch.setattr(medusa, "choose", off)
    assert full_rounds(memoryless(COUPLED), 1.0) != {3}
