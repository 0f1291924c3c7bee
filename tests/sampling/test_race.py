"""The fast race against its definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.sampling import race as race_module
from paceline.sampling.race import race, race_reference

WIDE = 8192


def wide_logits(kind: str, rows: int = 6) -> torch.Tensor:
    noise = torch.randn(rows, WIDE, generator=torch.Generator().manual_seed(1))
    if kind == "flat":
        return torch.zeros(rows, WIDE)
    if kind == "masked":
        return torch.where(noise > 2.5, noise, -torch.inf)
    if kind == "peaked":
        noise[:, ::1000] += 30
        return noise * 3
    return noise * {"normal": 4.0, "extreme": 1e4, "tiny": 1e-4}[kind]


@pytest.mark.parametrize("kind", ["flat", "masked", "peaked", "normal", "extreme", "tiny"])
@pytest.mark.parametrize("width", [1, 2, 8, 32])
def test_pruned_race_equals_the_reference(kind: str, width: int) -> None:
    logits = wide_logits(kind)
    rows = logits.shape[0]
    for temperature in (0.01, 0.3, 1.0, 1.5, 100.0):
        args = (logits, [temperature] * rows, list(range(rows)), list(range(10, 10 + rows)), width)
        assert torch.equal(race(*args), race_reference(*args))


def test_pruned_race_with_mapped_ids() -> None:
    logits = wide_logits("normal")
    rows = logits.shape[0]
    token_ids = torch.arange(WIDE) * 3 + 1
    args = (logits, [1.0] * rows, list(range(rows)), [4] * rows, 4, token_ids)
    assert torch.equal(race(*args), race_reference(*args))
    assert not torch.equal(race(*args), race(*args[:-1]))


def test_the_pruned_path_is_the_one_that_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[float] = []
    plain = race_module._race_row

    def spy(values: Any, temperature: float, bits: Any, width: int) -> Any:
        calls.append(temperature)
        return plain(values, temperature, bits, width)

    monkeypatch.setattr(race_module, "_race_row", spy)
    race(wide_logits("normal", 3), [1.0] * 3, [1, 2, 3], [0] * 3)
    assert len(calls) == 3
    race(torch.zeros(1, 100), [1.0], [1], [0])
    assert len(calls) == 3


def test_a_temperature_near_zero_is_greedy() -> None:
    logits = wide_logits("normal")
    for temperature in (1e-12, 5e-324):
        winners = race(logits, [temperature] * 6, list(range(6)), [0] * 6)
        assert winners.squeeze(1).tolist() == logits.argmax(dim=1).tolist()
        small = race(logits[:, :16], [temperature] * 6, list(range(6)), [0] * 6)
        assert small.squeeze(1).tolist() == logits[:, :16].argmax(dim=1).tolist()


def test_excluded_tokens_arrive_last() -> None:
    logits = torch.tensor([[0.0, -torch.inf, 1.0, -torch.inf]])
    for seed in range(50):
        order = race(logits, [1.0], [seed], [0], width=4)[0].tolist()
        assert order[2:] == [1, 3]


def test_adding_a_constant_changes_nothing() -> None:
    logits = wide_logits("normal").round()  # so that the sum is exact
    args = ([1.0] * 6, list(range(6)), [0] * 6, 4)
    assert torch.equal(race(logits, *args), race(logits + 64.0, *args))


@pytest.mark.parametrize("width", [0, 9])
def test_width_out_of_range(width: int) -> None:
    with pytest.raises(ValueError, match="between 1 and 8"):
        race(torch.zeros(1, 8), [1.0], [0], [0], width)
