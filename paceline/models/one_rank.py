"""What the ranks of a node do together, as a model sees it. Here: the one rank that most nodes have.

``paceline.ranks`` has what several ranks do instead. A model asks its ``WeightBag`` for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from paceline.layers.linear import Linear
from paceline.layers.quantized import LinearWeight
from paceline.models.context import ForwardContext
from paceline.models.row_parallel import row_parallel

Attention = Callable[[torch.Tensor, torch.Tensor, ForwardContext], torch.Tensor]  # of one layer, see PreNormLayer


class OneRank:
    """It has all of every layer, and nobody to talk to. With more ranks, all of them make the same calls."""

    first = True  # whether it is rank 0

    def share(self, mlp: str) -> bool:
        """Whether the ranks share the width of an MLP of a family with experts, of its dense layers (``mlp``) or its
        shared experts (``mlp.shared_experts``). Where not, rank 0 has it alone."""
        return True

    def row_linear(
        self, weight: LinearWeight, bias: torch.Tensor | None, slabs: int, out_float32: bool = False
    ) -> Linear:
        """A layer whose inner dimension the ranks share. slabs: see row_parallel. With ``out_float32`` rank 0 alone
        has the sum: what others get is not to be used."""
        return row_parallel(weight, slabs, bias, out_float32)

    def attention(self, make: Callable[[OneRank], Attention]) -> Attention:
        """Latent attention of one layer. make: it, as the ranks that share its heads have it."""
        return make(self)

    def context(self, context: ForwardContext) -> ForwardContext:
        """What the layers of this rank are given of a forward."""
        return context

    def experts(self, count: int) -> range:
        """Those of ``count`` experts that this rank has."""
        return range(count)

    def all_rows(self, mine: torch.Tensor, counts: Sequence[int]) -> torch.Tensor | None:
        """mine: the rows of this rank's experts, [R, width], expert by expert; counts: rows of every expert of all
        ranks -> the rows of all experts in their order, [sum of counts, width]; None on other ranks than 0."""
        return mine

    def told(self, value: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
        """Rank 0's ``value``, on every rank. like: of its shape and dtype; its content is not read."""
        assert value is not None
        return value

    def embed(self, table: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """table: this rank's rows of the embedding; token_ids: int64 [T] -> [T, hidden_size]."""
        return table[token_ids]

    def logits(self, mine: torch.Tensor) -> torch.Tensor:
        """mine: of this rank's rows of the LM head, [R, rows] -> of all, [R, vocab_size]; [R, 0] on other ranks than
        0."""
        return mine


ONE_RANK = OneRank()
