"""Which of the rows that a decode node expects have arrived. Pure bookkeeping, without I/O."""

from __future__ import annotations

from dataclasses import dataclass

from kv_transfer.handoff.block import DRAFT_KV, HIDDEN, TARGET_KV, RowBlock
from paceline.kvcache.layout import KvLayout, LayerOwner

_OWNER = {TARGET_KV: LayerOwner.TARGET, DRAFT_KV: LayerOwner.DRAFT}


@dataclass(frozen=True)
class ExpectedRows:
    """What the decode node expects to cross for one ticket.

    ``layout``: of the rows on the link's own pipe; the pool's own, or ``ReshardPlan.wire`` where ranks send to ranks.
    ``tokens``: those whose KV rows it reserved and lacks; it already holds the prefix before them. ``draft_required``
    False: the draft rows may be left out, all or none of them, or any of them where State brings no draft (decode then
    starts without a drafter). ``hidden_size``: width of one hidden row of the State, of the layout's hidden dtype.
    ``row_width``: width of the hidden row that comes with each token; 0: none may come. Unless every one comes, none is
    used: of a request that its first token ended the last ones do not exist.
    """

    layout: KvLayout
    tokens: range
    hidden_size: int
    draft_required: bool = True
    row_width: int = 0


class Coverage:
    """The rows of one hand-off that arrived. Not thread-safe."""

    def __init__(self, expected: ExpectedRows) -> None:
        self._expected = expected
        # For each layer the rows that arrived, one bit a token (bit 0 is the first one expected).
        self._arrived = [0] * len(expected.layout.layers)
        self._hidden_arrived = 0
        self._complete = (1 << len(expected.tokens)) - 1

    @property
    def draft_complete(self) -> bool:
        """Every draft row arrived (False when the layout has no draft layer)."""
        layers = self._expected.layout.layer_range(LayerOwner.DRAFT)
        return len(layers) > 0 and all(self._arrived[layer] == self._complete for layer in self._crossing(layers))

    @property
    def hidden_complete(self) -> bool:
        """A hidden row arrived for every token (False when none may come)."""
        return self._expected.row_width > 0 and self._hidden_arrived == self._complete

    def problem(self, block: RowBlock, num_bytes: int) -> str | None:
        """Why these rows, ``num_bytes`` in all, cannot be accepted now, or None."""
        hidden = block.byte_class == HIDDEN and self._expected.row_width > 0
        layers, tokens, expected = block.layers, block.tokens, self._expected.tokens
        if block.byte_class not in _OWNER and not hidden:
            return f"chunk of byte class {block.byte_class}"
        if hidden and (layers.start or layers.stop):
            return f"hidden rows of layers {layers.start}..{layers.stop}"
        problem = None if hidden else self._layers_problem(block)
        if problem is not None:
            return problem
        if tokens.start < expected.start or tokens.stop > expected.stop:
            return f"tokens {tokens.start}..{tokens.stop} outside the announced range"
        due = len(tokens) * self._token_bytes(block)
        if num_bytes != due:
            return f"{num_bytes} bytes declared where the layout says {due}"
        rows = self._bits(tokens)
        arrived = [self._hidden_arrived] if hidden else [self._arrived[layer] for layer in self._crossing(layers)]
        if any(seen & rows for seen in arrived):
            return f"rows of tokens {tokens.start}..{tokens.stop} sent twice"
        return None

    def add(self, block: RowBlock) -> None:
        """These rows, in which `problem` found none, arrived."""
        rows = self._bits(block.tokens)
        if block.byte_class == HIDDEN:
            self._hidden_arrived |= rows
        for layer in self._crossing(block.layers):
            self._arrived[layer] |= rows

    def missing(self, *, drafts: bool) -> str | None:
        """The first layer with a missing row, in words. ``drafts``: State brings a draft."""
        draft = self._expected.layout.layer_range(LayerOwner.DRAFT)
        # Draft rows leave before it is known whether the first token ends the request.
        unused = not drafts or not any(self._arrived[layer] for layer in draft)
        draft_absent = unused and not self._expected.draft_required
        for layer in self._crossing(range(len(self._arrived))):
            arrived = self._arrived[layer]
            if arrived != self._complete and not (layer in draft and draft_absent):
                count = len(self._expected.tokens)
                return f"{count - arrived.bit_count()} of {count} rows of layer {layer} are missing"
        return None

    def _layers_problem(self, block: RowBlock) -> str | None:
        allowed, layers = self._expected.layout.layer_range(_OWNER[block.byte_class]), block.layers
        if not layers or layers.start not in allowed or layers.stop - 1 not in allowed:
            return f"layers {layers.start}..{layers.stop} outside {allowed.start}..{allowed.stop}"
        return None

    def _token_bytes(self, block: RowBlock) -> int:
        """Bytes of one token of ``block`` (algorithms.md H4)."""
        layout = self._expected.layout
        if block.byte_class == HIDDEN:
            return self._expected.row_width * layout.hidden_dtype.itemsize
        return sum(layout.layers[layer].row_elems for layer in block.layers) * layout.dtype.itemsize

    def _bits(self, tokens: range) -> int:
        return ((1 << len(tokens)) - 1) << (tokens.start - self._expected.tokens.start)

    def _crossing(self, layers: range) -> list[int]:
        """Those of ``layers`` that have a width: rows of the others neither arrive nor miss."""
        return [layer for layer in layers if self._expected.layout.layers[layer].row_elems]
