"""The checks of ``ops_triton`` against the ``*_reference`` functions, for any device.

The references run on the device's own copy of the inputs. What only moves and rotates must be equal bit for bit. Norms
add up squares in an order of their own and silu calls another exponential: their float32 differs in its last bits, so
a result may be one rounding step of its dtype away (two behind the norm's weight), and rarely is.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from paceline.layers import ops, ops_triton
from paceline.layers.rotary import rope_table
from paceline.parallel.slabs import tree_sum

DTYPES = (torch.bfloat16, torch.float32, torch.float16)
EPS = 1e-5
FLOAT32_STEPS = 16  # last bits of a sum of up to 2^14 squares, added up in pairs in either order
RARELY = 0.01  # of all 16-bit results


def assert_close(found: torch.Tensor, expected: torch.Tensor, steps: int) -> None:
    """Within ``steps`` rounding steps of the 16-bit dtypes, or within float32's last bits."""
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    wide = expected.dtype is torch.float32
    limit = torch.finfo(expected.dtype).eps * (FLOAT32_STEPS if wide else steps)
    small = 16 * torch.finfo(expected.dtype).tiny
    torch.testing.assert_close(found, expected, rtol=limit, atol=small, equal_nan=True)
    if not wide and expected.numel() > 1000:
        assert float((found != expected).float().mean()) < RARELY


def strided(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, gap: int) -> torch.Tensor:
    """Random values whose rows lie ``gap`` elements apart: a slice of a wider output."""
    return torch.randn(*shape[:-1], shape[-1] + gap).to(dtype).to(device)[..., : shape[-1]]


def check_norm(device: torch.device, rows: int, heads: int, width: int, dtype: torch.dtype, gap: int) -> None:
    x = strided((rows, heads, width) if heads > 1 else (rows, width), dtype, device, gap)
    weight = torch.randn(width).to(dtype).to(device)
    assert_close(ops_triton.rms_norm(x, weight, EPS), ops.rms_norm_reference(x, weight, EPS), 2)


def check_add_norm(device: torch.device, rows: int, width: int, dtype: torch.dtype) -> None:
    """The stream itself is bit for bit torch's."""
    x, residual = (torch.randn(rows, width).to(dtype).to(device) for _ in range(2))
    weight, kept = torch.randn(width).to(dtype).to(device), residual.clone()
    found = ops_triton.add_rms_norm(x, residual, weight, EPS)
    expected = ops.add_rms_norm_reference(x, kept, weight, EPS)
    assert torch.equal(residual, kept)
    assert_close(found, expected, 2)


def check_silu(device: torch.device, rows: int, width: int, dtype: torch.dtype) -> None:
    gate_up = (4 * torch.randn(rows, 2 * width)).to(dtype).to(device)
    if rows and width > 8:
        gate_up[0, :6] = torch.tensor([0.0, -0.0, 200.0, -200.0, float("inf"), float("nan")])
    with np.errstate(over="ignore", invalid="ignore"):  # in the interpreter
        assert_close(ops_triton.silu_mul(gate_up), ops.silu_mul_reference(gate_up), 1)


def check_slabs(device: torch.device, rows: int, width: int, dtype: torch.dtype) -> None:
    """Bit for bit the tree of parallel/slabs.py."""
    for count in (2, 3, 5, 7, 8):
        slabs, bias = torch.randn(count, rows, width).to(device), torch.randn(width).to(device)
        whole = tree_sum(slabs.unbind())
        assert torch.equal(ops_triton.add_slabs(slabs, None, dtype), whole.to(dtype))
        assert torch.equal(ops_triton.add_slabs(slabs, bias, dtype), (whole + bias).to(dtype))


RopeInputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def rope_inputs(
    device: torch.device, rows: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, num_slots: int
) -> RopeInputs:
    """(query, key, value, table, positions, slots); the first three are views of one fused output."""
    fused = torch.randn(rows, (heads + 2 * kv_heads) * dim).to(dtype).to(device)
    parts = torch.split_with_sizes(fused, (heads * dim, kv_heads * dim, kv_heads * dim), dim=-1)
    query, key, value = (part.view(rows, part.shape[1] // dim, dim) for part in parts)
    positions, slots = torch.randint(0, 64, (rows,)), torch.randperm(num_slots)[:rows]
    return query, key, value, rope_table(dim, 10000.0, 64).to(device), positions.to(device), slots.to(device)


def check_rope(
    device: torch.device, rows: int, heads: int, kv_heads: int, dim: int, page_size: int, dtype: torch.dtype
) -> None:
    num_pages = -(-max(rows, 1) // page_size) + 1
    inputs = rope_inputs(device, rows, heads, kv_heads, dim, dtype, num_pages * page_size)
    pages = torch.randn(num_pages, 2, page_size, kv_heads, dim).to(dtype).to(device)
    expected_pages = pages.clone()
    found = ops_triton.rope_write(*inputs, pages)
    assert found.is_contiguous()
    assert torch.equal(found, ops.rope_write_reference(*inputs, expected_pages))
    assert torch.equal(pages, expected_pages)


LatentInputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, float, torch.Tensor, torch.Tensor, torch.Tensor]


def latent_inputs(
    device: torch.device, rows: int, heads: int, rank: int, rope_dim: int, dtype: torch.dtype, gap: int, num_slots: int
) -> LatentInputs:
    """(query, latent, norm, eps, table, positions, slots); both first are slices of wider rows."""
    query = torch.randn(rows, heads, 24 + rope_dim).to(dtype).to(device)[..., 24:]
    latent, norm = strided((rows, rank + rope_dim), dtype, device, gap), torch.randn(rank).to(dtype).to(device)
    positions, slots = torch.randint(0, 64, (rows,)), torch.randperm(num_slots)[:rows]
    table = rope_table(rope_dim, 10000.0, 64).to(device)
    return query, latent, norm, 1e-6, table, positions.to(device), slots.to(device)


def check_latent(
    device: torch.device, rows: int, heads: int, rank: int, rope_dim: int, dtype: torch.dtype, gap: int
) -> None:
    """Everything but the normed part bit for bit, what is not written included."""
    page_size, num_pages = 4, -(-max(rows, 1) // 4) + 1
    inputs = latent_inputs(device, rows, heads, rank, rope_dim, dtype, gap, num_pages * page_size)
    results = []
    torch.manual_seed(rows)
    pages = torch.randn(num_pages, page_size, rank + rope_dim).to(dtype).to(device)
    for write in (ops_triton.latent_write, ops.latent_write_reference):
        own, out = pages.clone(), torch.full((rows, heads, rank + rope_dim), 7.0, dtype=dtype, device=device)
        write(*inputs, own, out)
        results.append((own, out))
    (found, found_out), (expected, expected_out) = results
    assert torch.equal(found_out, expected_out)
    assert torch.equal(found[..., rank:], expected[..., rank:])
    assert_close(found, expected, 2)


def check_invariance(device: torch.device, count: int, width: int, dtype: torch.dtype) -> None:
    """The bits of ``count`` rows (an odd number), wherever they stand: among others, alone, in another order, as heads
    of wider rows, at odd addresses."""
    x, weight = torch.randn(count, width).to(dtype).to(device), torch.randn(width).to(dtype).to(device)

    def added(rows: torch.Tensor) -> torch.Tensor:
        return ops_triton.add_rms_norm(rows, torch.ones_like(rows), weight, EPS)

    def silu(rows: torch.Tensor) -> torch.Tensor:
        return ops_triton.silu_mul(rows[:, : width // 2 * 2])

    functions: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
        lambda rows: ops_triton.rms_norm(rows, weight, EPS),
        added,
        silu,
    )
    shifted = torch.zeros(count * width + 1, dtype=dtype, device=device)[1:].view(count, width).copy_(x)
    far = torch.zeros(count, width + 3, dtype=dtype, device=device)[:, :width].copy_(x)
    order = torch.randperm(count, device=device)
    for function in functions:
        whole = function(x)
        for rows in (1, 2, count // 2):
            assert torch.equal(function(x[2 : 2 + rows]), whole[2 : 2 + rows])
        assert torch.equal(function(x[order]), whole[order])
        assert torch.equal(function(shifted), whole)
        assert torch.equal(function(far[:1]), whole[:1])
        assert torch.equal(function(far), whole)
    even = count - 1
    apart = torch.zeros(2, even // 2 * width + 5, dtype=dtype, device=device)[:, : even // 2 * width]
    heads = apart.copy_(x[:even].reshape(2, -1)).view(2, even // 2, width)
    assert torch.equal(functions[0](heads).view(even, width), functions[0](x[:even]))


def check_latent_invariance(device: torch.device, rank: int, rope_dim: int, dtype: torch.dtype) -> None:
    """A latent row alone, at another slot, in a pool of another page size: the same bits."""
    inputs = latent_inputs(device, 9, 3, rank, rope_dim, dtype, 0, 24)
    width = rank + rope_dim
    pages, out = (
        torch.zeros(6, 4, width, dtype=dtype, device=device),
        torch.zeros(9, 3, width, dtype=dtype, device=device),
    )
    ops_triton.latent_write(*inputs, pages, out)
    query, latent, norm, eps, table, positions, slots = inputs
    for row in range(9):
        one = torch.zeros(24, 1, width, dtype=dtype, device=device)
        single, at = torch.zeros_like(out[:1]), slice(row, row + 1)
        slot = slots[at] * 5 % 24
        ops_triton.latent_write(query[at], latent[at], norm, eps, table, positions[at], slot, one, single)
        assert torch.equal(single[0], out[row])
        assert torch.equal(one[slot[0], 0], pages.view(24, width)[slots[row]])


def check_padding(device: torch.device) -> None:
    """Padding rows write one and the same slot: its content is nobody's, all else is as without them."""
    query, key, value, table, positions, slots = rope_inputs(device, 12, 4, 2, 32, torch.bfloat16, 16)
    scratch = 19
    slots[:7], positions[:7] = scratch, 0
    pages = torch.randn(5, 2, 4, 2, 32).to(torch.bfloat16).to(device)
    expected_pages = pages.clone()
    found = ops_triton.rope_write(query, key, value, table, positions, slots, pages)
    own = ops.rope_write_reference(query[7:], key[7:], value[7:], table, positions[7:], slots[7:], expected_pages)
    assert torch.equal(found[7:], own)
    assert bool(found[:7].isfinite().all())
    kept = pages[scratch // 4, :, scratch % 4]
    assert bool(kept.isfinite().all())
    expected_pages[scratch // 4, :, scratch % 4] = kept
    assert torch.equal(pages, expected_pages)


def check_slots_outside(device: torch.device) -> None:
    """They touch nothing, and the rows beside them are written."""
    slots = torch.tensor([-1, 3, 20, 2**31], device=device)
    query, key, value, table, positions, _ = rope_inputs(device, 4, 4, 2, 32, torch.float32, 20)
    pages = torch.full((5, 2, 4, 2, 32), 7.0, device=device)
    ops_triton.rope_write(query, key, value, table, positions, slots, pages)
    assert torch.equal(pages[0, 1, 3], value[1])
    pages[0, :, 3] = 7.0
    assert bool((pages == 7.0).all())
    inputs = latent_inputs(device, 4, 3, 32, 8, torch.float32, 0, 20)
    latents, out = torch.full((5, 4, 40), 7.0, device=device), torch.zeros(4, 3, 40, device=device)
    ops_triton.latent_write(*inputs[:6], slots, latents, out)
    assert bool((latents[0, 3] != 7.0).any())
    latents[0, 3] = 7.0
    assert bool((latents == 7.0).all())
