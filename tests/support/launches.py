"""Which compiled kernels would be launched, told in Triton's interpreter by the key that Triton compiles for.

A key is what the compiler looks at: the kernel, its compile-time values, the types of its other arguments, whether a
number is 1 or a multiple of 16, where a tensor begins, and the options of the launch.

Nothing is computed, which would take minutes: memory that a kernel would fill holds zeros, and drafts are 0, 1, 2 and
so on. A walk alone is computed, since it says when a text ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

Key = tuple[object, ...]


def key_of(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Key:
    """The key of one launch of an interpreted kernel."""
    from triton.backends.compiler import BaseBackend
    from triton.runtime.jit import native_specialize_impl

    values = dict(zip(kernel.arg_names, args, strict=False))
    options = {name: value for name, value in kwargs.items() if name not in kernel.arg_names}
    values |= {name: value for name, value in kwargs.items() if name in kernel.arg_names}
    as_it_is, anywhere = (kernel.kwargs[name] or () for name in ("do_not_specialize", "do_not_specialize_on_alignment"))
    found: list[object] = [kernel.fn.__name__, tuple(sorted(options.items()))]
    for name in kernel.arg_names:
        value = values[name]
        if "constexpr" in str(kernel.fn.__annotations__.get(name, "")):
            found.append((name, value))
        else:
            seen = native_specialize_impl(BaseBackend, value, False, name not in as_it_is, name not in anywhere)
            found.append((name, seen))
    return tuple(map(_hashable, found))


def _hashable(value: object) -> object:
    return repr(value)


def _drafted(args: tuple[Any, ...]) -> None:
    """What ``_topk_kernel`` writes: target ids and their probabilities."""
    ids, probs = args[9], args[10]
    ids.copy_(torch.arange(ids.shape[1]).expand_as(ids))
    probs.fill_(1.0 / (1 + ids.shape[1]))


STAND_INS = {"_topk_kernel": _drafted}
COMPUTED = ("_walk_kernel",)


@contextmanager
def recorded_launches() -> Iterator[set[Key]]:
    """The keys of what is launched inside."""
    from triton.runtime.interpreter import InterpretedFunction

    keys: set[Key] = set()
    run: Any = InterpretedFunction.run
    new_zeros = torch.Tensor.new_zeros

    def recorded(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        keys.add(key_of(self, args, kwargs))
        name = self.fn.__name__
        if name in COMPUTED:
            return run(self, *args, grid=grid, warmup=warmup, **kwargs)
        if name in STAND_INS:
            STAND_INS[name](args)
        return None

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(InterpretedFunction, "run", recorded))
        patches.enter_context(mock.patch.object(torch, "empty", torch.zeros))
        patches.enter_context(mock.patch.object(torch, "empty_like", torch.zeros_like))
        patches.enter_context(mock.patch.object(torch.Tensor, "new_empty", new_zeros))
        yield keys
