"""Exact bits on a GPU: kernels against their references there, and engines whose logits have the same bits by any
drafter, batch and chunk. Bodies over engines run on a CPU too, which is always exact."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pytest
import torch

from paceline.layers.routing import RoutingRule
from paceline.triton_support import has_triton
from tests.support.device_runner import DEVICES, GPU, NARROW, WIDE, device_runner, mixed_requests, with_heads
from tests.support.device_runner import write_heads as write_device_heads
from tests.support.exactness import Outcome, run
from tests.support.needs import needs_kernels, needs_triton
from tests.support.quantized_weights import KINDS

if has_triton():
    from tests.support import exact_products

CUDA = torch.device("cuda")
DTYPES = ("bf16", "fp32")
CASES: dict[str, tuple[dict[str, object], int, int]] = {  # options, batch, prompt tokens a step
    "batch of 8": ({"drafter": "none"}, 8, 10_000),
    "chunks of 5": ({"drafter": "none"}, 3, 5),
    "ngram": ({"drafter": "ngram", "num_draft_tokens": 8}, 1, 10_000),
    "mtp tree": ({"drafter": "mtp", "tree": "static", "tree_width": 3}, 4, 16),
    "eagle3 dynamic": ({"drafter": "eagle3", "tree": "dynamic", "tree_width": 3}, 8, 16),
}
ON_CPU = ("batch of 8", "mtp tree")  # tests/engine has the others
on_gpu = [*GPU, needs_triton]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(5)


@pytest.fixture(scope="module", autouse=True)
def models_are_given_back() -> Iterator[None]:
    yield
    plain.cache_clear()


def gpu(function):  # type: ignore[no-untyped-def]
    """Marks of a test that needs a GPU and Triton."""
    for mark in on_gpu:
        function = mark(function)
    return function


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("width", "slabs", "columns"), [(576, 3, 576), (1536, 3, 576), (4096, 8, 4096), (4096, 1, 1000), (14336, 8, 4096)]
)
def test_a_rows_bits_are_its_own(dtype: torch.dtype, width: int, slabs: int, columns: int) -> None:
    exact_products.check_linear(CUDA, dtype, width, slabs, columns)


@gpu
@pytest.mark.parametrize("kind", KINDS)
def test_codes_are_read_as_they_lie(kind: str) -> None:
    for width in (256, 2048):
        exact_products.check_codes(CUDA, kind, width)


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_experts_and_heads(dtype: torch.dtype) -> None:
    exact_products.check_grouped(CUDA, dtype, 2112)
    exact_products.check_grouped(CUDA, torch.bfloat16, 2048, "float8")
    exact_products.check_grouped(CUDA, torch.bfloat16, 2048, "w8a8")
    exact_products.check_heads(CUDA, dtype)


@gpu
def test_routing_and_the_sum_of_experts() -> None:
    for tied in (False, True):
        exact_products.check_routing(CUDA, RoutingRule(8, 4, 8, True, 2.5), 256, tied)
        exact_products.check_routing(CUDA, RoutingRule(1, 1, 4, True, 1.0, softmax=True), 128, tied)
    exact_products.check_weighted_sum(CUDA)


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: write_device_heads(tmp_path_factory.mktemp(kind), kind) for kind in (NARROW, WIDE)}


@lru_cache
def plain(device: str, dtype: str, geometry: str) -> list[Outcome]:
    return run(device_runner(device, geometry, dtype, drafter="none", bits="exact"), mixed_requests(8, 16))


@needs_kernels
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_tokens_and_logits(device: str, dtype: str, case: str, heads: dict[str, Path]) -> None:
    if device == "cpu" and (dtype != "bf16" or case not in ON_CPU):
        pytest.skip("tests/engine has this on a CPU")
    options, batch, chunk = CASES[case]
    for geometry in (NARROW, WIDE):
        if geometry == WIDE and (options["drafter"] == "mtp" or device == "cpu"):
            continue
        runner = device_runner(device, geometry, dtype, bits="exact", **with_heads(options, heads[geometry]))
        assert runner.bit_exact
        done = run(runner, mixed_requests(8, 16), batch=batch, chunk_tokens=chunk)
        expected = plain(device, dtype, geometry)
        assert [one.token_ids for one in done] == [one.token_ids for one in expected]
        assert [one.logit_bits for one in done] == [one.logit_bits for one in expected]
