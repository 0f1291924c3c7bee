"""Which prompt rows the next forward computes."""

from __future__ import annotations

from collections.abc import Iterable

from paceline.engine.model_runner import PrefillChunk
from paceline.spec_decode.sequence import Sequence


def plan_chunks(seqs: Iterable[Sequence], budget: int) -> list[PrefillChunk]:
    """Share ``budget`` tokens among sequences in prefill, first come first served.

    The first sequence takes what it needs; what is left goes to the next, so that short prompts ride along with
    the tail of a long one.
    """
    chunks: list[PrefillChunk] = []
    for seq in seqs:
        if budget <= 0:
            break
        end = min(seq.num_prefill, seq.num_computed + budget)
        chunks.append(PrefillChunk(seq, seq.num_computed, end))
        budget -= end - seq.num_computed
    return chunks
