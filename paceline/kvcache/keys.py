"""How the pages of a prompt are named: one definition for a node's prefix cache and for routers that ask where a
prompt is cached. No torch here.

Two nodes give a page the same key exactly when their schemes are equal and the page's rows depend on the same: salt,
tokens up to its end, and the ``lookahead`` tokens after it (algorithms.md E7). Keys are the same in every process:
nothing of them depends on Python's own hashing.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import Any

KEY_VERSION = 1  # of what ``KeyScheme.keys`` computes
KEY_BYTES = 16
_TOKEN_BYTES = array("i").itemsize  # int32


def _hash(first: bytes, second: bytes) -> bytes:
    """KEY_BYTES that determine both; each is preceded by its length, so that their border counts too."""
    lengths = len(first).to_bytes(8, "little"), len(second).to_bytes(8, "little")
    return blake2b(b"".join((lengths[0], first, lengths[1], second)), digest_size=KEY_BYTES).digest()


@dataclass(frozen=True)
class KeyScheme:
    """Everything but salt and tokens that a page's key depends on.

    lookahead: tokens after a page that its draft rows depend on. namespace: whatever else its rows depend on (model,
    revision, adapter, drafter).
    """

    page_size: int
    lookahead: int
    namespace: str
    version: int = KEY_VERSION

    def __post_init__(self) -> None:
        if self.page_size < 1 or self.lookahead < 0:
            raise ValueError(f"bad page_size {self.page_size} or lookahead {self.lookahead}")

    def num_pages(self, num_tokens: int, max_tokens: int) -> int:
        """Whole pages from position 0 that a prompt of ``num_tokens`` can be asked for, at most ``max_tokens`` of it:
        a page whose lookahead runs past the prompt has no key."""
        return max(0, min(max_tokens, num_tokens - self.lookahead)) // self.page_size

    def keys(self, token_ids: Sequence[int], salt: str, num_pages: int) -> Iterator[bytes]:
        """Keys of the first ``num_pages`` pages, hashed as they are asked for."""
        size, ahead = self.page_size * _TOKEN_BYTES, self.lookahead * _TOKEN_BYTES
        tokens = array("i", token_ids[: num_pages * self.page_size + self.lookahead]).tobytes()
        chain = _hash(self.namespace.encode(), salt.encode())
        for end in range(size, num_pages * size + 1, size):
            chain = _hash(chain, tokens[end - size : end])
            yield _hash(chain, tokens[end : end + ahead])

    def to_json(self) -> str:
        """The scheme as a router reads it."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, body: str | bytes) -> KeyScheme:
        """Raises ValueError, also for a version that this process cannot compute."""
        content: Any = json.loads(body)
        try:
            scheme = cls(**content)
        except TypeError as error:
            raise ValueError(f"not a key scheme: {error}") from None
        if scheme.version != KEY_VERSION:
            raise ValueError(f"keys of version {scheme.version}, this is {KEY_VERSION}")
        return scheme
