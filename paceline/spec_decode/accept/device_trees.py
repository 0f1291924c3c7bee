"""Trees, stop tokens and budgets of a batch, packed for a walk on the device; what the columns of its result mean."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch

from paceline.layers.upload import staged_together
from paceline.request import FinishReason
from paceline.spec_decode.trees.tree import DraftTree

LENGTH, NEW_TOKEN, FINISH, PATH = 0, 1, 2, 3  # columns of a result; the path begins at the last
FINISH_CODES = {0: None, 1: FinishReason.STOP, 2: FinishReason.LENGTH}
STOP, TOO_LONG = 1, 2

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True)
class DeviceTrees:
    """S trees on the device, nodes one after another; all int32."""

    token_ids: torch.Tensor  # [N]
    parents: torch.Tensor  # [N], within the node's own tree; -1 for a root
    slots: torch.Tensor  # [N], KV slot of each node; empty where nothing is to be compacted
    starts: torch.Tensor  # [S + 1], first node of each tree
    max_new_tokens: torch.Tensor  # [S], >= 1
    stop_starts: torch.Tensor  # [S + 1]
    stop_ids: torch.Tensor  # [all stop tokens]
    max_nodes: int  # of the largest tree
    max_path: int  # of the deepest, at least 1
    max_stops: int  # of the sequence with most


def upload_trees(
    trees: Seq[DraftTree],
    stop_token_ids: Seq[Collection[int]],
    max_new_tokens: Seq[int],
    device: torch.device,
    slots: Int32Array | None = None,
) -> DeviceTrees:
    """Pack and copy. slots: int32 [N], of all nodes in order. Raises ValueError for a budget under 1."""
    if any(most < 1 for most in max_new_tokens):
        raise ValueError(f"max_new_tokens must be at least 1, got {min(max_new_tokens)}")
    parts = [
        _flat(tree.token_ids for tree in trees),
        _flat(tree.parents for tree in trees),
        np.zeros(0, dtype=np.int32) if slots is None else slots,
        _offsets(tree.num_nodes for tree in trees),
        np.array(max_new_tokens, dtype=np.int32),
        _offsets(len(ids) for ids in stop_token_ids),
        _flat(stop_token_ids),
    ]
    token_ids, parents, slots_there, starts, most, stop_starts, stop_ids = staged_together(parts, device)
    return DeviceTrees(
        token_ids=token_ids,
        parents=parents,
        slots=slots_there,
        starts=starts,
        max_new_tokens=most,
        stop_starts=stop_starts,
        stop_ids=stop_ids,
        max_nodes=max(tree.num_nodes for tree in trees),
        max_path=max(1, *(max(tree.depths) for tree in trees)),
        max_stops=max(len(ids) for ids in stop_token_ids),
    )


def _flat(lists: Iterable[Iterable[int]]) -> Int32Array:
    return np.fromiter(chain.from_iterable(lists), dtype=np.int32)


def _offsets(lengths: Iterable[int]) -> Int32Array:
    return np.cumsum([0, *lengths], dtype=np.int32)
