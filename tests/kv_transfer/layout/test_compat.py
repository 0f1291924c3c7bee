"""Fingerprints: what must agree, and what the refusal says."""

from __future__ import annotations

import pytest
import torch

from kv_transfer.layout.compat import check_pairing, differing_fields
from paceline.errors import PairingRefused
from paceline.kvcache.layout import KvLayer, KvLayout, LayerKind, LayerOwner
from paceline.v1.handoff_pb2 import Fingerprint

TARGET = KvLayer(LayerKind.GQA, LayerOwner.TARGET, 3, 64)
DRAFT = KvLayer(LayerKind.GQA, LayerOwner.DRAFT, 3, 64)
LAYOUT = KvLayout((TARGET, TARGET, DRAFT), torch.bfloat16)


def fingerprint(changes: dict[str, str | int] | None = None, layout: KvLayout = LAYOUT) -> Fingerprint:
    result = Fingerprint(
        protocol=1,
        model="m",
        weights="w",
        dtype="bf16",
        layout=layout.text(),
        hidden_size=576,
        handoff_mode="draft_kv",
        kernels="avx512",
        drafter="mtp",
        drafter_modules=1,
        drafter_weights="d",
    )
    for name, value in (changes or {}).items():
        setattr(result, name, value)
    return result


def test_layout_text_is_canonical() -> None:
    assert LAYOUT.text() == "bfloat16 target:gqa:3x64*2 draft:gqa:3x64*1"
    mla = KvLayout((KvLayer(LayerKind.MLA, LayerOwner.TARGET, 1, 576),) * 61, torch.float32)
    assert mla.text() == "float32 target:mla:1x576*61"


@pytest.mark.parametrize(
    "other",
    [
        KvLayout((TARGET, TARGET, DRAFT), torch.float32),
        KvLayout((TARGET, TARGET), torch.bfloat16),
        KvLayout((TARGET, DRAFT, DRAFT), torch.bfloat16),
        KvLayout((TARGET, TARGET, KvLayer(LayerKind.GQA, LayerOwner.DRAFT, 1, 192)), torch.bfloat16),
        KvLayout((TARGET, TARGET, KvLayer(LayerKind.MLA, LayerOwner.DRAFT, 3, 64)), torch.bfloat16),
    ],
)
def test_layouts_that_differ_are_refused(other: KvLayout) -> None:
    assert differing_fields(fingerprint(), fingerprint(layout=other)) == ["layout"]


def test_equal_fingerprints_pair() -> None:
    check_pairing(fingerprint(), fingerprint())


@pytest.mark.parametrize("field", [field.name for field in Fingerprint.DESCRIPTOR.fields])
def test_every_field_is_compared(field: str) -> None:
    value: str | int = 99 if isinstance(getattr(fingerprint(), field), int) else "other"
    with pytest.raises(PairingRefused) as refused:
        check_pairing(fingerprint(), fingerprint({field: value}))
    assert refused.value.differing == [field]
    text = str(refused.value)
    assert f"{field}={value!r}" in text  # decode's
    assert f"{field}={getattr(fingerprint(), field)!r}" in text  # prefill's


def test_fields_at_their_default_are_printed_too() -> None:
    with pytest.raises(PairingRefused, match="drafter_modules=0"):
        check_pairing(fingerprint({"drafter_modules": 0}), fingerprint())
