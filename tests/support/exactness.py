"""Run requests through an engine and keep every logit row that produced a token, to compare bits between engines."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from paceline.engine.colocated import ColocatedEngine
from paceline.engine.model_runner import ModelRunner
from paceline.request import SequenceRequest
from paceline.spec_decode.sequence import Sequence


@dataclass(frozen=True)
class Outcome:
    """What one request produced."""

    token_ids: tuple[int, ...]
    logit_bits: tuple[str, ...]  # digest of the logits behind each token, in order of position
    accepted_per_round: tuple[int, ...]


class LogitBits:
    """Digest of every logits row that a token was sampled from, by request and position."""

    def __init__(self, runner: ModelRunner) -> None:
        self.seen: dict[tuple[str, int], str] = {}
        runner.observe_logits = self

    def __call__(self, seq: Sequence, position: int, logits: torch.Tensor) -> None:
        self.seen[seq.request.request_id, position] = digest(logits)

    def of(self, request: SequenceRequest, num_tokens: int) -> tuple[str, ...]:
        """Digests behind the tokens of ``request``."""
        start = len(request.prompt_token_ids) + len(request.output_token_ids)
        return tuple(self.seen[request.request_id, start + i] for i in range(num_tokens))


def digest(logits: torch.Tensor) -> str:
    """A short name of the bits of a row. Processors have instructions for this hash."""
    return hashlib.sha256(logits.cpu().numpy().tobytes()).hexdigest()[:16]


def run(
    runner: ModelRunner, requests: Seq[SequenceRequest], *, batch: int = 1, chunk_tokens: int = 10_000
) -> list[Outcome]:
    """Outcomes of ``requests``, ``batch`` at a time."""
    bits = LogitBits(runner)
    engine = ColocatedEngine(runner, chunk_tokens=chunk_tokens, max_running=batch)
    done = engine.generate(requests)
    runner.observe_logits = None
    assert runner.allocator.check_integrity() == []
    return [
        Outcome(tuple(d.token_ids), bits.of(r, len(d.token_ids)), tuple(d.stats.accepted_per_round))
        for r, d in zip(requests, done, strict=True)
    ]
