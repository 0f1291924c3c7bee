"""Bytes of latent rows: the formula of algorithms.md H4, and what gather and scatter carry."""

from __future__ import annotations

import pytest
import torch

from paceline.kvcache.layout import KvLayer, KvLayout, LayerKind, LayerOwner
from paceline.kvcache.pool import KvPool
from tests.support.pool_rows import write_rows

LATENT = 576


def layout(target: int, draft: int) -> KvLayout:
    layers = [KvLayer(LayerKind.MLA, owner, 1, LATENT) for owner in (LayerOwner.TARGET, LayerOwner.DRAFT)]
    return KvLayout((layers[0],) * target + (layers[1],) * draft, torch.bfloat16)


def test_bytes_of_deepseek_v3() -> None:
    """H4: 61 target layers, 70,272 bytes a token; one MTP module, 1,152."""
    whole = layout(61, 1)
    assert whole.token_bytes(LayerOwner.TARGET) == 61 * LATENT * 2 == 70_272
    assert whole.token_bytes(LayerOwner.DRAFT) == LATENT * 2 == 1_152
    assert whole.text() == "bfloat16 target:mla:1x576*61 draft:mla:1x576*1"


@pytest.mark.parametrize(("source_page", "dest_page"), [(16, 64), (1, 16)])
def test_gather_and_scatter(source_page: int, dest_page: int) -> None:
    """Between pools of unlike page sizes, target and draft layers apart; the bytes are the formula's."""
    shape = layout(3, 2)
    source, dest = (KvPool(shape, 128 // page, page) for page in (source_page, dest_page))
    tokens = 37
    from_slots, to_slots = (torch.randperm(128)[:tokens] for _ in range(2))
    rows = [torch.randn(tokens, LATENT).to(torch.bfloat16) for _ in shape.layers]
    for layer, written in enumerate(rows):
        write_rows(source, layer, from_slots, written)
    for owner in LayerOwner:
        layers = shape.layer_range(owner)
        wire = source.gather(layers, from_slots)
        assert wire.numel() * wire.itemsize == tokens * shape.token_bytes(owner)
        assert torch.equal(wire.view(len(layers), tokens, LATENT), torch.stack([rows[layer] for layer in layers]))
        dest.scatter(layers, to_slots, wire)
    for layer, written in enumerate(rows):
        assert torch.equal(dest.read_latent(layer, to_slots), written)


def test_copy_slots_reads_before_it_writes() -> None:
    """Compaction of an accepted path: overlapping moves of latent rows."""
    pool = KvPool(layout(2, 0), 4, 16)
    rows = torch.randn(8, LATENT).to(torch.bfloat16)
    for layer in range(2):
        write_rows(pool, layer, torch.arange(8), rows)
    pool.copy_slots(range(2), torch.tensor([0, 2, 5]), torch.tensor([0, 1, 2]))
    for layer in range(2):
        assert torch.equal(pool.read_latent(layer, torch.arange(3)), rows[[0, 2, 5]])
