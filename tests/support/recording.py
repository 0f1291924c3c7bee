"""CUDA graphs emulated on the CPU: the tensor operations of some work are recorded, and a replay runs them again.

As with a real graph, Python is not run again, operands stay the tensors of the recording, results are written into the
memory that the recording gave them, and an operation whose result the host must wait for cannot be recorded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.layers.graph_capture import Captured, Work

WAITING = ("_local_scalar_dense", "nonzero", "bincount", "equal", "is_nonzero", "masked_select", "_unique2", "item")


class HostWaits(AssertionError):
    """Recorded work read something back."""


class _Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], Mapping[str, Any], Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func._schema.name.removeprefix("aten::")
        by_mask = name == "index" and any(t is not None and t.dtype is torch.bool for t in args[1])
        if name in WAITING or by_mask:
            raise HostWaits(f"{name} waits for the device")
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result


class RecordedCapture:
    """A ``Capture``. ``bytes_each`` is what each capture claims to take."""

    def __init__(self, device: torch.device | None = None, bytes_each: int = 0) -> None:
        self.bytes_each, self.captures, self.replays = bytes_each, 0, 0

    def __call__(self, work: Work) -> Captured:
        work()
        tape = _Tape()
        with tape:
            outputs = work()
        self.captures += 1
        steps = [(call, own) for call in tape.calls if (own := _own_memory(call[0], call[3])) or _writes(call[0])]

        def replay() -> None:
            self.replays += 1
            for (func, args, kwargs, _), own in steps:
                made = func(*args, **kwargs)
                for at, place in own:
                    place.copy_(made if at is None else made[at])

        return Captured(outputs, replay)

    def used_bytes(self) -> int:
        """See Capture."""
        return self.bytes_each * self.captures


def _own_memory(func: Any, kept: Any) -> list[tuple[int | None, torch.Tensor]]:
    """Results of their own memory, which go where the recording's results are: each one's number among several, and
    its place. Views and in-place results are there."""
    many = isinstance(kept, (tuple, list))
    returns = list(func._schema.returns)
    if many and len(returns) == 1:
        returns = returns * len(kept)
    found = zip(enumerate(kept) if many else [(None, kept)], returns, strict=True)
    return [p for p, declared in found if isinstance(p[1], torch.Tensor) and declared.alias_info is None]


def _writes(func: Any) -> bool:
    """Whether it writes into an argument. What neither writes nor has memory of its own is a view: made once."""
    return any(argument.alias_info is not None and argument.alias_info.is_write for argument in func._schema.arguments)


@contextmanager
def plain_torch() -> Iterator[None]:
    """Models built inside run what runs on a GPU: torch's operations, not the C++ kernels, which no tape can see."""
    modules = ("linear", "per_head_linear", "ops", "routing")
    patches = [mock.patch(f"paceline.layers.{module}.load_kernels", return_value=None) for module in modules]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()
