"""What a deployment keeps in Redis about its requests, sealed: who has no secret of the deployment learns its length.

Each write has a key of its own, which HMAC-SHA256 makes from the deployment's key and 16 random bytes, so no number of
writes wears a key out. AES-256-GCM binds the content to the name that it is kept under: an entry that was changed, or
put under another name, is refused. An older entry of the same name is not: whoever writes to Redis can bring that back.
"""

from __future__ import annotations

import hashlib
import hmac
import os

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

MAGIC = b"\x00PLS1"  # no protobuf message begins with a zero byte
SALT_BYTES, TAG_BYTES = 16, 16
OVERHEAD_BYTES = len(MAGIC) + SALT_BYTES + TAG_BYTES
_NONCE = bytes(12)  # a key seals once


class NotSealed(ValueError):
    """What was found was not sealed by this deployment: ``plain`` where nothing sealed it, else ``tampered``."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Seal:
    """Seals and opens with the key of a deployment."""

    def __init__(self, key: str) -> None:
        """key: derived from the deployment's secret (`Secret.journal_key`)."""
        self._key = key.encode()

    def name(self, purpose: str, known: bytes) -> str:
        """Names what is kept of ``known``; nobody without the key can try out what he guesses. 64 hex digits."""
        return hmac.new(self._key, b"name " + purpose.encode() + b"\0" + known, hashlib.sha256).hexdigest()

    def seal(self, name: str, content: bytes) -> bytes:
        """``content`` as it is kept under ``name``; OVERHEAD_BYTES longer."""
        salt = os.urandom(SALT_BYTES)
        return MAGIC + salt + self._cipher(salt).encrypt(_NONCE, content, name.encode())

    def open(self, name: str, sealed: bytes) -> bytes:
        """The content. Raises NotSealed."""
        if not sealed.startswith(MAGIC):
            raise NotSealed("plain")
        salt, rest = sealed[len(MAGIC) : len(MAGIC) + SALT_BYTES], sealed[len(MAGIC) + SALT_BYTES :]
        if len(rest) < TAG_BYTES:
            raise NotSealed("tampered")
        try:
            return self._cipher(salt).decrypt(_NONCE, rest, name.encode())
        except InvalidTag:
            raise NotSealed("tampered") from None

    def _cipher(self, salt: bytes) -> AESGCM:
        return AESGCM(hmac.new(self._key, b"seal " + salt, hashlib.sha256).digest())
