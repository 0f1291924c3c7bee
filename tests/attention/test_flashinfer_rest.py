"""What FlashInfer has no kernel for: Triton kernels serve it, torch only where Triton is missing, and it is said."""

from __future__ import annotations

import random
from unittest import mock

import pytest
import torch

from paceline.attention.base import AttentionPlan, ForwardBatch, StaticShape
from paceline.attention.flashinfer import FlashInferAttention
from paceline.attention.paged import PagedKind
from paceline.attention.select import tell_what_serves
from paceline.attention.torch_paged import StaticDensePlan, TorchAttention
from paceline.kvcache.layout import LayerKind
from paceline.kvcache.pool import KvPool
from paceline.triton_support import has_triton
from tests.fakes import flashinfer_wrappers as fake
from tests.support.interpreter import INTERPRETED, Again
from tests.support.needs import needs_triton
from tests.support.paged_batches import Tables, filled_pool, num_rows, plain_attention, random_batch
from tests.support.tolerance import Tolerance

if has_triton():
    from paceline.attention.triton_paged import TritonAttention

interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the process with the interpreter")
CPU, PAGES, HEADS, DIM, VALUE = torch.device("cpu"), 40, 4, 64, 128
BF16: Tolerance = {"rtol": 1.6e-2, "atol": 1e-2}
SERVED = filled_pool(LayerKind.GQA, 2, DIM, 4, PAGES + 1, torch.bfloat16)
LATENT = filled_pool(LayerKind.MLA, 1, VALUE + 64, 4, PAGES + 1, torch.bfloat16)
FLOATS = filled_pool(LayerKind.GQA, 2, DIM, 4, PAGES + 1, torch.float32)
ODD = filled_pool(LayerKind.GQA, 2, 24, 4, PAGES + 1, torch.bfloat16)


@needs_triton
def test_in_tritons_interpreter(run_again_interpreted: Again) -> None:
    assert run_again_interpreted(__file__) > 0


@interpreted
@pytest.mark.parametrize(("kv", "value_dim"), [(FLOATS, 0), (ODD, 0), (LATENT, VALUE)], ids=["fp32", "odd", "tree"])
@pytest.mark.parametrize("static", [False, True])
def test_what_has_no_kernel_goes_to_triton(kv: KvPool, value_dim: int, static: bool) -> None:
    """float32, an odd head width, a tree over latents: eagerly and in memory that stays. Mutants: the reference serves
    them; nobody is told."""
    dim, dtype = kv.layout.layers[0].head_dim, kv.layout.dtype
    backend = FlashInferAttention(CPU, dim, fake)
    assert isinstance(backend.others, TritonAttention)
    segments = [Tables(random.Random(2), PAGES, 4).tree(3, 9)]
    plan: AttentionPlan
    if static:
        held = backend.static_plan(StaticShape(1, 3, True, 64), kv)
        assert held is not None
        held.fill(segments)
        plan = held
    else:
        plan = backend.plan(ForwardBatch.build(segments))
    query, scale = torch.randn(3, HEADS, dim).to(dtype), dim**-0.5
    with mock.patch.object(TorchAttention, "attend", side_effect=AssertionError):
        if value_dim:
            found = backend.attend_latent(query, kv, 0, plan, scale, value_dim)
        else:
            found = backend.attend(query, kv, 0, plan, scale)
    torch.testing.assert_close(found, plain_attention(query, kv, segments, scale, value_dim), **BF16)
    assert len(backend.left) == 1


def test_without_triton_the_reference_serves_the_rest(caplog: pytest.LogCaptureFixture) -> None:
    """It is said at start, as a warning."""
    segments = random_batch(random.Random(2), 4, PAGES)
    query = torch.randn(num_rows(segments), HEADS, DIM)
    with mock.patch("paceline.attention.flashinfer.runs_triton", return_value=False):
        backend = FlashInferAttention(CPU, DIM, fake)
    plan = backend.plan(ForwardBatch.build(segments))
    found = backend.attend(query, FLOATS, 0, plan, 0.125)
    torch.testing.assert_close(found, plain_attention(query, FLOATS, segments, 0.125), rtol=1e-4, atol=1e-5)
    assert isinstance(backend.static_plan(StaticShape(2, 3, False, 64), FLOATS), StaticDensePlan)
    with caplog.at_level("INFO"):
        tell_what_serves(backend, FLOATS.layout, HEADS)
    assert caplog.records[0].message.endswith(" and torch")
    assert caplog.records[-1].levelname == "WARNING"
    assert "decode rows over heads of 64 in float32" in caplog.text


def test_what_is_left_to_another_backend() -> None:
    """Latents alone leave trees; what is served is not named."""
    backend = FlashInferAttention(CPU, DIM, fake)
    assert backend.left_to(SERVED.layout, HEADS) == {}
    assert list(backend.left_to(LATENT.layout, HEADS)) == [f"masked rows over latents of {VALUE} in bfloat16"]
    assert len(backend.left_to(ODD.layout, HEADS)) == len(PagedKind)
