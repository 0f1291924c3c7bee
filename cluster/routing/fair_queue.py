"""The order in which waiting requests may run: deficit round robin over tenants, priorities within a tenant.

Deficit round robin (Shreedhar and Varghese, 1995): tenants take turns; a turn adds QUANTUM_TOKENS to the tenant's
deficit and lets its requests go while the deficit pays for them. So tenants that wait get equal shares of tokens,
whatever the size or number of their requests; a request of at most a quantum waits for one turn of each other tenant,
a larger one for as many as pay for it.
A priority moves a request only past others of its own tenant: it is the client who writes it.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

QUANTUM_TOKENS = 4096  # prompt and output of a usual request: a smaller one only makes large requests wait more turns


@dataclass(eq=False)
class Waiting:
    """A request that waits. cost: tokens of prompt and output, all choices; slots: sequences it will run as."""

    tenant: str
    priority: int  # higher goes first
    cost: int
    slots: int
    number: int = 0  # by arrival; ``FairQueue.push`` fills it


@dataclass(eq=False)
class _Tenant:
    waiting: list[Waiting] = field(default_factory=list)  # the next to go first
    deficit: int = 0  # tokens


class FairQueue:
    """Requests by tenant. ``push``, then ``pop`` or ``remove``. Whoever fills it bounds it."""

    def __init__(self, quantum: int = QUANTUM_TOKENS) -> None:
        self._quantum = quantum
        self._tenants: dict[str, _Tenant] = {}
        self._turns: deque[str] = deque()  # whose turn it is first
        self._in_turn = False  # the first one got its quantum
        self._number = 0

    def __len__(self) -> int:
        return sum(len(tenant.waiting) for tenant in self._tenants.values())

    def push(self, request: Waiting) -> None:
        """Wait behind the tenant's requests of the same or a higher priority; a new tenant behind all others."""
        self._number += 1
        request.number = self._number
        if request.tenant not in self._tenants:
            self._tenants[request.tenant] = _Tenant()
            self._turns.append(request.tenant)
        insort(self._tenants[request.tenant].waiting, request, key=lambda item: (-item.priority, item.number))

    def peek(self, held: Callable[[Waiting], bool] | None = None) -> Waiting | None:
        """The next to go; None when nobody may. held: whether a tenant's next request may not go now, where that can
        be; the tenant then misses its turn and saves nothing."""
        free: Collection[_Tenant] = self._tenants.values()
        kept_back: set[_Tenant] = set()
        if held is not None:
            kept_back = {tenant for tenant in free if held(tenant.waiting[0])}
            free = [tenant for tenant in free if tenant not in kept_back]
        if not free:
            return None
        passed = 0
        while (tenant := self._tenants[self._turns[0]]) in kept_back or tenant.deficit < tenant.waiting[0].cost:
            if not self._in_turn and tenant not in kept_back:
                tenant.deficit += self._quantum
                self._in_turn = True
                continue
            self._next_turn()
            passed += 1
            if passed > len(self._turns):
                self._skip_rounds(free)
                passed = 0
        return tenant.waiting[0]

    def pop(self) -> Waiting | None:
        """Take the next to go."""
        request = self.peek()
        if request is not None:
            self.take(request)
        return request

    def take(self, request: Waiting) -> None:
        """The one that ``peek`` gave goes."""
        self._tenants[request.tenant].deficit -= request.cost
        self.remove(request)

    def remove(self, request: Waiting) -> None:
        """It no longer waits. A tenant without requests is forgotten, its deficit with it."""
        tenant = self._tenants[request.tenant]
        tenant.waiting.remove(request)
        if tenant.waiting:
            return
        if self._turns[0] == request.tenant:
            self._in_turn = False
        self._turns.remove(request.tenant)
        del self._tenants[request.tenant]

    def last_of_most(self, tenant: str, safe: int = 0) -> Waiting | None:
        """The last request of the tenant with the most, who is to make room for one of ``tenant`` in a full queue. None
        when ``tenant`` would then have as many, and when the other has no more than ``safe``."""
        most = max(self._tenants.values(), key=lambda other: len(other.waiting), default=None)
        own = len(self._tenants[tenant].waiting) if tenant in self._tenants else 0
        return most.waiting[-1] if most is not None and len(most.waiting) > max(own + 1, safe) else None

    def _next_turn(self) -> None:
        self._turns.rotate(-1)
        self._in_turn = False

    def _skip_rounds(self, tenants: Collection[_Tenant]) -> None:
        """None of ``tenants`` could pay in a whole round: give all at once what they would get until just before one
        can."""
        rounds = min(-(-(tenant.waiting[0].cost - tenant.deficit) // self._quantum) for tenant in tenants)
        for tenant in tenants:
            tenant.deficit += (rounds - 1) * self._quantum
