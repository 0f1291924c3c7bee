"""Timed continuous batching on one runner: what a round costs, and how much of it is the drafter's."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline.engine.model_runner import ModelRunner, PrefillChunk
from paceline.request import SequenceRequest
from paceline.spec_decode import sequence
from paceline.spec_decode.stats import SpecStats

CHUNK_TOKENS = 256
DRAFTER_METHODS = ("propose", "propose_unread", "extend", "observe")


class TimedRunner:
    """A runner whose rounds are timed.

    The drafter's methods are wrapped on this one object, not by a Drafter around it, so that whoever asks what kind
    of drafter it is still gets the true answer.
    """

    def __init__(self, label: str, runner: ModelRunner) -> None:
        self.label, self.runner = label, runner
        self.draft_s = 0.0  # seconds in the drafter since the start, prefill included
        self._inside = False
        self._cuda = runner.model.device.type == "cuda"
        for name in DRAFTER_METHODS:
            setattr(runner.drafter, name, self._timed(getattr(runner.drafter, name)))

    def now(self) -> float:
        """Seconds; the device's work until here is done."""
        if self._cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._inside:  # one method calling another counts once
                return method(*args, **kwargs)
            self._inside = True
            began = self.now()
            try:
                return method(*args, **kwargs)
            finally:
                self.draft_s += self.now() - began
                self._inside = False

        return timed


@dataclass(frozen=True)
class Answer:
    """What one request produced, the first token (prefill's) included."""

    token_ids: tuple[int, ...]
    stats: SpecStats


class DecodeLoop:
    """Runs requests, ``batch`` of them together, in file order; a place that falls free is filled at once.

    Seconds count decode rounds; prefill stands apart. ``decode_tokens`` leaves out the tokens that prefill sampled.
    only_full: rounds are counted while all places are taken; how requests run out is not what a batch costs.
    """

    def __init__(
        self, timed: TimedRunner, requests: Sequence[SequenceRequest], batch: int = 1, *, only_full: bool = False
    ) -> None:
        self.timed, self.runner, self.batch, self._only_full = timed, timed.runner, batch, only_full
        self.prefill_s = self.decode_s = self.draft_s = 0.0
        self.rounds = 0  # batched rounds
        self.sequence_rounds = 0  # rounds times the sequences in them
        self.decode_tokens = 0
        self.answers: dict[int, Answer] = {}  # by index into requests
        self._waiting = deque(enumerate(requests))
        self._running: dict[int, sequence.Sequence] = {}

    @property
    def finished(self) -> bool:
        """Whether every request has its answer."""
        return not self._waiting and not self._running

    def finish(self) -> DecodeLoop:
        """Run to the end."""
        while not self.finished:
            self.advance()
        return self

    def advance(self) -> None:
        """Fill free places, then one round."""
        while self._waiting and len(self._running) < self.batch:
            index, request = self._waiting.popleft()
            self._running[index] = self._prefill(request)
            self._drop_finished()
        if not self._running:
            return
        drafted, began = self.timed.draft_s, self.timed.now()
        results = self.runner.decode(list(self._running.values()))
        if len(results) == self.batch or not self._only_full:
            self.decode_s += self.timed.now() - began
            self.draft_s += self.timed.draft_s - drafted
            self.rounds += 1
            self.sequence_rounds += len(results)
            self.decode_tokens += sum(len(result.token_ids) for result in results)
        self._drop_finished()

    def _prefill(self, request: SequenceRequest) -> sequence.Sequence:
        began = self.timed.now()
        seq = self.runner.new_sequence(request)
        seq.table.ensure(seq.num_prefill + request.params.max_tokens + self.runner.spec_slots)
        for start in range(seq.num_computed, seq.num_prefill, CHUNK_TOKENS):
            self.runner.prefill([PrefillChunk(seq, start, min(start + CHUNK_TOKENS, seq.num_prefill))])
        self.prefill_s += self.timed.now() - began
        return seq

    def _drop_finished(self) -> None:
        for index in [i for i, seq in self._running.items() if seq.finish_reason is not None]:
            seq = self._running.pop(index)
            self.answers[index] = Answer(tuple(seq.output_token_ids), seq.stats)
            self.runner.release(seq)
