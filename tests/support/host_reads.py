"""Counts how often the host reads tensors of a pretended device, on the CPU.

What goes through ``staging`` onto the device is marked, and so are the outputs of captured work and whatever is
computed from a marked tensor; memory that the host makes meanwhile is its own. A marked tensor's values may be asked
for in a few ways, each of which would wait for a real device; what comes of it is the host's again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from paceline.layers import upload as staging
from tests.support.recording import WAITING

MARK, OWN = "_there", "_here"
ASKS = ("tolist", "cpu", "numpy", "item")


def marked(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, as if it were on the device."""
    setattr(tensor, MARK, True)
    return tensor


def is_marked(value: object) -> bool:
    return isinstance(value, torch.Tensor) and hasattr(value, MARK)


class HostReads(TorchDispatchMode):
    """``count`` of reads so far, and what each was."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self._asking = False

    @property
    def count(self) -> int:
        """Reads."""
        return len(self.seen)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, torch.Tensor)]
        if not given and isinstance(result, torch.Tensor):
            setattr(result, OWN, True)
        if self._asking or not any(map(is_marked, given)):
            return result
        name = func._schema.name.removeprefix("aten::")
        by_mask = name == "index" and any(t is not None and t.dtype is torch.bool for t in args[1])
        to_host = name == "copy_" and hasattr(args[0], OWN)
        if name in WAITING or by_mask or to_host:
            self.seen.append(name)
        if not to_host:
            for tensor in tree_leaves(result):
                if isinstance(tensor, torch.Tensor):
                    marked(tensor if tensor._base is None else tensor._base)  # what a view of it was written to
                    marked(tensor)
        return result

    def asked(self, name: str) -> Callable[..., Any]:
        """``torch.Tensor.name``, counting."""
        plain = getattr(torch.Tensor, name)

        def ask(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if not is_marked(tensor) or self._asking:
                return plain(tensor, *args, **kwargs)
            self.seen.append(name)
            self._asking = True
            try:
                result = plain(tensor.clone(), *args, **kwargs)
            finally:
                self._asking = False
            return result

        return ask


@contextmanager
def host_reads() -> Iterator[HostReads]:
    """Counts inside. Whatever is captured must be captured outside, and its memory ``marked``."""
    reads, plain = HostReads(), staging.pinned

    def onto_device(array: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
        return marked(plain(array, device))

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(staging, "pinned", onto_device))
        for name in ASKS:
            stack.enter_context(mock.patch.object(torch.Tensor, name, reads.asked(name)))
        stack.enter_context(reads)
        yield reads
