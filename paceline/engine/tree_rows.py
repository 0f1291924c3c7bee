"""The target's rows at the nodes of a tree, as acceptance rules ask for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from paceline.errors import InvalidRequest
from paceline.sampling.params import BoolArray
from paceline.sampling.probs import target_probs
from paceline.sampling.sampler import RowContext, sample_rows
from paceline.spec_decode.sequence import Sequence
from paceline.spec_decode.trees.tree import DraftTree

ObserveLogits = Callable[[Sequence, int, torch.Tensor], None]  # (seq, position, float32 [V])


def row_context(seq: Sequence, path: tuple[int, ...], position: int) -> RowContext:
    """What sampling at ``position`` depends on besides logits. path: drafted tokens that precede it."""
    request, output = seq.request, seq.output_token_ids
    return RowContext(request.params, position, request.prompt_token_ids, output, path, _allowed(seq, output, path))


def _allowed(seq: Sequence, output: list[int], path: tuple[int, ...]) -> BoolArray | None:
    """What the sequence's grammar allows after ``output`` and ``path``. Where the grammar fails the answer ends, and
    the failure is left on the sequence, so that the others of its batch go on."""
    if seq.grammar is None:
        return None
    try:
        return seq.grammar.allowed(output, path).mask
    except InvalidRequest as error:
        seq.failure = error
        return seq.grammar.end.mask


@dataclass(frozen=True)
class TreeRows:
    """The target at the nodes of one sequence's tree: asked only where the walk comes by."""

    seq: Sequence
    tree: DraftTree
    logits: torch.Tensor  # float32 [num_nodes, V]
    observe: ObserveLogits | None

    def sample(self, node: int) -> int:
        """The token plain decoding would sample after ``node``."""
        return sample_rows(self.logits[node : node + 1], [self._seen(node)])[0]

    def probs(self, node: int) -> torch.Tensor:
        """Its law, float64 [V]."""
        return target_probs(self.logits[node], self._seen(node))

    def _seen(self, node: int) -> RowContext:
        path = tuple(self.tree.token_ids[i] for i in self.tree.path(node)[1:])
        position = self.seq.num_computed + self.tree.depths[node] + 1
        if self.observe is not None:
            self.observe(self.seq, position, self.logits[node])
        return row_context(self.seq, path, position)
