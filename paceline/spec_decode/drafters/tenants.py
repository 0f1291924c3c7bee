"""What drafters learn from finished text is kept apart by tenant: one tenant's text must not show in another's speed.

The scope is the request's ``cache_salt``, the same as the prefix cache's.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Generic, TypeVar

from paceline.spec_decode.drafters.copying import BOUNDARY, text_of
from paceline.spec_decode.sequence import Sequence

MIN_LEARNT_TOKENS = 2  # a shorter output has nothing that follows anything
T = TypeVar("T")


class TenantCache(Generic[T]):
    """One store per tenant, at most ``max_tenants`` of them; the least recently used goes first."""

    def __init__(self, make: Callable[[], T], max_tenants: int) -> None:
        if max_tenants < 1:
            raise ValueError(f"max_tenants must be at least 1, got {max_tenants}")
        self._make, self._max_tenants = make, max_tenants
        self._stores: dict[str, T] = {}  # least recently used first

    def __len__(self) -> int:
        return len(self._stores)

    def find(self, salt: str) -> T | None:
        """The tenant's store if it has one: asking makes none, so that a reader evicts nobody."""
        store = self._stores.pop(salt, None)
        if store is not None:
            self._stores[salt] = store
        return store

    def get(self, salt: str) -> T:
        """The tenant's store, made at need."""
        store = self.find(salt)
        if store is None:
            store = self._stores[salt] = self._make()
            if len(self._stores) > self._max_tenants:
                del self._stores[next(iter(self._stores))]
        return store


class FinishedTexts:
    """The newest finished texts, whole ones, ``max_tokens`` tokens (a boundary each counted) at most."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.text = ""  # every text followed by BOUNDARY

    def add(self, token_ids: Seq[int]) -> None:
        """Keep a text, or its end when it alone is past the bound; the oldest ones make room."""
        self.text += text_of(token_ids[max(0, len(token_ids) - self.max_tokens + 1) :]) + BOUNDARY
        excess = len(self.text) - self.max_tokens
        if excess > 0:
            self.text = self.text[self.text.index(BOUNDARY, excess - 1) + 1 :]


class TenantOutputs:
    """What each tenant was answered, for one drafter: ``max_tokens`` tokens a tenant (4 bytes each), 0 for none."""

    def __init__(self, drafter: str, max_tokens: int, max_tenants: int) -> None:
        if max_tokens < 0:
            raise ValueError(f"the number of shared tokens must be at least 0, got {max_tokens}")
        self._learnt = f"{drafter} learnt"  # marks a sequence, in its memory
        self._max_tokens = max_tokens
        self.tenants = TenantCache(lambda: FinishedTexts(max_tokens), max_tenants)

    def text(self, seq: Sequence) -> str:
        """The finished outputs of the sequence's tenant."""
        texts = self.tenants.find(seq.request.cache_salt)
        return texts.text if texts is not None else ""

    def learn(self, seq: Sequence) -> None:
        """Keep a finished sequence's output, once."""
        output = seq.output_token_ids
        if self._learnt in seq.memory or len(output) < MIN_LEARNT_TOKENS or self._max_tokens <= MIN_LEARNT_TOKENS:
            return
        seq.memory[self._learnt] = True
        self.tenants.get(seq.request.cache_salt).add(output)
