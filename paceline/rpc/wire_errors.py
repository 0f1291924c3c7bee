"""Errors to gRPC status and back. No torch here: clients import it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import grpc

from paceline.errors import (
    ConfigError,
    DeadlineExceeded,
    HandoffFailed,
    InvalidRequest,
    NodeUnavailable,
    NotFound,
    Overloaded,
    PacelineError,
    PairingRefused,
    PermissionDenied,
    RequestCancelled,
    Unauthenticated,
)

Metadata = tuple[tuple[str, str], ...]

FIELD_KEY = "paceline-field"
RETRY_AFTER_KEY = "retry-after-ms"
TOLD_KEY = "paceline-told"  # comes with a status that a router has set; what gRPC says of a lost connection lacks it
MAX_DETAILS_BYTES = 6 * 1024  # as they travel; gRPC drops a call whose trailing metadata is above 8 to 16 KiB

_STATUS: tuple[tuple[type[PacelineError], grpc.StatusCode], ...] = (
    (InvalidRequest, grpc.StatusCode.INVALID_ARGUMENT),
    (Unauthenticated, grpc.StatusCode.UNAUTHENTICATED),
    (PermissionDenied, grpc.StatusCode.PERMISSION_DENIED),
    (ConfigError, grpc.StatusCode.FAILED_PRECONDITION),
    (Overloaded, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (NodeUnavailable, grpc.StatusCode.UNAVAILABLE),
    (PairingRefused, grpc.StatusCode.FAILED_PRECONDITION),
    (NotFound, grpc.StatusCode.NOT_FOUND),
    (HandoffFailed, grpc.StatusCode.ABORTED),
    (RequestCancelled, grpc.StatusCode.CANCELLED),
    (DeadlineExceeded, grpc.StatusCode.DEADLINE_EXCEEDED),
)


def status_for(error: PacelineError) -> tuple[grpc.StatusCode, str]:
    """Status and details that stand for ``error`` on the wire."""
    for kind, code in _STATUS:
        if isinstance(error, kind):
            return code, _clipped(str(error))
    return grpc.StatusCode.INTERNAL, _clipped(str(error))


def _clipped(details: str) -> str:
    """``details`` as far as they fit: every byte but printable ASCII travels as three (``%E2``)."""
    room = MAX_DETAILS_BYTES
    for i, character in enumerate(details):
        room -= 1 if " " <= character <= "~" and character != "%" else 3 * len(character.encode("utf-8", "replace"))
        if room < 0:
            return f"{details[:i]}..."
    return details


def metadata_for(error: PacelineError) -> Metadata:
    """Trailing metadata: the wrong field's name, when to come back, or that somebody said so."""
    if isinstance(error, InvalidRequest):
        return ((FIELD_KEY, error.field),)
    if isinstance(error, Overloaded):
        return ((RETRY_AFTER_KEY, str(int(error.retry_after_s * 1000))),)
    return ((TOLD_KEY, "1"),) if isinstance(error, NodeUnavailable) else ()


def error_from_status(code: grpc.StatusCode, details: str, metadata: Iterable[Any] = ()) -> PacelineError | None:
    """The error that a status stands for; None when it is none of Paceline's (the connection's own, a bug)."""
    found = {key: value for key, value in metadata if isinstance(value, str)}
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        field = found.get(FIELD_KEY) or details.partition(":")[0]
        return InvalidRequest(field, details.removeprefix(f"{field}: "))
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return Overloaded(details, int(found.get(RETRY_AFTER_KEY, "1000")) / 1000)
    if code is grpc.StatusCode.FAILED_PRECONDITION:
        return PairingRefused.from_text(details)
    simple: dict[grpc.StatusCode, type[PacelineError]] = {
        grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
        grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
        grpc.StatusCode.UNAVAILABLE: NodeUnavailable,
        grpc.StatusCode.NOT_FOUND: NotFound,
        grpc.StatusCode.ABORTED: HandoffFailed,
        grpc.StatusCode.CANCELLED: RequestCancelled,
        grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    }
    return simple[code](details) if code in simple else None


def error_from_rpc(error: grpc.RpcError, peer: str = "") -> PacelineError:
    """The error that a failed call stands for; ``peer`` is put in front of what a reader could not place otherwise."""
    details = error.details() or error.code().name
    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in details:  # gRPC's own words
        return InvalidRequest("request", f"the message is too large ({details})")
    known = error_from_status(error.code(), details, error.trailing_metadata() or ())
    if isinstance(known, InvalidRequest) or (known is not None and not peer):
        return known
    prefix = f"{peer}: " if peer else ""
    if known is None:
        return PacelineError(f"{prefix}{error.code().name}: {details}")
    return error_from_status(error.code(), prefix + details, error.trailing_metadata() or ()) or known
