"""The fake runner for hand-offs in which draft state may be missing, or crosses as hidden rows."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import torch

from paceline.config import NodeConfig
from paceline.engine.handoff_contents import HandoffContents
from paceline.engine.model_runner import PrefillChunk, RoundResult, SampledToken
from paceline.models.base import AfterLayer
from paceline.spec_decode.drafters.row_exporter import KEPT
from paceline.spec_decode.sequence import Sequence
from tests.fakes.runner import HIDDEN, FakeRunner


class FuzzRunner(FakeRunner):
    """``mode``: "draft_kv" or "hidden_states". A wrong row is told to ``faults`` too: an engine that lives through
    the error would hide it."""

    def __init__(self, config: NodeConfig, mode: str, faults: list[str]) -> None:
        super().__init__(config)
        self.handoff = HandoffContents(mode, HIDDEN, HIDDEN if mode == "hidden_states" else 0)
        self._faults = faults
        self.between: Callable[[], None] = lambda: None  # the midst of a forward, after each layer

    def new_sequence(self, request: object, most_cached: int | None = None, grammar: object = None) -> Sequence:
        """Where hidden rows cross there is no prefix cache at the source, so nothing is to be left out."""
        assert most_cached is None or self.prefix is None
        return super().new_sequence(request, grammar=grammar)  # type: ignore[arg-type]

    def prefill(self, chunks: Seq[PrefillChunk], after_layer: AfterLayer | None = None) -> list[SampledToken | None]:
        results = super().prefill(chunks, self._interrupted(after_layer))
        for chunk in chunks if self.handoff.row_width else ():
            kept = chunk.seq.memory.setdefault(KEPT, [])
            assert isinstance(kept, list)
            kept.append((chunk.start, self._hidden(chunk.seq, chunk.start, chunk.end)))
        return results

    def digest(self, seq: Sequence, start: int, end: int, rows: torch.Tensor) -> None:
        """The draft prefill of hidden rows, which must be those of this sequence's tokens."""
        if not torch.equal(rows, self._hidden(seq, start, end)):
            self._faults.append(f"{seq.request.request_id}: wrong hidden rows")
        if end == seq.num_prefill:
            self._catch_up(seq)

    def recover_draft(self, seq: Sequence, start: int, most: int) -> int:
        """Rounds catch up by themselves, so there is nothing left to do but to count."""
        return min(start + most, seq.num_computed)

    def decode(self, seqs: Seq[Sequence]) -> list[RoundResult]:
        for seq in seqs:
            if seq.draft is None or seq.draft_rows < seq.num_computed:
                self._catch_up(seq)
        try:
            return super().decode(seqs)
        except AssertionError as error:
            self._faults.append(f"{[seq.request.request_id for seq in seqs]}: {error}")
            raise

    def release(self, seq: Sequence) -> None:
        """Only rows whose draft rows are exact enter the cache."""
        if self.prefix and seq.table.pages:
            rows = min(seq.num_computed, seq.draft_rows)
            self.prefix.insert(seq.token_ids, seq.table.pages, rows, seq.request.cache_salt)
        seq.table.release()

    def _interrupted(self, after_layer: AfterLayer | None) -> AfterLayer:
        def after(layer: int) -> None:
            if after_layer is not None:
                after_layer(layer)
            self.between()

        return after

    def _catch_up(self, seq: Sequence) -> None:
        """Compute the draft rows that did not come. Target rows must be there."""
        layers = range(2, 3)
        whole = self._rows(seq, 0, seq.num_computed)
        slots = seq.table.slots[: seq.num_computed]
        self.kv.scatter(layers, slots, whole[-self.kv.layout.layers[2].row_elems * seq.num_computed :])
        self._draft(seq)

    @staticmethod
    def _hidden(seq: Sequence, start: int, end: int) -> torch.Tensor:
        tokens = torch.tensor(seq.token_ids[start:end])
        return (tokens * 13 + torch.arange(start, end)).float()[:, None].expand(-1, HIDDEN).clone()
