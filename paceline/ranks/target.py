"""The target model of a node of several ranks, as rank 0's engine uses it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from paceline.kvcache.layout import KvLayout
from paceline.kvcache.pool import KvPool
from paceline.models.base import AfterLayer, AuxCapture, DecoderBlock, ForwardContext, TargetModel
from paceline.models.loader import WeightBag
from paceline.ranks.channel import Kind
from paceline.ranks.commands import batch_fields, id_fields, row_fields
from paceline.ranks.dealt_pool import LeaderPool
from paceline.ranks.leader import Followers
from paceline.ranks.pool import ShardedPool
from paceline.ranks.shard import Shard

EMBED_ROWS = 4096  # at once: who looks up a whole vocabulary must not have it here once for each rank


class ParallelTarget(TargetModel):
    """See TargetModel. Every call runs on all ranks; the same bits come out whatever their number is. Draft layers made
    of it are whole and run on rank 0 alone. Raises NodeUnavailable once a rank is lost."""

    def __init__(
        self, own: TargetModel, shard: Shard, followers: Followers, end: Callable[[], None] = lambda: None
    ) -> None:
        """own: rank 0's part. end: what ends the followers' processes or threads, once they were told to stop."""
        self.spec, self.dtype, self.device, self.quantize = shard.spec, own.dtype, own.device, own.quantize
        self.own, self.shard, self.followers, self._end = own, shard, followers, end
        self.kv_layers = tuple(map(shard.whole_layer, own.kv_layers))

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """See TargetModel."""
        if not len(token_ids):
            return token_ids.new_empty(0, self.spec.hidden_size, dtype=self.dtype)
        return torch.cat([self._embed(some) for some in torch.split(token_ids, EMBED_ROWS)])

    def forward(self, context: ForwardContext, aux: AuxCapture | None = None) -> torch.Tensor:
        """See TargetModel. ``context.kv`` is of ``make_pool``."""
        heard = None if context.after_layer is None else Hearer(context.after_layer)
        with self.followers.running(Kind.FORWARD, batch_fields(context.batch, self.followers.group.carries)):
            self._carry(context.batch.token_ids)
            hidden = self.own.forward(replace(context, after_layer=heard), aux)
        if heard is not None and heard.error is not None:
            raise heard.error
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See TargetModel."""
        with self.followers.running(Kind.LOGITS, row_fields(hidden, self.followers.group.carries)):
            self._carry(hidden)
            return self.own.logits(hidden)

    def decoder_block(self, weights: WeightBag, prefix: str, kv_layer: int) -> DecoderBlock:
        """See TargetModel."""
        return self.own.decoder_block(weights, prefix, kv_layer)

    def rope_table(self) -> torch.Tensor:
        """See TargetModel."""
        return self.own.rope_table()

    def make_pool(self, layout: KvLayout, num_pages: int, page_size: int) -> KvPool:
        """See TargetModel."""
        if self.shard.dealt:
            return LeaderPool(layout, num_pages, page_size, self.device, self.followers)
        return ShardedPool(layout, num_pages, page_size, self.device, self.shard, self.followers)

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        token_ids = token_ids.to(torch.int64)
        with self.followers.running(Kind.EMBED, id_fields(token_ids, self.followers.group.carries)):
            self._carry(token_ids)
            return self.own.embed(token_ids)

    def _carry(self, tensor: torch.Tensor) -> None:
        """What belongs to a command, to the other ranks, where it is not in the command's frame."""
        if self.followers.group.carries:
            self.followers.group.broadcast(tensor, tensor)

    def alive(self) -> bool:
        """See TargetModel."""
        return not self.followers.failure

    def close(self) -> None:
        """See TargetModel."""
        self.followers.stop()
        self._end()


class Hearer:
    """Tells ``after_layer`` of each layer until it raises. The error is kept until the ranks have run the step to the
    end: it is that step's, and the ranks are still in step with each other."""

    def __init__(self, after_layer: AfterLayer) -> None:
        self._after_layer = after_layer
        self.error: Exception | None = None

    def __call__(self, layer: int) -> None:
        if self.error is None:
            try:
                self._after_layer(layer)
            except Exception as error:
                self.error = error
