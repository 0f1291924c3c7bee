"""Kernels of latent attention's projections and of expert routing: against torch, and row invariance."""

from __future__ import annotations

import pytest
import torch

from paceline.layers.build import set_threads
from paceline.layers.ops import latent_write, latent_write_reference
from paceline.layers.per_head_linear import HeadsLinear, heads_linear_reference
from paceline.layers.rotary import rope_table
from paceline.layers.routing import RoutingRule, route, route_reference
from tests.support.needs import needs_kernels
from tests.support.tolerance import Tolerance

pytestmark = needs_kernels

DTYPES = [torch.bfloat16, torch.float32]
ROWS = [1, 2, 3, 6, 7, 16, 17, 32, 33, 47]
RULES = [
    RoutingRule(num_groups=8, top_groups=4, top_k=8, normalise=True, factor=2.5),
    RoutingRule(num_groups=1, top_groups=1, top_k=6, normalise=False, factor=1.0),
    RoutingRule(num_groups=10, top_groups=3, top_k=6, normalise=True, factor=1.0),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "out_features", "in_features"), [(3, 512, 128), (5, 48, 24), (2, 20, 48)])
def test_heads_linear(dtype: torch.dtype, heads: int, out_features: int, in_features: int) -> None:
    """Over slices of wider rows, as the model uses it: equal to torch, invariant, and nothing beside is touched."""
    weight = (torch.randn(heads, out_features, in_features) * 0.05).to(dtype)
    wide = torch.randn(50, heads, in_features + 8).to(dtype)
    linear = HeadsLinear(weight)

    def run(x: torch.Tensor) -> torch.Tensor:
        out = torch.full((x.shape[0], heads, out_features + 6), 7.0, dtype=dtype)
        linear(x, out[..., 2 : out_features + 2])
        assert bool((out[..., :2] == 7).all())
        assert bool((out[..., out_features + 2 :] == 7).all())
        return out[..., 2 : out_features + 2]

    whole = run(wide[..., :in_features])
    expected = heads_linear_reference(wide[..., :in_features].float(), weight.float())
    limits: Tolerance = {"rtol": 1.6e-2, "atol": 1e-2} if dtype is torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(whole.float(), expected, **limits)
    for rows in ROWS:
        assert torch.equal(run(wide[3 : 3 + rows, :, :in_features]), whole[3 : 3 + rows]), rows
    set_threads(2)
    try:
        assert torch.equal(run(wide[..., :in_features]), whole)
    finally:
        set_threads(1)


def test_torch_in_place_of_heads_linear_fails_the_invariance_check() -> None:
    """The mutant: torch's batched product depends on the number of rows."""
    weight, x = torch.randn(4, 512, 128), torch.randn(50, 4, 128)
    whole = heads_linear_reference(x, weight)
    assert any(not torch.equal(heads_linear_reference(x[:rows], weight), whole[:rows]) for rows in ROWS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rank", "rope_dim"), [(512, 64), (28, 6)])
def test_latent_write(dtype: torch.dtype, rank: int, rope_dim: int) -> None:
    rows, heads, nope, page_size = 19, 3, 24, 8
    query = torch.randn(rows, heads, nope + rope_dim).to(dtype)[..., nope:]
    latent = torch.randn(rows, rank + rope_dim + 5).to(dtype)[:, : rank + rope_dim]
    norm, table = torch.randn(rank).to(dtype), rope_table(rope_dim, 10000.0, 64)
    positions, slots = torch.randint(0, 64, (rows,)), torch.randperm(5 * page_size)[:rows]
    results = []
    for write in (latent_write, latent_write_reference):
        pages = torch.zeros(5, page_size, rank + rope_dim, dtype=dtype)
        out = torch.zeros(rows, heads, rank + rope_dim, dtype=dtype)
        write(query, latent, norm, 1e-6, table, positions, slots, pages, out)
        results.append((pages, out))
    (pages, out), (expected_pages, expected_out) = results
    limits: Tolerance = {"rtol": 1.6e-2, "atol": 1e-2} if dtype is torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(pages, expected_pages, **limits)
    torch.testing.assert_close(out, expected_out, **limits)
    assert bool((pages.view(-1, rank + rope_dim)[slots] != 0).any(dim=1).all())
    for r in range(rows):  # a row alone has the same bits
        one, single = torch.zeros_like(pages), torch.zeros_like(out[:1])
        pick = slice(r, r + 1)
        latent_write(query[pick], latent[pick], norm, 1e-6, table, positions[pick], slots[pick], one, single)
        assert torch.equal(single[0], out[r])
        assert torch.equal(one.view(-1, rank + rope_dim)[slots[r]], pages.view(-1, rank + rope_dim)[slots[r]])


@pytest.mark.parametrize("rule", RULES)
def test_route_equals_reference(rule: RoutingRule) -> None:
    num_experts = 16 * rule.num_groups if rule.num_groups > 1 else 50
    logits, bias = torch.randn(200, num_experts) * 2, torch.randn(num_experts) * 0.1
    ids, weights = route(logits, bias, rule)
    expected_ids, expected_weights = route_reference(logits, bias, rule)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-6)
    if rule.normalise:
        torch.testing.assert_close(weights.sum(dim=1), torch.full((200,), rule.factor))
    for rows in ROWS:
        part_ids, part_weights = route(logits[5 : 5 + rows], bias, rule)
        assert torch.equal(part_ids, ids[5 : 5 + rows])
        assert torch.equal(part_weights, weights[5 : 5 + rows])


def test_route_by_hand() -> None:
    """Two of three groups by their best two; the bias chooses and does not weigh; of equals the lower index."""
    rule = RoutingRule(num_groups=3, top_groups=2, top_k=3, normalise=True, factor=2.0)
    scores = torch.tensor([[0.6, 0.3, 0.6, 0.3, 0.4, 0.3]])
    bias = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.5, 0.2])  # groups: 0.9, 0.9, 1.4 -> the third and, of equals, the first
    ids, weights = route(scores.logit(), bias, rule)
    assert ids.tolist() == [[4, 0, 5]]  # 0.4 + 0.5, then 0.6, then 0.3 + 0.2
    torch.testing.assert_close(weights, torch.tensor([[0.4, 0.6, 0.3]]) / 1.3 * 2.0)
