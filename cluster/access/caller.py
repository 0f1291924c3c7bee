"""Who asks: the API key of the call that is being answered, and what it lets him do.

The front door sets it for the task that answers; tasks which that one starts have it too. Without API keys there is no
caller, and a request's own words about its tenant count.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field, replace

from cluster.access.keys import Key, Scope
from cluster.contract.generation import GenerationRequest
from paceline.errors import InvalidRequest, PermissionDenied

SALT_CHARS = 32


def _unheard(reason: str, why: str) -> None:
    """Nobody counts what is refused."""


@dataclass(frozen=True)
class Caller:
    """The holder of a key."""

    key: Key
    peer: str  # the address that the call came from
    # Hears of what the call is refused after it was let in: the metric's reason, and words for the audit.
    refused: Callable[[str, str], None] = field(default=_unheard, repr=False, compare=False)

    @property
    def tenant(self) -> str:
        """Whom the key belongs to."""
        return self.key.tenant

    def check_scope(self, scope: Scope) -> None:
        """Raise PermissionDenied unless the key has the scope."""
        if scope not in self.key.scopes:
            raise PermissionDenied(f"the API key lacks the scope {scope!r}")

    def check_model(self, names: tuple[str, ...]) -> None:
        """Raise PermissionDenied unless the key is for the model, by one of its ``names``."""
        if not {"*", *names}.intersection(self.key.models):
            raise PermissionDenied(f"the API key is not for the model {names[0]!r}")


_CALLER: ContextVar[Caller | None] = ContextVar("caller", default=None)


def current() -> Caller | None:
    """Who asks; None without API keys."""
    return _CALLER.get()


def set_current(caller: Caller) -> None:
    """For the rest of this task, and for tasks that it starts."""
    _CALLER.set(caller)


def owner(named: str) -> str:
    """Whose the answers of the Responses API are. named: the tenant that the request names; it counts without keys
    alone."""
    caller = current()
    return named if caller is None else caller.tenant


def unknown_id(what: str) -> None:
    """Who asks named by its id a ``what`` that its tenant does not have: count it, and tell the audit.

    Another tenant's and one that never was are alike here, as they are in the answer: nothing tells that the id exists.
    """
    caller = current()
    if caller is not None:
        caller.refused("UnknownId", f"its tenant has no {what} of this id")


def with_salt(cache_salt: str) -> tuple[str, str]:
    """Tenant and prefix-cache salt of an HTTP request. cache_salt: the body's, which divides the tenant's own cache
    further; without keys it is the tenant."""
    caller = current()
    return (cache_salt, "") if caller is None else (caller.tenant, tenant_salt(caller.tenant, cache_salt))


def tenant_salt(tenant: str, cache_salt: str = "") -> str:
    """The salt of a tenant's prefix cache: no words of another tenant make the same one."""
    parts = f"{len(tenant)}:{tenant}:{cache_salt}"
    return hashlib.sha256(parts.encode("utf-8", "surrogatepass")).hexdigest()[:SALT_CHARS]


def as_asked_by(caller: Caller | None, request: GenerationRequest) -> GenerationRequest:
    """The request with the tenant, the salt and a priority of the key. Raises InvalidRequest when it names another
    tenant, PermissionDenied for a priority that the key does not have."""
    if caller is None:
        return request
    if request.tenant not in ("", caller.tenant):
        caller.refused("OtherTenant", "it names another tenant than the key's")
        raise InvalidRequest("tenant", "is not the tenant of the API key: leave it out")
    low, high = caller.key.priorities
    priority = min(max(low, 0), high) if request.priority == 0 else request.priority
    if not low <= priority <= high:
        raise PermissionDenied(f"priority {priority} is outside of {low} to {high}, which the API key has")
    salt = request.cache_salt or tenant_salt(caller.tenant)
    return replace(request, tenant=caller.tenant, cache_salt=salt, priority=priority)
