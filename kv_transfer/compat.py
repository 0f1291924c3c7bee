"""What two nodes must agree on before a byte crosses, and the refusal when they do not."""

from __future__ import annotations

from itertools import groupby

from paceline.errors import PairingRefused
from paceline.kvcache.layout import KvLayer, KvLayout, LayerKind
from paceline.v1.handoff_pb2 import Fingerprint

PROTOCOL = 1


def layout_text(layout: KvLayout) -> str:
    """Canonical text of a layout: equal if and only if the bytes of a row mean the same.

    For example ``bfloat16 target:gqa:3x64*30 draft:gqa:3x64*1``; page size is not part of it.
    """
    runs = (f"{_layer_text(layer)}*{len(list(run))}" for layer, run in groupby(layout.layers))
    return " ".join([str(layout.dtype).removeprefix("torch."), *runs])


def _layer_text(layer: KvLayer) -> str:
    heads = 1 if layer.kind is LayerKind.MLA else layer.num_kv_heads
    return f"{layer.owner}:{layer.kind}:{heads}x{layer.head_dim}"


def make_fingerprint(
    *,
    model: str,
    weights: str,
    dtype: str,
    layout: KvLayout,
    hidden_size: int,
    handoff_mode: str,
    kernels: str,
    drafter: str = "none",
    drafter_modules: int = 0,
    drafter_weights: str = "",
) -> Fingerprint:
    """The fingerprint of a node; fields as in handoff.proto. The draft length and the page size are not in it: they
    may differ between two nodes."""
    return Fingerprint(
        protocol=PROTOCOL,
        model=model,
        weights=weights,
        dtype=dtype,
        layout=layout_text(layout),
        drafter=drafter,
        drafter_modules=drafter_modules,
        drafter_weights=drafter_weights,
        hidden_size=hidden_size,
        handoff_mode=handoff_mode,
        kernels=kernels,
    )


def fingerprint_text(fingerprint: Fingerprint) -> str:
    """Every field, defaults too, on one line."""
    return " ".join(f"{name}={getattr(fingerprint, name)!r}" for name in _field_names())


def differing_fields(a: Fingerprint, b: Fingerprint) -> list[str]:
    """Names of the fields that differ, in the order of the message."""
    return [name for name in _field_names() if getattr(a, name) != getattr(b, name)]


def check_pairing(prefill: Fingerprint, decode: Fingerprint) -> None:
    """PairingRefused, with both fingerprints printed, unless every field agrees."""
    if differing := differing_fields(prefill, decode):
        raise PairingRefused(differing, fingerprint_text(prefill), fingerprint_text(decode))


def _field_names() -> list[str]:
    return [field.name for field in Fingerprint.DESCRIPTOR.fields]
