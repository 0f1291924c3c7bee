"""What two nodes must agree on before a byte crosses, and the refusal when they do not."""

from __future__ import annotations

from paceline.errors import PairingRefused
from paceline.v1.handoff_pb2 import Fingerprint


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
