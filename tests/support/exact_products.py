"""The checks of the exact products, the routing kernel and the experts' sum, for any device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from unittest import mock

import torch

from paceline.layers import exact_products, experts_triton
from paceline.layers.bits import layer_bits
from paceline.layers.by_expert import by_expert, by_expert_reference
from paceline.layers.exact_products import Grouping, Matrices, grouped_product, heads_product, product
from paceline.layers.linear import Linear
from paceline.layers.quantized import QuantizedWeight
from paceline.layers.quantized_reference import integer_linear_reference
from paceline.layers.routing import RoutingRule
from paceline.parallel.slabs import tree_sum
from tests.support.quantized_weights import KINDS, OF_FILES

ROWS = 65  # past the largest tile of codes and of float32
COUNTS = (1, 3, 16, 17, 64)
FEW_COUNTS = (1, 17)  # of rows, where another kind has COUNTS
PROMPT_ROWS = 300  # past the largest tile of floats of 16 bits


@contextmanager
def short_leaves(leaf: int, slabs: int = 1) -> Iterator[None]:
    """Leaves so short that small matrices have several. Up to 64 rows get a program a leaf, more a loop over leaves."""
    with (
        mock.patch.object(exact_products, "LEAF", leaf),
        mock.patch.object(exact_products, "WANTED_PROGRAMS", 2 * slabs),
    ):
        yield


def exact_linear(weight: torch.Tensor | QuantizedWeight, bias: torch.Tensor | None = None, **options: object) -> Linear:
    """A linear of exact products, on a CPU too."""
    device = weight.codes.device if isinstance(weight, QuantizedWeight) else weight.device
    with mock.patch("paceline.layers.linear.load_kernels", return_value=None), layer_bits("exact", device):
        return Linear(weight, bias, **options)  # type: ignore[arg-type]


def on_device(weight: QuantizedWeight, device: torch.device) -> QuantizedWeight:
    """Its tables there."""
    minimums = None if weight.minimums is None else weight.minimums.to(device)
    scales = weight.scales.to(device)
    return replace(weight, codes=weight.codes.to(device), scales=scales, minimums=minimums, tables=None)


def check_linear(device: torch.device, dtype: torch.dtype, width: int, slabs: int, columns: int = 40) -> None:
    """Against float64; a row's bits over rows, places, runs of outputs, and ranks that hold branches of the slabs."""
    rows = ROWS if dtype is torch.float32 else PROMPT_ROWS
    weight, x = (torch.randn(n, width).to(dtype).to(device) for n in (columns, rows))
    bias = 10 * torch.randn(columns, device=device)
    linear = exact_linear(weight, bias, slabs=slabs, out_float32=True)
    whole = linear(x)
    close = {"rtol": 1e-4, "atol": 1e-5 * width**0.5}  # float32 sums of numbers of any sign
    torch.testing.assert_close(whole, (x.double() @ weight.double().t() + bias).float(), **close)
    for count in (*COUNTS, 96, 97, 128, 129):
        assert torch.equal(linear(x[:count]), whole[:count]), count
    for place in (slice(7, 8), slice(rows - 5, None)):
        assert torch.equal(linear(x[place]), whole[place]), place
    with mock.patch.object(exact_products, "PARTIAL_BYTES", 4 * columns * slabs * 12):
        assert torch.equal(linear(x[:20]), whole[:20])
    for run in (slice(0, 24), slice(24, None)):
        part = exact_linear(weight[run], bias[run], slabs=slabs, out_float32=True)
        assert torch.equal(part(x[:5]), whole[:5, run])
    for degree in {slabs, max(slabs // 2, 1)} - {1}:
        branches = [
            exact_linear(own.contiguous(), slabs=slabs // degree, out_float32=True)(rows)
            for own, rows in zip(weight.chunk(degree, 1), x[:5].chunk(degree, 1), strict=True)
        ]
        assert torch.equal(tree_sum(branches) + bias, whole[:5]), degree
    assert torch.equal(exact_linear(weight, bias, slabs=slabs)(x[:3]), whole[:3].to(dtype))


def check_codes(device: torch.device, kind: str, width: int, counts: Sequence[int] = COUNTS) -> None:
    """Integers: the bits of the reference, on a CPU. Other codes: those of the weight as floats of x's dtype in the
    interpreter; a GPU's matrix instructions take the terms in another order there. A row's bits are its own."""
    weight = (KINDS | OF_FILES)[kind](torch.randn(40, width))
    x, bias = torch.randn(ROWS, width).bfloat16(), torch.randn(40)
    x[3] = 0
    if weight.int8_activations:
        x[5, 7] = float("nan")
    there = on_device(weight, device)
    linear = exact_linear(there, bias.to(device), out_float32=True)
    found = linear(x.to(device))
    if weight.int8_activations:
        expected = integer_linear_reference(x, weight, bias, torch.float32)
    else:
        floats = there.dequantised().to(x.dtype)
        expected = product(x.to(device), Matrices.of(floats), bias.to(device), torch.float32).cpu()
    in_order = weight.int8_activations or device.type == "cpu"
    close = {"rtol": 0.0, "atol": 0.0} if in_order else {"rtol": 1e-4, "atol": 1e-5 * width**0.5}
    torch.testing.assert_close(found.cpu(), expected, equal_nan=True, **close)
    for rows in (slice(4, 6), *(slice(0, count) for count in counts)):
        torch.testing.assert_close(linear(x[rows].to(device)), found[rows], rtol=0, atol=0, equal_nan=True)


def check_packed(device: torch.device, kind: str, width: int, slabs: int = 1) -> None:
    """Codes of 4 bits in half the bytes of their 8-bit form, and with its bits, few rows and many."""
    weight = KINDS[kind](torch.randn(40, width))
    assert weight.codes.amin() < 0 < weight.codes.amax()
    narrow = on_device(weight, device)
    packed, wide = Matrices.of(narrow), Matrices.of(replace(narrow, bits=8))
    assert (packed.values.nbytes, wide.values.nbytes) == (40 * -(-width // 2), 40 * width)
    assert packed.shape == wide.shape == (40, width)
    x = torch.randn(ROWS, width).bfloat16().to(device)
    for rows in (x[:3], x):
        found, expected = (product(rows, m, None, torch.float32, slabs) for m in (packed, wide))
        assert torch.equal(found, expected)


def check_slabs_of_integers(device: torch.device) -> None:
    """A tree over the float32 sums of runs of whole groups, each as the reference has it."""
    slabs, width = 4, 128
    weight = KINDS["w8a8"](torch.randn(40, slabs * width))
    x, bias = torch.randn(19, slabs * width).bfloat16(), torch.randn(40)
    runs = zip(x.chunk(slabs, 1), weight.codes.chunk(slabs, 1), strict=True)
    parts = [
        integer_linear_reference(rows, replace(weight, codes=codes, group_size=width), None, torch.float32)
        for rows, codes in runs
    ]
    there = on_device(weight, device)
    found = product(x.to(device), Matrices.of(there), bias.to(device), torch.float32, slabs)
    assert torch.equal(found.cpu(), tree_sum(parts) + bias)


def check_grouped(device: torch.device, dtype: torch.dtype, width: int, kind: str = "") -> None:
    """A row has the bits of a product with its expert alone, whoever else is there."""
    experts, top_k, tokens = 5, 2, 21
    floats = [torch.randn(24, width) for _ in range(experts)]
    weights = [on_device(KINDS[kind](w), device) if kind else w.to(dtype).to(device) for w in floats]
    matrices, biases = Matrices.stack(lambda i: weights[i], experts), torch.randn(experts, 24, device=device)
    x = torch.randn(tokens, width).to(dtype).to(device)
    ids = torch.tensor([[3, 0 if t == 4 else 1 + t % 2] for t in range(tokens)], device=device)  # one row; 4 has none
    alone = [product(x, Matrices.of(w), b, torch.float32) for w, b in zip(weights, biases, strict=True)]
    for kept in (slice(0, tokens), slice(4, 5)):
        flat = ids[kept].reshape(-1)
        order = flat.argsort(stable=True)
        ends = torch.searchsorted(flat[order], torch.arange(experts, device=device), right=True, out_int32=True)
        grouping = Grouping.of(ends, flat.shape[0], dtype, codes=bool(kind))
        out = torch.full((flat.shape[0], 24), 7.0, device=device)
        grouped_product(x[kept], matrices, biases, grouping, out, order // top_k, order)
        expected = torch.stack([alone[int(e)][kept][i // top_k] for i, e in enumerate(flat)])
        assert torch.equal(out, expected), kept


def check_heads(device: torch.device, dtype: torch.dtype) -> None:
    """Strided views in and out; a row's bits do not depend on the others."""
    weight = torch.randn(3, 20, 40).to(dtype).to(device)
    x = torch.randn(ROWS, 3, 48).to(dtype).to(device)[..., 8:]
    out = torch.full((ROWS, 3, 24), 7.0, dtype=dtype, device=device)
    heads_product(x, Matrices(weight), out[..., :20])
    assert bool((out[..., 20:] == 7.0).all())
    expected = torch.einsum("thk,hnk->thn", x.double(), weight.double())
    torch.testing.assert_close(out[..., :20].double(), expected, rtol=1e-2, atol=1e-2)
    for count in (1, 17):
        part = torch.empty(count, 3, 20, dtype=dtype, device=device)
        heads_product(x[:count], Matrices(weight), part)
        assert torch.equal(part, out[:count, :, :20])


def chosen(choice: list[float], rule: RoutingRule) -> list[int]:
    """The experts of a row by what they are worth; of equals the lowest."""
    size = len(choice) // rule.num_groups
    groups = [choice[g * size : (g + 1) * size] for g in range(rule.num_groups)]
    worth = [sum(sorted(group)[-2:]) for group in groups]
    best = sorted(range(rule.num_groups), key=lambda g: (-worth[g], g))[: rule.top_groups]
    open_ones = [e for e in range(len(choice)) if e // size in best]
    return sorted(open_ones, key=lambda e: (-choice[e], e))[: rule.top_k]


def check_routing(device: torch.device, rule: RoutingRule, experts: int, tied: bool) -> None:
    """Choice and weights of rows that differ everywhere, or whose scores tie."""
    rows = 5
    logits = torch.randint(-1, 2, (rows, experts)).float() if tied else torch.randn(rows, experts)
    bias = None if rule.softmax else torch.randint(0, 2, (experts,)).float() if tied else torch.randn(experts) / 8
    options = asdict(rule)
    ids, weights = experts_triton.route(logits.to(device), None if bias is None else bias.to(device), **options)
    scores = logits.softmax(-1) if rule.softmax else logits.sigmoid()
    choice = logits if rule.softmax else scores if bias is None else scores + bias
    assert ids.tolist() == [chosen(row, rule) for row in choice.tolist()]
    expected = scores.gather(1, ids.cpu())
    if rule.normalise:
        expected = expected / expected.sum(-1, keepdim=True)
    torch.testing.assert_close(weights.cpu(), expected * rule.factor, rtol=1e-5, atol=1e-7)
    alone = experts_triton.route(logits[2:3].to(device), None if bias is None else bias.to(device), **options)
    assert torch.equal(alone[0], ids[2:3])
    assert torch.equal(alone[1], weights[2:3])


def check_by_expert(device: torch.device, experts: int, rows: int, top_k: int, dtype: torch.dtype) -> None:
    """As torch sorts and scatters, an expert without rows too."""
    chosen = torch.stack([torch.randperm(experts - 1)[:top_k] for _ in range(rows)]) if rows else torch.empty(0, top_k)
    ids = chosen.long().to(device)
    found, expected = by_expert(ids, experts), by_expert_reference(ids, experts)
    for name, part in vars(expected).items():
        assert torch.equal(getattr(found, name), part), name
        assert getattr(found, name).dtype is part.dtype
    width = 1100 if rows < 100 else 30  # two blocks of a row, or many rows: each is moved by itself
    answers = torch.randn(rows * top_k, width, device=device).to(dtype)
    placed = torch.empty(answers.shape, device=device)
    placed[expected.order] = answers.float()
    assert torch.equal(found.in_rows(answers, top_k), placed.view(rows, top_k, width))


def check_weighted_sum(device: torch.device) -> None:
    """Best first, each product rounded before it is added."""
    outputs, weights = torch.randn(5, 4, 37, device=device), torch.randn(5, 4, device=device)
    parts = (outputs * weights.unsqueeze(-1)).unbind(1)
    expected = ((parts[0] + parts[1]) + parts[2]) + parts[3]
    assert torch.equal(experts_triton.weighted_sum(outputs, weights), expected)
