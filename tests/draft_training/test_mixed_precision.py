"""bf16 weights, float32 masters: Muon on matrices between hidden rows, AdamW on the rest."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch

from draft_training.heads import Eagle3, Medusa, TrainableHead
from draft_training.layers import HeadShape
from draft_training.train import MixedPrecision

SHAPE = HeadShape(8, 16, 2, 1, 4, 1e-5)
RATE = 1e-2


def made(kind: str) -> MixedPrecision:
    """A head with gradients."""
    torch.manual_seed(1)
    head: TrainableHead = Eagle3(SHAPE, 40, 2) if kind == "eagle3" else Medusa(SHAPE, 2, 1)
    mixed = MixedPrecision(head, RATE)
    give_gradients(mixed, 2)
    return mixed


def give_gradients(mixed: MixedPrecision, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in mixed.head.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).bfloat16()


def test_each_kind_of_parameter_has_its_optimizer() -> None:
    """Muon's step is a rotation: all its singular values are near one length. AdamW's first is the sign."""
    mixed = made("eagle3")
    names = [name for name, _ in mixed.head.named_parameters()]
    before = [master.clone() for master in mixed.masters]
    mixed.step(RATE, 1e9)
    for name, old, new in zip(names, before, mixed.masters, strict=True):
        change = new - old
        if old.dim() == 2 and name != "lm_head.weight":
            lengths = torch.linalg.svdvals(change) / (RATE * 0.2 * max(old.shape) ** 0.5)
            assert 0.4 < float(lengths.min()) <= float(lengths.max()) < 1.4, name
        else:
            torch.testing.assert_close(change.abs(), torch.full_like(change, RATE), rtol=0.02, atol=0)


@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_a_resumed_run_goes_on_as_the_other(kind: str) -> None:
    one, other = made(kind), made(kind)
    one.step(RATE, 1.0)
    other.load(deepcopy(one.state()))  # as through a file
    for mixed in (one, other):
        give_gradients(mixed, 3)
        mixed.step(RATE, 1.0)
    for a, b in zip(one.masters, other.masters, strict=True):
        assert torch.equal(a, b)
    for a, b in zip(one.head.parameters(), other.head.parameters(), strict=True):
        assert torch.equal(a, b)
