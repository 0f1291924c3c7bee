"""Which products of a family have slabs: those whose inner dimension ranks of a node would share, and no others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kv_transfer.layout.compat import check_pairing
from paceline.engine.fingerprint import fingerprint_of
from paceline.errors import PairingRefused
from paceline.layers.linear import Linear
from paceline.models import deepseek_shapes, gemma3, gpt_oss, llama_shapes, moe_decoder
from paceline.models.deepseek_v3 import DeepseekDecoderLayer
from paceline.models.llama import DecoderLayer
from paceline.models.llama_shapes import Shapes
from paceline.models.loader import WeightBag
from paceline.v1.handoff_pb2 import Fingerprint
from tests.support.tiny_deepseek import random_tensors, tiny_deepseek_spec
from tests.support.tiny_model import tiny_runner, tiny_spec

SPEC = replace(tiny_spec(), head_dim=32, intermediate_size=256)  # 4 heads: 4 slabs of 32 elements or of 64
LATENT = tiny_deepseek_spec()  # 5 heads
assert LATENT.mla is not None
assert LATENT.moe is not None
MOE = replace(LATENT.moe, intermediate_size=160, num_experts=4)
LATENT = replace(LATENT, intermediate_size=320, mla=replace(LATENT.mla, value_dim=32), moe=MOE)
EXPERTS = replace(SPEC, moe=replace(MOE, intermediate_size=128))
OSS = replace(EXPERTS, clamp=(1.7, 7.0))

Layer = tuple[Shapes, Callable[[WeightBag], object]]
LAYERS: dict[str, Layer] = {
    "llama": (llama_shapes.layer_shapes(SPEC), lambda bag: DecoderLayer(SPEC, bag, "l", 0)),
    "gemma3": (gemma3.layer_shapes(SPEC), lambda bag: gemma3.Gemma3Layer(SPEC, bag, "l", 0, 0, None)),
    "moe dense": (
        moe_decoder.layer_shapes(EXPERTS, 0),
        lambda bag: moe_decoder.MoeDecoderLayer(EXPERTS, bag, "l", 0, 0),
    ),
    "moe": (moe_decoder.layer_shapes(EXPERTS, 1), lambda bag: moe_decoder.MoeDecoderLayer(EXPERTS, bag, "l", 1, 0)),
    "deepseek dense": (
        deepseek_shapes.layer_shapes(LATENT, 0),
        lambda bag: DeepseekDecoderLayer(LATENT, bag, "l", 0, 0),
    ),
    "deepseek": (deepseek_shapes.layer_shapes(LATENT, 1), lambda bag: DeepseekDecoderLayer(LATENT, bag, "l", 1, 0)),
    "gpt_oss": (
        gpt_oss.layer_shapes(OSS, False),
        lambda bag: gpt_oss.GptOssLayer(OSS, bag, "l", 0, 0, torch.bfloat16),
    ),
}
SLABS = {"deepseek dense": 5, "deepseek": 5}


def slabs_within(thing: object) -> dict[str, int]:
    """The slabs of every linear below ``thing`` by its path."""
    if isinstance(thing, Linear):
        return {"": thing.slabs}
    parts: dict[object, object] = {}
    if isinstance(thing, list | tuple):
        parts |= enumerate(thing)
    elif type(thing).__module__.startswith("paceline."):
        parts.update(vars(thing).items())
    return {f"{name}.{path}": n for name, part in parts.items() for path, n in slabs_within(part).items()}


@pytest.mark.parametrize("name", LAYERS)
def test_row_parallel_products_have_the_models_slabs(name: str) -> None:
    """Mutants: experts with slabs, shared experts without."""
    shapes, make = LAYERS[name]
    bag = WeightBag({f"l.{key}": value for key, value in random_tensors(shapes, torch.bfloat16, 0).items()})
    found = slabs_within(make(bag))
    assert len(found) >= 4
    for path, slabs in found.items():
        shared = path.endswith(("o_proj.", "down_proj.")) and "_experts" not in path
        assert slabs == (SLABS.get(name, 4) if shared else 1), path
    assert sum(slabs > 1 for slabs in found.values()) == (1 if name == "gpt_oss" else 2)


def test_nodes_with_unlike_sums_do_not_pair() -> None:
    """A node of an older build says nothing of its sums."""
    own = fingerprint_of(tiny_runner())
    older = Fingerprint()
    older.CopyFrom(own)
    older.ClearField("sums")
    for prefill, decode in ((own, older), (older, own)):
        with pytest.raises(PairingRefused, match="sums='slab4'") as refused:
            check_pairing(prefill, decode)
        assert refused.value.differing == ["sums"]
