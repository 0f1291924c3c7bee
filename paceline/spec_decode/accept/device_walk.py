"""``verify.walk`` of a whole batch on the device: the host learns of all sequences in one small copy.

Trees, stop tokens and budgets are known before the target's forward ends and travel ahead; the sampled tokens never
leave the device. The result of sequence s is ``walked[s] = (accepted nodes, new token, finish code, path...)``.
"""

from __future__ import annotations

import torch

from paceline.spec_decode.accept.device_trees import (
    FINISH,
    FINISH_CODES,
    LENGTH,
    NEW_TOKEN,
    PATH,
    STOP,
    TOO_LONG,
    DeviceTrees,
    upload_trees,
)
from paceline.spec_decode.accept.verify import Verdict
from paceline.spec_decode.trees.tree import DraftTree
from paceline.triton_support import runs_triton


def walk_device(trees: DeviceTrees, sampled: torch.Tensor) -> torch.Tensor:
    """Walk every tree. sampled: int64 [N], the target's token after each node, on the trees' device.

    Returns int32 [S, 3 + max_path] there; a path's entries past its length mean nothing. A token below 0 (a row that
    could not be sampled) ends a walk that reaches it, and is its new token.
    """
    if runs_triton(sampled.device):
        from paceline.spec_decode.accept.walk_triton import walk

        return walk(trees, sampled)
    return walk_torch(trees, sampled)


def warm_walk(device: torch.device, most_nodes: int) -> None:
    """Launch every kernel that trees of up to ``most_nodes`` nodes may take: their size is rounded up to a power of
    two."""
    for nodes in {min(1 << power, most_nodes) for power in range(most_nodes.bit_length() + 1)}:
        chain = DraftTree((0,) * nodes, tuple(range(-1, nodes - 1)), tuple(range(nodes)))
        walk_device(upload_trees([chain], [()], [1], device), torch.zeros(nodes, dtype=torch.int64, device=device))


def read_verdicts(walked: torch.Tensor) -> list[Verdict]:
    """Results as the host knows them; waits for the device. A new token below 0 is the caller's to refuse."""
    return [
        Verdict(tuple(row[PATH : PATH + row[LENGTH]]), row[NEW_TOKEN], FINISH_CODES[row[FINISH]])
        for row in walked.tolist()
    ]


def walk_torch(trees: DeviceTrees, sampled: torch.Tensor) -> torch.Tensor:
    """``walk_device`` in torch alone: one step of all sequences at a time, as many as the deepest tree may need."""
    first = trees.starts[:-1].to(torch.int64)
    nodes = torch.arange(trees.max_nodes, device=sampled.device)
    exists = nodes < trees.starts.diff().unsqueeze(1)
    at = torch.where(exists, first.unsqueeze(1) + nodes, 0)
    parents = torch.where(exists, trees.parents[at], -2)
    carried = trees.token_ids[at]
    stops, is_stop_id = _padded_stops(trees)
    result = torch.zeros(first.shape[0], PATH + trees.max_path, dtype=torch.int64, device=sampled.device)
    node, length = torch.zeros_like(first), torch.zeros_like(first)
    walking = torch.ones_like(first, dtype=torch.bool)
    for step in range(trees.max_path + 1):
        token = sampled[first + node]
        stopped = (is_stop_id & (stops == token.unsqueeze(1))).any(dim=1)
        finish = torch.where(stopped, STOP, torch.where(length + 1 >= trees.max_new_tokens, TOO_LONG, 0))
        result[:, NEW_TOKEN] = torch.where(walking, token, result[:, NEW_TOKEN])
        result[:, FINISH] = torch.where(walking, finish, result[:, FINISH])
        child = (parents == node.unsqueeze(1)) & (carried == token.unsqueeze(1))
        walking = walking & (finish == 0) & child.any(dim=1)
        node = torch.where(walking, child.to(torch.int8).argmax(dim=1), node)
        if step < trees.max_path:
            result[:, PATH + step] = torch.where(walking, node, 0)
        length = length + walking
    result[:, LENGTH] = length
    return result.to(torch.int32)


def _padded_stops(trees: DeviceTrees) -> tuple[torch.Tensor, torch.Tensor]:
    """Stop tokens as [S, max_stops], and which of the entries are any."""
    columns = torch.arange(max(trees.max_stops, 1), device=trees.starts.device)
    exists = columns < trees.stop_starts.diff().unsqueeze(1)
    at = torch.where(exists, trees.stop_starts[:-1].unsqueeze(1) + columns, 0)
    ids = trees.stop_ids if trees.max_stops else trees.starts  # something to index where there are none
    return ids[at], exists
