"""A router without nodes: yields what the test says, and remembers what it was asked and how it ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace

from cluster.contract.generation import GenerationRequest, Prompt
from cluster.contract.plan import Plan
from paceline.request import FinishReason, SamplingParams, SequenceRequest, TokenLogprobs
from paceline.results import (
    Chunk,
    Completion,
    HandoffBytes,
    ModelInfo,
    NodeInfo,
    Round,
    ServedBy,
    SpeculationStats,
    Timing,
    Tokenization,
    Usage,
)

MODEL = "tiny/model"
VOCAB_SIZE = 256
PROMPT_IDS = (1, 2, 3, 4, 5)  # of every prompt


class LetterTokenizer:
    """Token i is the character i; those from 128 on are no text by themselves."""

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(i) if i < 128 else "\ufffd" for i in token_ids)


class FakeRouter:
    """Says ``rounds`` (text of each draft-verify round) for every choice, choices interleaved."""

    def __init__(self) -> None:
        self.tokenizer = LetterTokenizer()
        self.rounds = ["Hel", "lo", " you"]
        self.error: Exception | None = None
        self.error_after = 0  # chunks
        self.stall_after: int | None = None  # chunks, then silence until released or cancelled
        self.release = asyncio.Event()
        self.alive = True
        self.asked: list[GenerationRequest] = []
        self.tokenized: list[Prompt] = []
        self.started = asyncio.Event()
        self.ended = asyncio.Event()
        self.finished = 0  # requests that ran to their end

    async def generate(
        self, request: GenerationRequest, on_plan: Callable[[Plan], None] = lambda plan: None
    ) -> AsyncGenerator[Chunk, None]:
        self.asked.append(request)
        self.started.set()
        try:
            sampling = replace(request.sampling, max_tokens=16 if request.max_tokens is None else request.max_tokens)
            sampling.validate(VOCAB_SIZE)
            on_plan(Plan(request.request_id, request, (), (SequenceRequest(request.request_id, PROMPT_IDS, sampling),)))
            for sent, chunk in enumerate(self._chunks(request, sampling)):
                if self.error is not None and sent == self.error_after:
                    raise self.error
                if sent == self.stall_after:
                    await self.release.wait()
                yield chunk
                await asyncio.sleep(0)
            self.finished += 1
        finally:
            self.ended.set()

    def _chunks(self, request: GenerationRequest, sampling: SamplingParams) -> list[Chunk]:
        chunks, at = [], 0
        for text in self.rounds:
            ids = tuple(ord(letter) for letter in text)
            logprobs = (
                tuple(_logprobs(i, sampling.top_logprobs) for i in ids) if sampling.top_logprobs is not None else ()
            )
            chunks += [Chunk(c, at, ids, text, logprobs, Round(4, max(0, len(ids) - 1))) for c in range(sampling.n)]
            at += len(ids)
        ends = [Chunk(c, at, completion=_completion(request, c, at, len(self.rounds))) for c in range(sampling.n)]
        return chunks + ends

    async def tokenize(self, prompt: Prompt) -> Tokenization:
        self.tokenized.append(prompt)
        return Tokenization(PROMPT_IDS, 512)

    def model_info(self) -> ModelInfo:
        roles = ("prefill", "decode", "decode") if self.alive else ("prefill",)
        nodes = tuple(NodeInfo(f"{role}-{i}", role, "127.0.0.1:1") for i, role in enumerate(roles))
        return ModelInfo(MODEL, "float32", 512, VOCAB_SIZE, "none", 4, True, nodes)

    def ready(self) -> bool:
        return self.alive


def _logprobs(token_id: int, count: int | None) -> TokenLogprobs:
    """The token itself is best; token 200 (no text) and 201 follow, the last with probability 0."""
    best = [(token_id, -0.25), (200, -2.0), (201, float("-inf"))][: count or 0]
    return TokenLogprobs(-0.25, tuple(i for i, _ in best), tuple(value for _, value in best))


def _completion(request: GenerationRequest, choice: int, num_tokens: int, rounds: int) -> Completion:
    seed = 77 if request.sampling.seed is None else request.sampling.seed
    return Completion(
        finish_reason=FinishReason.STOP,
        usage=Usage(len(PROMPT_IDS), num_tokens, 2),
        speculation=SpeculationStats(rounds, 4 * rounds, num_tokens - rounds, num_tokens / rounds, (3, 2), (3, 3)),
        timing=Timing(0.1, 0.5, 20.0),
        nodes=ServedBy("prefill-0", "decode-1"),
        handoff=HandoffBytes(1000, 100, 10, 1),
        seed=seed + choice,
        request_id=request.request_id,
    )
