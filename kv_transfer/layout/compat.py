"""What two nodes must agree on before a byte crosses, and the refusal when they do not.

One disagreement can be allowed: with ``--handoff-dtype-cast`` a float32 prefill node may serve a bfloat16 decode node.
Its rows are then rounded before they leave, so what arrives always has the decode node's dtype. The text is then no
longer that of a single node, hence the option.
"""

from __future__ import annotations

from dataclasses import replace

from kv_transfer.layout.reshard import CASTS
from paceline.errors import PairingRefused
from paceline.kvcache.layout import KvLayout, LayerOwner
from paceline.v1.handoff_pb2 import Fingerprint


def fingerprint_text(fingerprint: Fingerprint) -> str:
    """Every field, defaults too, on one line."""
    return " ".join(f"{name}={getattr(fingerprint, name)!r}" for name in _field_names())


def differing_fields(a: Fingerprint, b: Fingerprint) -> list[str]:
    """Names of the fields that differ, in the order of the message."""
    return [name for name in _field_names() if getattr(a, name) != getattr(b, name)]


def check_pairing(prefill: Fingerprint, decode: Fingerprint, *, dtype_cast: bool = False) -> None:
    """PairingRefused, with both fingerprints printed, unless every field agrees.

    ``dtype_cast``: the dtypes, of weights and of KV rows, may differ as `CASTS` lists. Both nodes ask, so that neither
    casts unless its own operator allowed it.
    """
    differing = differing_fields(prefill, decode)
    if not differing or (dtype_cast and _only_cast(prefill, decode)):
        return
    raise PairingRefused(differing, fingerprint_text(prefill), fingerprint_text(decode))


def decode_layout(prefill: KvLayout, decode: Fingerprint) -> KvLayout:
    """The layout of a decode node that was paired with, given one's own: the same layers, of the dtype that crosses.
    PairingRefused when its layout can be neither that nor a cast of it."""
    for dtype in (prefill.dtype, *(dest for source, dest in CASTS if source is prefill.dtype)):
        layout = replace(prefill, dtype=dtype)
        if layout.text() == decode.layout:
            return layout
    raise PairingRefused(["layout"], prefill.text(), decode.layout)


def handoff_layout(held: KvLayout, mine: Fingerprint) -> KvLayout:
    """What of a pool may cross, as a node's own fingerprint says: the drafter's layers only where their rows do."""
    target = held.layer_range(LayerOwner.TARGET)
    alone = held.with_layers(held.layers[target.start : target.stop])
    return alone if alone.text() == mine.layout else held


def _only_cast(prefill: Fingerprint, decode: Fingerprint) -> bool:
    """The fingerprints agree once prefill's rows are cast to decode's dtype. Codes are not cast."""
    if prefill.kv_dtype == "int8":
        return False
    cast = Fingerprint()
    cast.CopyFrom(prefill)
    cast.dtype, cast.results = decode.dtype, decode.results  # the bits of another dtype are others
    cast.layout = prefill.layout.replace(prefill.dtype, decode.dtype, 1)  # the text begins with the dtype
    allowed = {tuple(str(dtype).removeprefix("torch.") for dtype in pair) for pair in CASTS}
    return (prefill.dtype, decode.dtype) in allowed and cast == decode


def _field_names() -> list[str]:
    return [field.name for field in Fingerprint.DESCRIPTOR.fields]
