"""The exact products on a GPU, and what else experts run there: against their references, and a row's bits by batch."""

from __future__ import annotations

import pytest
import torch

from paceline.layers.routing import RoutingRule
from paceline.triton_support import has_triton
from tests.support.quantized_weights import KINDS

if has_triton():
    from tests.support import exact_products

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not has_triton(), reason="needs triton"),
]
CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("width", "slabs", "columns"), [(576, 3, 576), (1536, 3, 576), (4096, 8, 4096), (4096, 1, 1000), (14336, 8, 4096)]
)
def test_a_rows_bits_are_its_own(dtype: torch.dtype, width: int, slabs: int, columns: int) -> None:
    exact_products.check_linear(CUDA, dtype, width, slabs, columns)


@pytest.mark.parametrize("kind", KINDS)
def test_codes_are_read_as_they_lie(kind: str) -> None:
    for width in (256, 2048):
        exact_products.check_codes(CUDA, kind, width)
    exact_products.check_slabs_of_integers(CUDA)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_experts_and_heads(dtype: torch.dtype) -> None:
    exact_products.check_grouped(CUDA, dtype, 2112)
    exact_products.check_grouped(CUDA, torch.bfloat16, 2048, "float8")
    exact_products.check_grouped(CUDA, torch.bfloat16, 2048, "w8a8")
    exact_products.check_heads(CUDA, dtype)


def test_routing_and_the_sum_of_experts() -> None:
    for tied in (False, True):
        exact_products.check_routing(CUDA, RoutingRule(8, 4, 8, True, 2.5), 256, tied)
        exact_products.check_routing(CUDA, RoutingRule(1, 1, 4, True, 1.0, softmax=True), 128, tied)
    exact_products.check_weighted_sum(CUDA)
    exact_products.check_by_expert(CUDA, 256, 2048, 8, torch.bfloat16)
