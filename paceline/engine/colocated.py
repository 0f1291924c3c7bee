"""Both phases in one process: the smallest complete engine.

Oracle of the exactness tests, and the benchmark's baseline.

Continuous batching by hand: prompts are prefilled chunk by chunk as they are admitted, all admitted sequences decode
together, pages are reserved for the whole sequence at admission.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from paceline.engine.model_runner import ModelRunner, PrefillChunk, RoundResult
from paceline.request import FinishReason, SequenceRequest, TokenLogprobs
from paceline.spec_decode.sequence import Sequence
from paceline.spec_decode.stats import SpecStats


@dataclass
class Completed:
    """One finished sequence."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    stats: SpecStats = field(default_factory=SpecStats)


class ColocatedEngine:
    """Runs requests to the end in one process."""

    def __init__(self, runner: ModelRunner, chunk_tokens: int = 256, max_running: int = 32) -> None:
        self.runner, self.chunk_tokens, self.max_running = runner, chunk_tokens, max_running

    def generate(self, requests: Seq[SequenceRequest]) -> list[Completed]:
        """Answers in the order of ``requests``."""
        waiting = deque(enumerate(requests))
        running: dict[int, Sequence] = {}
        done = [Completed() for _ in requests]
        while waiting or running:
            while waiting and len(running) < self.max_running:
                index, request = waiting.popleft()
                running[index] = self._prefill(request, done[index])
            self._drop_finished(running, done)
            if running:
                for index, result in zip(running, self.runner.decode(list(running.values())), strict=True):
                    self._append(done[index], result)
                self._drop_finished(running, done)
        return done

    def _prefill(self, request: SequenceRequest, done: Completed) -> Sequence:
        seq = self.runner.new_sequence(request)
        self.runner.take_pages(seq, seq.num_prefill + request.params.max_tokens + self.runner.spec_slots)
        for chunk in self._chunks(seq):
            token = self.runner.prefill([chunk])[0]
            done.prompt_logprobs += seq.take_prompt_logprobs()[1]
            if token is not None:
                done.token_ids.append(token.token_id)
                done.logprobs.extend([token.logprobs] if token.logprobs else [])
        return seq

    def _chunks(self, seq: Sequence) -> Iterator[PrefillChunk]:
        for start in range(seq.num_computed, seq.num_prefill, self.chunk_tokens):
            yield PrefillChunk(seq, start, min(start + self.chunk_tokens, seq.num_prefill))

    @staticmethod
    def _append(done: Completed, result: RoundResult) -> None:
        done.token_ids.extend(result.token_ids)
        done.logprobs.extend(result.logprobs)

    def _drop_finished(self, running: dict[int, Sequence], done: list[Completed]) -> None:
        for index in [i for i, seq in running.items() if seq.finish_reason is not None]:
            seq = running.pop(index)
            if seq.failure is not None:
                self.runner.release(seq)
                raise seq.failure
            answer = done[index]
            answer.finish_reason, answer.stats, answer.cached_tokens = seq.finish_reason, seq.stats, seq.cached_tokens
            self.runner.release(seq)
