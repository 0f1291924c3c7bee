"""The error tree.

PacelineError
├── InvalidRequest      the caller's input is wrong; names the field       INVALID_ARGUMENT / HTTP 400
├── Unauthenticated     no valid API key                                   UNAUTHENTICATED / HTTP 401
├── PermissionDenied    the API key does not allow it                      PERMISSION_DENIED / HTTP 403
├── ConfigError         an option of the deployment is wrong; names the key
├── Overloaded          no room now; says when to come back                RESOURCE_EXHAUSTED / HTTP 429
├── NodeUnavailable     a node is gone or draining                         UNAVAILABLE / HTTP 503
├── PairingRefused      two nodes do not fit; carries both fingerprints    FAILED_PRECONDITION
├── NotFound            what is asked for is not known (any more)          NOT_FOUND
├── HandoffFailed       a transfer did not finish; nothing of it is used   ABORTED
├── RequestCancelled    the client went away                               CANCELLED
├── IncompleteAnswer    what was to become an object ended too early; holds its text
└── DeadlineExceeded    a bounded wait ran out                             DEADLINE_EXCEEDED / HTTP 504
"""

from __future__ import annotations

MAX_QUOTED_CHARS = 100


def quoted(text: str) -> str:
    """What a client sent, as an error repeats it: in quotes, and no more than shows which it was."""
    return repr(text if len(text) <= MAX_QUOTED_CHARS else f"{text[:MAX_QUOTED_CHARS]}...")


class PacelineError(Exception):
    """Base of every error that Paceline raises on purpose."""


class InvalidRequest(PacelineError):
    """The request is wrong. ``field`` names what, e.g. ``sampling.top_p``; ``code`` is a word for programs, where
    clients know one for the fault."""

    def __init__(self, field: str, message: str, code: str = "") -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message
        self.code = code

    def __reduce__(self) -> tuple[type[InvalidRequest], tuple[str, str, str]]:
        return type(self), (self.field, self.message, self.code)


class Unauthenticated(PacelineError):
    """The deployment wants an API key, and none that is valid was sent."""


class PermissionDenied(PacelineError):
    """The API key is valid and does not allow what was asked."""


class ConfigError(PacelineError):
    """A deployment option is wrong. ``key`` names it."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(f"{key}: {message}")
        self.key = key
        self.message = message

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, str]]:
        return type(self), (self.key, self.message)


class Overloaded(PacelineError):
    """No room now; try again after ``retry_after_s`` seconds."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NodeUnavailable(PacelineError):
    """A node is gone, draining, or cannot be reached."""


def failed(what: str, error: Exception) -> PacelineError:
    """What a request is told of an error in ``what`` that it may have no part in. A node that says of itself that it is
    gone is no fault of the request, so routers try the next one for as long as it takes."""
    return error if isinstance(error, NodeUnavailable) else PacelineError(f"{what} failed: {error!r}")


class PairingRefused(PacelineError):
    """A prefill and a decode node do not fit together."""

    def __init__(self, differing: list[str], prefill_fingerprint: str, decode_fingerprint: str) -> None:
        super().__init__(
            f"pairing refused: {', '.join(differing)} differ\n"
            f"  prefill: {prefill_fingerprint}\n  decode:  {decode_fingerprint}"
        )
        self.differing = differing

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return PairingRefused.from_text, (str(self),)

    @classmethod
    def from_text(cls, text: str) -> PairingRefused:
        """A refusal that a peer reported."""
        error = cls.__new__(cls)
        Exception.__init__(error, text)
        error.differing = []
        return error


class NotFound(PacelineError):
    """What is asked for is not known, or not any more."""


class HandoffFailed(PacelineError):
    """A hand-off did not complete. Nothing that it wrote is used."""


class RequestCancelled(PacelineError):
    """The client went away or asked to stop."""


class IncompleteAnswer(PacelineError):
    """An answer that was to become an object is not whole. ``text`` is what there is of it, ``finish_reason`` why it
    ended."""

    def __init__(self, text: str, finish_reason: str) -> None:
        super().__init__(
            f"the answer is not whole after {len(text)} characters: it ended with finish_reason {finish_reason}"
            + (", so max_tokens is too small" if finish_reason == "length" else "")
        )
        self.text = text
        self.finish_reason = finish_reason

    def __reduce__(self) -> tuple[type[IncompleteAnswer], tuple[str, str]]:
        return type(self), (self.text, self.finish_reason)


class DeadlineExceeded(PacelineError):
    """A bounded wait ran out."""
