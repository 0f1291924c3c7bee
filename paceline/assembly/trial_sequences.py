"""Sequences of the node's own, for measuring itself at start: they leave no page, no cache entry, no learnt text."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from types import TracebackType
from typing import Self

from paceline.engine.model_runner import ModelRunner, PrefillChunk
from paceline.request import SamplingParams, SequenceRequest, SpeculationParams
from paceline.spec_decode.sequence import Sequence


class TrialSequences:
    """Sequences on a runner, greedy unless said otherwise; leaving the ``with`` block gives all pages back.

    They pass by ``new_sequence`` and ``release``, so neither the prefix cache nor a drafter that learns sees them.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.seqs: list[Sequence] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for seq in self.seqs:
            seq.table.release()

    def add(
        self,
        prompts: Seq[Seq[int]],
        max_tokens: int,
        num_slots: int,
        speculation: SpeculationParams,
        params: SamplingParams = SamplingParams(temperature=0.0, seed=0),
    ) -> None:
        """Prefill ``prompts`` in one forward; each has ``num_slots`` slots past its prompt. Raises Overloaded."""
        runner, chunks = self._runner, []
        params = replace(params, max_tokens=max_tokens)
        for prompt in prompts:
            request = SequenceRequest("trial", tuple(prompt), params, speculation=speculation)
            seq = Sequence.start(request, runner.memory.table())
            self.seqs.append(seq)
            seq.table.ensure(seq.num_prefill + num_slots)
            chunks.append(PrefillChunk(seq, 0, seq.num_prefill))
        runner.prefill(chunks)
