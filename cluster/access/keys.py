"""API keys: the file that lists them, checked as a whole and read again when it changes.

A key is ``pl-`` and 256 random bits, so a plain SHA-256 of it can be kept: nobody finds a key of that size by trying.
The file never has a key itself. What was read stays in use until a later version of the file is wholly right.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import secrets
from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AwareDatetime, Field, ValidationError, field_validator, model_validator

from cluster.contract.generation import MAX_NAME_CHARS, MAX_PRIORITY
from paceline.engine_config import Frozen
from paceline.errors import ConfigError, Unauthenticated

log = logging.getLogger(__name__)

PREFIX = "pl-"
KEY_BYTES = 32
MAX_KEY_CHARS = 256  # of what a client sends as its key
MAX_FILE_BYTES = 4 * 2**20
POLL_S = 1.0

Scope = Literal["infer", "metrics", "operator"]
Limit = Annotated[int, Field(ge=1)] | None
Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS, pattern=r"^[A-Za-z0-9._:=/+@-]+$")]
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class Limits(Frozen):
    """What a key may use. None: as much as there is."""

    requests_per_minute: Limit = None
    """Requests of every kind; as many may come at once."""

    tokens_per_minute: Limit = None
    """Tokens of prompts and outputs. ``max_tokens`` is taken first; what was not generated is given back."""

    concurrency: Limit = None
    """Sequences that run or wait at once."""

    tokens_in_flight: Limit = None
    """Tokens of prompt and ``max_tokens`` of all sequences that run or wait at once: the KV cache they may need."""

    budget_tokens: Limit = None
    """Tokens in all. A key that has used them up is refused."""


class Key(Limits):
    """One key, as the file has it."""

    id: Name
    """Names the key in logs."""

    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """The key's SHA-256 in hexadecimal digits."""

    tenant: Name
    """Whom the key belongs to: scope of the prefix cache, of fairness and of what is kept."""

    models: tuple[str, ...] = ("*",)
    """Models that it may ask; ``*`` is any."""

    priorities: tuple[int, int] = (-MAX_PRIORITY, MAX_PRIORITY)
    """Lowest and highest priority that its requests may have."""

    scopes: tuple[Scope, ...] = ("infer",)
    """infer: generate and tokenize. metrics: read /metrics. operator: traces of all tenants, reflection, node roles."""

    created: AwareDatetime | None = None
    """When it was made."""

    expires: AwareDatetime | None = None
    """When it ends; None: never."""

    revoked: AwareDatetime | None = None
    """When it was revoked; None: it was not."""

    @field_validator("priorities")
    @classmethod
    def _in_order(cls, value: tuple[int, int]) -> tuple[int, int]:
        if not -MAX_PRIORITY <= value[0] <= value[1] <= MAX_PRIORITY:
            raise ValueError(f"must be [lowest, highest] within -{MAX_PRIORITY} and {MAX_PRIORITY}")
        return value


class KeyList(Frozen):
    """The content of the file."""

    keys: tuple[Key, ...] = ()

    @model_validator(mode="after")
    def _distinct(self) -> KeyList:
        for what in ("id", "sha256"):
            seen = Counter(getattr(key, what) for key in self.keys)
            if double := next((value for value, times in seen.items() if times > 1), None):
                raise ValueError(f"two keys have the {what} {double}")
        return self


def new_key() -> str:
    """A key that nobody guesses."""
    return PREFIX + secrets.token_urlsafe(KEY_BYTES)


def digest(key: str) -> str:
    """What the file keeps of a key."""
    return hashlib.sha256(key.encode()).hexdigest()


def parse_keys(text: str, where: str) -> tuple[Key, ...]:
    """The keys of a file's text. Raises ConfigError naming the first entry that is wrong."""
    try:
        content = yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader
    except yaml.YAMLError as error:
        raise ConfigError("api_keys", f"{where} is not YAML: {error}") from None
    try:
        return KeyList.model_validate({} if content is None else content).keys
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "the file"
        raise ConfigError("api_keys", f"{where}: {place}: {first['msg']}") from None


def read_keys(path: Path) -> tuple[Key, ...]:
    """The keys of a file. Raises ConfigError."""
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MAX_FILE_BYTES + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("api_keys", f"{path} cannot be read: {error}") from None
    if len(text) > MAX_FILE_BYTES:
        raise ConfigError("api_keys", f"{path} is larger than {MAX_FILE_BYTES} bytes")
    return parse_keys(text, str(path))


class KeyFile:
    """The keys of a file as it is now. ``start`` follows its changes; ``close`` ends that."""

    def __init__(self, path: Path, poll_s: float = POLL_S) -> None:
        """Reads it. Raises ConfigError. poll_s: seconds between two looks for a change."""
        self._path, self._poll_s = path, poll_s
        self._seen = self._version()
        self._keys: dict[str, Key] = {}
        self._task: asyncio.Task[None] | None = None
        self._replace(read_keys(path))

    def find(self, sent: str | None) -> Key:
        """The key that a client sent. Raises Unauthenticated; its text never repeats what was sent."""
        if not sent:
            raise Unauthenticated("an API key is needed: send the header 'authorization: Bearer KEY'")
        found = digest(sent[:MAX_KEY_CHARS])
        key = self._keys.get(found)
        if key is None or not hmac.compare_digest(key.sha256, found):
            raise Unauthenticated("the API key is not known here")
        if key.revoked is not None:
            raise RefusedKey(key.id, "was revoked")
        if key.expires is not None and key.expires <= datetime.now(UTC):
            raise RefusedKey(key.id, "has expired")
        return key

    def start(self) -> None:
        """Follow the file, on the running event loop."""
        self._task = asyncio.create_task(self._follow(), name="api keys")

    async def close(self) -> None:
        """Follow it no more. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=self._poll_s + 1.0)

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(self._poll_s)
            version = self._version()
            if version == self._seen:
                continue
            try:
                self._replace(await asyncio.to_thread(read_keys, self._path))
                log.warning("%s was read again: %d keys", self._path, len(self._keys))
            except Exception as error:  # whatever is wrong with it, the keys of before stay
                log.error("THE API KEYS ARE NOT CHANGED: the new file is wrong, the keys of before stay: %s", error)
            self._seen = version

    def _replace(self, keys: Iterable[Key]) -> None:
        self._keys = {key.sha256: key for key in keys}

    def _version(self) -> tuple[int, int, int] | None:
        try:
            at = self._path.stat()
        except OSError:
            return None
        return at.st_mtime_ns, at.st_size, at.st_ino


class RefusedKey(Unauthenticated):
    """A key that was valid once. ``key_id`` names it."""

    def __init__(self, key_id: str, why: str) -> None:
        super().__init__(f"the API key {why}")
        self.key_id = key_id

    def __reduce__(self) -> tuple[type[Unauthenticated], tuple[str]]:
        return Unauthenticated, (str(self),)
