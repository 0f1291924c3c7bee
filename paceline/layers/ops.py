"""The operations of a decoder layer, each with the torch reference beside its kernel.

On CPU the kernels of ``kernels/`` run, on CUDA those of ``ops_triton``; where the first could not be built or Triton
is not installed, the ``*_reference`` functions do. All have the same signature, so that models never branch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from paceline.layers import kv8
from paceline.layers.build import load_kernels
from paceline.triton_support import runs_triton

_SUFFIX = {torch.bfloat16: "bf16", torch.float32: "f32"}
_TRITON_DTYPES = (torch.bfloat16, torch.float32, torch.float16)


def _usable(x: torch.Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype in _SUFFIX and load_kernels() is not None


def _fused(x: torch.Tensor) -> bool:
    return x.dtype in _TRITON_DTYPES and runs_triton(x.device)


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Zhang & Sennrich 2019. x: [T, n]; weight: [n]. The normed row is rounded to weight.dtype before the weight."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (normed.to(weight.dtype) * weight).to(x.dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last dimension. x: [..., n] -> [..., n].

    weight: [n], of x's dtype, or float32: then a result is rounded once, after the weight (Gemma 3, gpt-oss).
    """
    if not _usable(x):
        if _fused(x):
            from paceline.layers import ops_triton

            return ops_triton.rms_norm(x, weight, eps)
        return rms_norm_reference(x, weight, eps)
    x = x.contiguous()
    out = torch.empty_like(x)
    n = x.shape[-1]
    _norm(x, weight)(x.data_ptr(), None, weight.data_ptr(), x.numel() // n, n, eps, out.data_ptr())
    return out


def add_rms_norm_reference(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The same as ``add_rms_norm`` in torch."""
    residual += x
    return rms_norm_reference(residual, weight, eps)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``residual += x`` in place, then ``rms_norm`` of residual. x, residual: [T, n], contiguous."""
    if not _usable(x):
        if _fused(x):
            from paceline.layers import ops_triton

            return ops_triton.add_rms_norm(x, residual, weight, eps)
        return add_rms_norm_reference(x, residual, weight, eps)
    out = torch.empty_like(x)
    rows, n = x.shape
    _norm(x, weight)(x.data_ptr(), residual.data_ptr(), weight.data_ptr(), rows, n, eps, out.data_ptr())
    return out


def silu_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """SwiGLU (Shazeer 2020). gate_up: [T, 2n] -> silu(gate) * up, [T, n]."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up. gate_up: [T, 2n], contiguous -> [T, n]."""
    if not _usable(gate_up):
        if _fused(gate_up):
            from paceline.layers import ops_triton

            return ops_triton.silu_mul(gate_up)
        return silu_mul_reference(gate_up)
    rows, n = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, n)
    _call("pl_silu_mul", gate_up.dtype)(gate_up.data_ptr(), rows, n, out.data_ptr())
    return out


def gelu_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """The same as ``gelu_mul`` in torch."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.gelu(gate, approximate="tanh") * up).to(gate_up.dtype)


def gelu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """GEGLU with GELU's tanh form (Shazeer 2020; Gemma 3). gate_up: [T, 2n], contiguous -> gelu(gate) * up, [T, n]."""
    return _gated(gate_up, 0, 0.0, 0.0) if _usable(gate_up) else gelu_mul_reference(gate_up)


def clamped_swiglu_reference(gate_up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """The same as ``clamped_swiglu`` in torch."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (gate * torch.sigmoid(alpha * gate) * (up + 1)).to(gate_up.dtype)


def clamped_swiglu(gate_up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """The experts' activation of gpt-oss: gate * sigmoid(alpha * gate) * (up + 1), gate at most ``limit`` and up within
    it. gate_up: [T, 2n], contiguous -> [T, n]."""
    return _gated(gate_up, 1, alpha, limit) if _usable(gate_up) else clamped_swiglu_reference(gate_up, alpha, limit)


def _gated(gate_up: torch.Tensor, kind: int, alpha: float, limit: float) -> torch.Tensor:
    rows, n = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, n)
    _call("pl_gated", gate_up.dtype)(gate_up.data_ptr(), rows, n, kind, alpha, limit, out.data_ptr())
    return out


def rope_reference(x: torch.Tensor, table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary embedding, rotate-half form (Su et al. 2021). x: [T, heads, D]; table: float32 [max, D] (cos | sin)."""
    cos, sin = table[positions].unsqueeze(1).chunk(2, dim=-1)
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def rope_write_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    table: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    pages: torch.Tensor,
) -> torch.Tensor:
    """Rotate query and key, store key and value into ``pages`` at ``slots``; returns the rotated query."""
    page_size = pages.shape[2]
    page, offset = slots // page_size, slots % page_size
    pages[page, 0, offset] = rope_reference(key, table, positions)
    pages[page, 1, offset] = value
    return rope_reference(query, table, positions)


def rope_write(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    table: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    pages: torch.Tensor,
) -> torch.Tensor:
    """Rotate query and key by position and write key and value to the pool.

    query: [T, Hq, D]; key, value: [T, Hk, D]; rows may be strided (views of a fused qkv output), heads contiguous;
    table: float32 [max_position, D]; positions, slots: int64 [T]; pages: [num_pages, 2, page_size, Hk, D].
    Returns the rotated query, [T, Hq, D] contiguous. int8 pages have rows of D + 4 (``kv8``).
    """
    if pages.dtype is torch.int8:
        return _rope_write_int8(query, key, value, table, positions, slots, pages)
    if not _usable(query):
        if _fused(query):
            from paceline.layers import ops_triton

            return ops_triton.rope_write(query, key, value, table, positions, slots, pages)
        return rope_write_reference(query, key, value, table, positions, slots, pages)
    rows, heads, dim = query.shape
    out = query.new_empty(rows, heads, dim)
    _call("pl_rope_write", query.dtype)(
        query.data_ptr(), key.data_ptr(), value.data_ptr(), query.stride(0), key.stride(0), value.stride(0),
        rows, heads, key.shape[1], dim,
        table.data_ptr(), positions.data_ptr(), slots.data_ptr(), pages.shape[2], out.data_ptr(), pages.data_ptr(),
    )  # fmt: skip
    return out


def _rope_write_int8(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    table: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    pages: torch.Tensor,
) -> torch.Tensor:
    """``rope_write`` into a page of the rows' own, which is then rounded into int8 ``pages``."""
    rows = query.new_empty((1, 2, *key.shape))
    own = torch.arange(key.shape[0])
    rotated = rope_write(query, key, value, table, positions, own, rows)
    kv8.write_rows(rows[0], slots, pages)
    return rotated


def latent_write_reference(
    query: torch.Tensor,
    latent: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    table: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    pages: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """The same as ``latent_write`` in torch."""
    rank, page_size = norm.shape[0], pages.shape[1]
    out[..., rank:] = rope_reference(query, table, positions)
    rotated = rope_reference(latent[:, None, rank:], table, positions)[:, 0]
    row = torch.cat((rms_norm_reference(latent[:, :rank], norm, eps), rotated), dim=-1)
    pages[slots // page_size, slots % page_size] = row


def latent_write(
    query: torch.Tensor,
    latent: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    table: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    pages: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Rotate the queries' rope part into ``out`` and store the latent rows, normed and rotated, in the pool.

    R is the rank of the latent, P the width of the rope part. query: [T, H, P]; latent: [T, R + P]; both may be slices
    of wider rows, elements together; norm: [R]; table: float32 [max_position, P]; positions, slots: int64 [T];
    pages: [num_pages, page_size, R + P]; out: [T, H, R + P], contiguous, of which [..., R:] is filled.
    """
    if not _usable(query):
        if _fused(query):
            from paceline.layers import ops_triton

            ops_triton.latent_write(query, latent, norm, eps, table, positions, slots, pages, out)
        else:
            latent_write_reference(query, latent, norm, eps, table, positions, slots, pages, out)
        return
    rows, heads, rope_dim = query.shape
    _call("pl_latent_write", query.dtype)(
        query.data_ptr(), query.stride(0), query.stride(1), latent.data_ptr(), latent.stride(0), rows, heads,
        norm.shape[0], rope_dim, norm.data_ptr(), eps, table.data_ptr(), positions.data_ptr(), slots.data_ptr(),
        out.data_ptr(), pages.data_ptr(),
    )  # fmt: skip


def _norm(x: torch.Tensor, weight: torch.Tensor):  # type: ignore[no-untyped-def]  # a ctypes function
    return _call("pl_rms_norm" if weight.dtype is x.dtype else "pl_rms_norm_wide", x.dtype)


def _call(name: str, dtype: torch.dtype):  # type: ignore[no-untyped-def]  # a ctypes function
    return getattr(load_kernels(), f"{name}_{_SUFFIX[dtype]}")
