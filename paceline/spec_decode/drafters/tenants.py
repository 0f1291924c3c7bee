"""What drafters learn from finished text is kept apart by tenant: one tenant's text must not show in another's speed.

The scope is the request's ``cache_salt``, the same as the prefix cache's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

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
