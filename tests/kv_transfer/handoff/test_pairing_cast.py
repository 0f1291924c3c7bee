"""float32 prefill beside bfloat16 decode: refused unless both operators allow it, and nothing else is let through."""

from __future__ import annotations

import pytest
import torch

from kv_transfer.layout.compat import check_pairing, decode_layout
from paceline.config import NodeConfig, ServeConfig
from paceline.errors import PairingRefused
from paceline.kvcache.layout import KvLayer, KvLayout, LayerKind, LayerOwner
from paceline.v1.handoff_pb2 import Fingerprint

LAYERS = (KvLayer(LayerKind.GQA, LayerOwner.TARGET, 3, 64), KvLayer(LayerKind.MLA, LayerOwner.DRAFT, 1, 32))
CAST = ("dtype", "layout", "results")
FLOAT, BFLOAT = KvLayout(LAYERS, torch.float32), KvLayout(LAYERS, torch.bfloat16)


def fingerprint(layout: KvLayout, /, **changes: str | int) -> Fingerprint:
    """A node's fingerprint; ``changes`` replace fields."""
    fields: dict[str, str | int] = {
        "protocol": 1,
        "model": "bfloat16 float32",  # names are not dtypes
        "weights": "w",
        "dtype": str(layout.dtype).removeprefix("torch."),
        "layout": layout.text(),
        "drafter": "mtp",
        "hidden_size": 576,
        "kernels": "avx512",
    }
    return Fingerprint(**(fields | changes))  # type: ignore[arg-type]


def test_refused_with_both_fingerprints_unless_configured() -> None:
    with pytest.raises(PairingRefused) as refused:
        check_pairing(fingerprint(FLOAT), fingerprint(BFLOAT))
    assert refused.value.differing == ["dtype", "layout"]
    assert "prefill: protocol=1" in str(refused.value)
    assert "dtype='float32'" in str(refused.value)
    assert "dtype='bfloat16'" in str(refused.value)
    check_pairing(fingerprint(FLOAT), fingerprint(BFLOAT), dtype_cast=True)


def test_the_option_changes_nothing_for_equal_nodes() -> None:
    for layout in (FLOAT, BFLOAT):
        check_pairing(fingerprint(layout), fingerprint(layout), dtype_cast=True)


@pytest.mark.parametrize(
    ("prefill", "decode"), [(torch.bfloat16, torch.float32), (torch.float32, torch.float16), (torch.int8, torch.int32)]
)
def test_no_other_cast_is_let_through(prefill: torch.dtype, decode: torch.dtype) -> None:
    with pytest.raises(PairingRefused, match="dtype, layout differ"):
        check_pairing(fingerprint(KvLayout(LAYERS, prefill)), fingerprint(KvLayout(LAYERS, decode)), dtype_cast=True)


@pytest.mark.parametrize("field", [f.name for f in Fingerprint.DESCRIPTOR.fields if f.name not in CAST])
def test_every_other_field_must_still_agree(field: str) -> None:
    value: str | int = 99 if isinstance(getattr(Fingerprint(), field), int) else "other"
    with pytest.raises(PairingRefused) as refused:
        check_pairing(fingerprint(FLOAT), fingerprint(BFLOAT, **{field: value}), dtype_cast=True)
    assert field in refused.value.differing


def test_layouts_may_differ_in_their_dtype_only() -> None:
    fewer = KvLayout(LAYERS[:1], torch.bfloat16)
    with pytest.raises(PairingRefused):
        check_pairing(fingerprint(FLOAT), fingerprint(fewer), dtype_cast=True)
    with pytest.raises(PairingRefused):  # weights cast, but a pool that was not
        check_pairing(fingerprint(FLOAT), fingerprint(BFLOAT, layout=FLOAT.text()), dtype_cast=True)
    with pytest.raises(PairingRefused):  # and the other way round
        check_pairing(fingerprint(FLOAT), fingerprint(BFLOAT, dtype="float32"), dtype_cast=True)


def test_the_peer_s_layout() -> None:
    assert decode_layout(FLOAT, fingerprint(FLOAT)) == FLOAT
    assert decode_layout(FLOAT, fingerprint(BFLOAT)) == BFLOAT
    assert decode_layout(BFLOAT, fingerprint(BFLOAT)) == BFLOAT
    for mine, theirs in ((BFLOAT, FLOAT), (FLOAT, KvLayout(LAYERS[:1], torch.float32))):
        with pytest.raises(PairingRefused, match="layout differ"):
            decode_layout(mine, fingerprint(theirs))


def test_the_option_is_off_and_reaches_the_nodes() -> None:
    assert not ServeConfig().node(threads=1).handoff_dtype_cast
    assert ServeConfig(handoff_dtype_cast=True).node(threads=1).handoff_dtype_cast
    assert not NodeConfig().handoff_dtype_cast
