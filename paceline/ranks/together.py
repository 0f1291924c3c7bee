"""What several ranks do together, as the model on each of them sees it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from paceline.layers.linear import Linear
from paceline.layers.quantized import LinearWeight
from paceline.models.context import ForwardContext
from paceline.models.one_rank import ONE_RANK, Attention, OneRank
from paceline.ranks.dealt import DealtAttention, dealt
from paceline.ranks.group import Group
from paceline.ranks.linear import RowParallelLinear
from paceline.ranks.shard import Shard


class ShardRanks(OneRank):
    """See OneRank. This rank has ``shard``; all ranks call the same methods in the same order with the same rows."""

    def __init__(self, shard: Shard, group: Group) -> None:
        self._shard, self._group = shard, group
        self.first = shard.rank == 0
        self._others = torch.tensor(shard.vocab_starts[1:-1], dtype=torch.int64)
        sizes = [stop - start for start, stop in zip(shard.vocab_starts, shard.vocab_starts[1:], strict=False)]
        self._sizes, self._widest = sizes, max(sizes)

    def row_linear(
        self, weight: LinearWeight, bias: torch.Tensor | None, slabs: int, out_float32: bool = False
    ) -> Linear:
        """See OneRank. slabs: of the local model, which does not know how many the whole one has."""
        return RowParallelLinear(weight, bias, self._shard.slabs, self._group, first_only=out_float32)

    def share(self, mlp: str) -> bool:
        """See OneRank."""
        return mlp in self._shard.shared_mlps

    def attention(self, make: Callable[[OneRank], Attention]) -> Attention:
        """See OneRank. Where sequences are dealt, this rank has the whole layer."""
        return DealtAttention(make(ONE_RANK), self._group) if self._shard.dealt else make(self)

    def context(self, context: ForwardContext) -> ForwardContext:
        """See OneRank."""
        return dealt(context) if self._shard.dealt else context

    def experts(self, count: int) -> range:
        """See OneRank."""
        return self._shard.experts(count)

    def all_rows(self, mine: torch.Tensor, counts: Sequence[int]) -> torch.Tensor | None:
        """See OneRank. No row is added to another on its way: rank 0 has all that a token's experts gave."""
        runs = [self._shard.of_rank(rank).experts(len(counts)) for rank in range(self._shard.degree)]
        every = self._group.gather_rows(mine, [sum(counts[run.start : run.stop]) for run in runs])
        return None if every is None else torch.cat(every)

    def told(self, value: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
        """See OneRank."""
        return self._group.broadcast(value, like)

    def embed(self, table: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """See OneRank. Each row comes from the rank that has it."""
        vocab = self._shard.vocab
        rows = table[(token_ids - vocab.start).clamp(0, len(vocab) - 1)]
        if self._others.device != token_ids.device:
            self._others = self._others.to(token_ids.device)
        owners = torch.bucketize(token_ids, self._others, right=True)
        places = torch.arange(len(token_ids), device=token_ids.device)
        return self._group.made(rows, lambda every: every[owners, places], rows)

    def logits(self, mine: torch.Tensor) -> torch.Tensor:
        """See OneRank."""
        every = self._group.gather(F.pad(mine, (0, self._widest - mine.shape[1])))
        if every is None:
            return mine.new_empty(mine.shape[0], 0)
        return torch.cat([part[:, :size] for part, size in zip(every, self._sizes, strict=True)], dim=1)
