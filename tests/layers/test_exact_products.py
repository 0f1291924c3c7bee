"""Products whose bits do not depend on the batch, and what else experts run on a GPU, in Triton's interpreter."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from paceline.assembly.selfcheck import logits_in_chunks
from paceline.attention.select import attention_for
from paceline.config import NodeConfig
from paceline.errors import ConfigError
from paceline.kvcache.allocator import PageAllocator
from paceline.kvcache.layout import KvLayout
from paceline.kvcache.pool import KvPool
from paceline.layers import bits
from paceline.layers.bits import layer_bits
from paceline.layers.linear import Linear
from paceline.layers.quantized import LinearWeight
from paceline.layers.routing import RoutingRule
from paceline.models.base import TargetModel
from paceline.models.deepseek_v3 import DeepseekV3Model
from paceline.models.llama import LlamaModel
from paceline.models.loader import WeightBag
from paceline.models.moe import FEW_EACH, GroupedExperts, _on_a_gpu
from paceline.triton_support import has_triton
from tests.support.interpreter import INTERPRETED, Again
from tests.support.needs import needs_kernels, needs_triton
from tests.support.quantized_weights import KINDS, ON_GPUS
from tests.support.recording import plain_torch
from tests.support.tiny_deepseek import target_tensors, tiny_deepseek_spec
from tests.support.tiny_model import VOCAB, tiny_spec, tiny_weights

if has_triton():
    from paceline.layers.exact_products import Matrices
    from tests.support import exact_products

torch.set_num_threads(1)
CPU = torch.device("cpu")
LEAF = 64  # elements of k, for small matrices
WIDTHS = {"w8a8": 200, "w4a8": 160, "Q6_K": 144}  # of a kind in many groups, which take long in the interpreter; or 256
ALL_COUNTS = ("w8a8 groups of 128", "w4a16", "float8")  # kinds that are multiplied with every number of rows
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the process with the interpreter")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(5)


def test_in_tritons_interpreter(run_again_interpreted: Again) -> None:
    assert run_again_interpreted(__file__) > 0


@needs_triton
def test_blocks_on_their_way_fit_a_programs_memory() -> None:
    """An H100's, an A100's, and what most others have. Mutant: all that the tile asks for."""
    from paceline.layers.exact_products import HIGH, LOW, stages_of

    kept = [[stages_of(tile, 2, kib << 10) for kib in (227, 163, 99, 16)] for tile in (LOW, HIGH)]
    assert kept == [[4, 4, 4, 1], [4, 4, 3, 1]]


@interpreted
@pytest.mark.parametrize(
    ("dtype", "width", "slabs"), [(torch.bfloat16, 160, 1), (torch.float32, 160, 1), (torch.bfloat16, 384, 4)]
)
def test_a_rows_bits_are_its_own(dtype: torch.dtype, width: int, slabs: int) -> None:
    """Mutants: leaves by the number of rows, partial sums in bf16, leaves or slabs added last to first, a bias in every
    part."""
    with exact_products.short_leaves(LEAF, slabs):
        exact_products.check_linear(CPU, dtype, width, slabs)


@interpreted
@pytest.mark.parametrize("kind", [*ON_GPUS, "Q6_K", "int8 with zero points"])
def test_codes_are_read_as_they_lie(kind: str) -> None:
    with exact_products.short_leaves(LEAF):
        counts = exact_products.COUNTS if kind in ALL_COUNTS else exact_products.FEW_COUNTS
        exact_products.check_codes(CPU, kind, WIDTHS.get(kind, 256), counts)


@interpreted
@pytest.mark.parametrize(
    ("kind", "width", "slabs"), [("w4a8", 128, 2), ("w4a16", 256, 4), ("w4a8 groups of 64", 149, 1), ("w4a16", 201, 1)]
)
def test_codes_of_four_bits_lie_two_in_a_byte(kind: str, width: int, slabs: int) -> None:
    """Odd widths end in half a byte. Mutants: low and high half exchanged, the next group's scale, no minimum, codes
    without a sign, rows of a rounded-down number of bytes."""
    with exact_products.short_leaves(LEAF):
        exact_products.check_packed(CPU, kind, width, slabs)


@interpreted
@pytest.mark.parametrize("kind", ["w8a8", "w4a8", "w4a16", "float8"])
def test_fast_bits_read_codes_too(kind: str) -> None:
    """A quantised layer that is made without exact bits. Mutant: it becomes floats."""
    weight, x = KINDS[kind](torch.randn(40, 128)), torch.randn(3, 128).bfloat16()
    with mock.patch("paceline.layers.linear.load_kernels", return_value=None):
        fast, floats = Linear(weight), Linear(torch.randn(40, 128))
    assert torch.equal(fast(x), exact_products.exact_linear(weight)(x))
    assert fast._exact is not None
    assert floats._exact is None
    held = [tensor.nbytes for tensor in vars(fast).values() if isinstance(tensor, torch.Tensor)]
    assert sum(held) == 0  # neither codes of 8 bits nor floats beside the matrices


@interpreted
@pytest.mark.parametrize("unlike", [False, True])
def test_fast_experts_read_codes(unlike: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Each weight is taken once. Experts of unlike kinds become floats, and it is said. Mutants: floats always; a
    weight that was looked at is asked for again."""
    weights: dict[str, LinearWeight] = {}
    for i in range(3):
        kind = "w8a16" if unlike and i == 2 else "w4a16"
        for name, shape in (("gate_proj", (32, 64)), ("up_proj", (32, 64)), ("down_proj", (64, 32))):
            weights[f"mlp.experts.{i}.{name}.weight"] = KINDS[kind](torch.randn(*shape) / 8)
    floats = {name: weight.dequantised() for name, weight in weights.items()}  # type: ignore[union-attr]
    left = weights.copy()

    def take(name: str) -> torch.Tensor:
        del left[name]
        return floats[name]

    found = _on_a_gpu(torch.float32, take, left.pop, "mlp", 3)
    assert not left
    assert isinstance(found, GroupedExperts) is unlike
    assert ("unlike ways" in caplog.text) is unlike
    x, ids = torch.randn(5, 64), torch.tensor([[0, 2], [1, 2], [2, 0], [0, 1], [1, 0]])
    expected = GroupedExperts(floats.__getitem__, "mlp", 3)(x, ids)
    got = found(x, ids)
    assert got is not None
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@interpreted
def test_slabs_of_integers() -> None:
    exact_products.check_slabs_of_integers(CPU)


@interpreted
def test_an_experts_other_rows_change_nothing() -> None:
    with exact_products.short_leaves(LEAF):
        exact_products.check_grouped(CPU, torch.bfloat16, 100)
        exact_products.check_grouped(CPU, torch.float32, 100, "w4a8 groups of 64")


@interpreted
@pytest.mark.parametrize(("experts", "rows", "top_k"), [(6, 0, 2), (6, 1, 2), (9, 300, 4)])
def test_rows_together_by_expert(experts: int, rows: int, top_k: int) -> None:
    """Mutants: rows of one expert in no order; of the first block alone; to where they come from."""
    exact_products.check_by_expert(CPU, experts, rows, top_k, torch.bfloat16)


@interpreted
def test_few_rows_of_floats_take_the_exact_products() -> None:
    """As many as an expert has on average, and no more. Mutants: the threshold counts tokens; nobody takes them."""
    shapes = {"gate_proj": (16, 32), "up_proj": (16, 32), "down_proj": (32, 16)}
    made = GroupedExperts(lambda name: torch.randn(shapes[name.split(".")[-2]]).bfloat16(), "mlp", 2)
    ids = torch.tensor([[0, 1]]).repeat(FEW_EACH + 1, 1)
    x = torch.randn(FEW_EACH + 1, 32).bfloat16()
    with mock.patch.object(made, "of_many", side_effect=made.of_many) as of_many:
        few = made(x[:-1], ids[:-1])
        assert of_many.call_count == 0
        made(x, ids)
        assert of_many.call_count == 1
    torch.testing.assert_close(few, made.of_many(x[:-1], ids[:-1]).float(), rtol=2e-2, atol=2e-1)


@interpreted
def test_fp4_becomes_floats_when_it_is_loaded() -> None:
    """Its codes have no kernel: they are refused by name. Mutant: they are multiplied as whole numbers."""
    weight = KINDS["float4"](torch.randn(8, 64))
    with layer_bits("exact", CPU):
        found = WeightBag({"w.weight": weight}).onto(CPU).take_linear("w.weight")
    assert isinstance(found, torch.Tensor)
    assert torch.equal(found, weight.dequantised().bfloat16())
    with pytest.raises(ValueError, match="FP4 have no kernel"):
        Matrices.of(weight)


@interpreted
def test_experts_of_unlike_kinds_are_refused() -> None:
    """Else codes would be taken for weights."""
    weights: list[LinearWeight] = [torch.randn(8, 64), KINDS["w8a16"](torch.randn(8, 64))]
    with pytest.raises(ConfigError, match="unlike"):
        Matrices.stack(lambda i: weights[i], 2)


@interpreted
def test_heads() -> None:
    exact_products.check_heads(CPU, torch.bfloat16)


@interpreted
@pytest.mark.parametrize("tied", [False, True])
def test_routing(tied: bool) -> None:
    """Mutant: the higher index wins a tie."""
    exact_products.check_routing(CPU, RoutingRule(4, 2, 3, True, 2.5), 12, tied)
    exact_products.check_routing(CPU, RoutingRule(1, 1, 4, False, 1.0, softmax=True), 20, tied)


@interpreted
def test_the_sum_of_experts() -> None:
    """Mutants: worst first, fused multiply and add."""
    exact_products.check_weighted_sum(CPU)


def one_layer() -> LlamaModel:
    """In bf16."""
    spec = tiny_spec(num_layers=1)
    return LlamaModel(spec, tiny_weights(spec, torch.bfloat16), torch.bfloat16, CPU)


def two_layers() -> DeepseekV3Model:
    """A dense layer and one of experts, with latent attention, in fp32."""
    spec = tiny_deepseek_spec(num_layers=2)
    return DeepseekV3Model(spec, WeightBag(target_tensors(spec, torch.float32, 0)), torch.float32, CPU)


@interpreted
@needs_kernels
@pytest.mark.parametrize("family", ["llama", "deepseek"])
def test_a_models_rows(family: str) -> None:
    """In chunks and together: the same logits bit for bit. Attention is the CPU's, whose rows are invariant."""
    with plain_torch(), layer_bits("exact", CPU):
        model: TargetModel
        model = one_layer() if family == "llama" else two_layers()
    spec = model.spec
    attention = attention_for(CPU, spec.num_heads, spec.num_kv_heads, spec.head_dim)
    assert attention.row_invariant
    pool, allocator = KvPool(KvLayout(model.kv_layers, model.dtype), 2, 16), PageAllocator(2)
    tokens = [(7919 * i + 13) % VOCAB for i in range(6)]
    with plain_torch(), exact_products.short_leaves(LEAF):
        whole, chunked = (
            logits_in_chunks(model, pool, allocator, attention, tokens, chunks) for chunks in ((6,), (1, 5))
        )
    assert torch.equal(whole, chunked)


def test_a_gpu_without_triton_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bits, "has_triton", lambda: False)
    with pytest.raises(ConfigError, match="triton"), layer_bits("exact", torch.device("cuda")):
        pass


def test_the_cpu_keeps_to_its_own_kernels() -> None:
    with layer_bits("exact", CPU):
        assert bits.makes_exact(CPU) is INTERPRETED
    assert not bits.makes_exact(CPU)


def test_options() -> None:
    exact = NodeConfig(bits="exact", device="cuda:0")
    assert exact.attention_wanted == "triton"
    assert NodeConfig(device="cuda:0").attention_wanted == "auto"
    assert NodeConfig(bits="exact", attention="torch").attention_wanted == "torch"  # on a CPU
    with pytest.raises(ValueError, match="depend on the batch"):
        NodeConfig(bits="exact", device="cuda:0", attention="flashinfer")
