"""Threads for calls that wait for node processes: a start takes seconds, a drain minutes. The event loop's own pool has
a few threads for short work, such as the tokens of a long prompt, which would wait behind them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, TypeVarTuple, Unpack

from cluster.state.wanted import MAX_NODES

T = TypeVar("T")
A = TypeVarTuple("A")

_POOL = ThreadPoolExecutor(2 * MAX_NODES, "nodes")  # a thread is made when none is free


async def in_thread(call: Callable[[Unpack[A]], T], *arguments: *A) -> T:
    """What ``call`` returns or raises. It goes on when who awaits it is cancelled, and this process ends after it."""
    return await asyncio.get_running_loop().run_in_executor(_POOL, call, *arguments)
