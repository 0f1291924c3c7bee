"""Which compiled kernels would be launched, told in Triton's interpreter by the key that Triton compiles for.

A key is what the compiler looks at: the kernel, its compile-time values, the types of its other arguments, whether a
number is 1 or a multiple of 16, where a tensor begins, and the options of the launch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

Key = tuple[object, ...]


def key_of(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Key:
    """The key of one launch of an interpreted kernel."""
    from triton.backends.compiler import BaseBackend
    from triton.runtime.jit import native_specialize_impl

    values = dict(zip(kernel.arg_names, args, strict=False))
    options = {name: value for name, value in kwargs.items() if name not in kernel.arg_names}
    values |= {name: value for name, value in kwargs.items() if name in kernel.arg_names}
    as_it_is, anywhere = (
        kernel.kwargs[name] or () for name in ("do_not_specialize", "do_not_specialize_on_alignment")
    )
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


@contextmanager
def recorded_launches() -> Iterator[set[Key]]:
    """The keys of what is launched inside."""
    from triton.runtime.interpreter import InterpretedFunction

    keys: set[Key] = set()
    run = InterpretedFunction.run

    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        keys.add(key_of(self, args, {name: value for name, value in kwargs.items() if name not in ("grid", "warmup")}))
        return run(self, *args, **kwargs)

    with mock.patch.object(InterpretedFunction, "run", recorded):
        yield keys
