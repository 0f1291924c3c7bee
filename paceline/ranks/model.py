"""One rank's part of a Llama model."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from paceline.models.llama import LlamaModel
from paceline.models.loader import WeightBag
from paceline.ranks.group import Group
from paceline.ranks.shard import Shard


class LlamaShard(LlamaModel):
    """Some heads, a part of the MLP's width and of the vocabulary. Every rank calls the same methods in the same order
    with the same rows, and gets the same hidden rows."""

    def __init__(
        self, weights: WeightBag, dtype: torch.dtype, device: torch.device, shard: Shard, group: Group
    ) -> None:
        """weights: this rank's; see LlamaModel."""
        super().__init__(shard.local_spec, weights, dtype, device)
        self.group = group
        self._vocab = shard.vocab
        self._others = torch.tensor(shard.vocab_starts[1:-1], dtype=torch.int64, device=device)
        sizes = [stop - start for start, stop in zip(shard.vocab_starts, shard.vocab_starts[1:], strict=False)]
        self._sizes, self._widest = sizes, max(sizes)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """See TargetModel. Each row comes from the rank that has it."""
        mine = (token_ids - self._vocab.start).clamp(0, len(self._vocab) - 1)
        rows = self.embedding[mine]
        every = self.group.gather(rows)
        if every is None:
            return self.group.broadcast(None, rows)
        owners = torch.bucketize(token_ids, self._others, right=True)
        return self.group.broadcast(every[owners, torch.arange(len(token_ids), device=rows.device)], rows)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See TargetModel; [R, 0] on other ranks than 0."""
        mine = F.pad(self.lm_head(hidden), (0, self._widest - len(self._vocab)))
        every = self.group.gather(mine)
        if every is None:
            return hidden.new_empty(hidden.shape[0], 0)
        return torch.cat([part[:, :size] for part, size in zip(every, self._sizes, strict=True)], dim=1)
