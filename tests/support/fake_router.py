"""A router without nodes: yields what the test says, and remembers what it was asked and how it ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace

from cluster.contract.generation import Chat, GenerationRequest, Prompt
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
PROMPT_IDS = (0, 104, 105, 33, 32)  # what every prompt is made, where nothing but its tokens matters


class LetterTokenizer:
    """Token i is the byte i; those from 128 on are parts of characters. 0 is a special token."""

    strip_start = 0

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [0] * add_special_tokens + list(text.encode())

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return b"".join(self.token_bytes(i, skip_special_tokens) for i in ids).decode("utf-8", "replace")

    def token_bytes(self, token_id: int, skip_special_tokens: bool = False) -> bytes:
        if token_id == 0:
            return b"" if skip_special_tokens else b"<s>"
        return bytes([token_id])


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
            sequence = SequenceRequest(request.request_id, PROMPT_IDS, sampling)
            on_plan(Plan(request.request_id, request, sampling.stop, (sequence,) * sampling.n))
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
            ids = tuple(text.encode())
            logprobs = (
                tuple(_logprobs(i, sampling.top_logprobs) for i in ids) if sampling.top_logprobs is not None else ()
            )
            chunks += [Chunk(c, at, ids, text, logprobs, Round(4, max(0, len(ids) - 1))) for c in range(sampling.n)]
            at += len(ids)
        ends = [Chunk(c, at, completion=_completion(request, c, at, len(self.rounds))) for c in range(sampling.n)]
        return chunks + ends

    async def tokenize(self, prompt: Prompt) -> Tokenization:
        self.tokenized.append(prompt)
        if isinstance(prompt, Chat):
            turns = "".join(f"{turn.role}: {turn.content}\n" for turn in prompt.messages)
            prompt = turns + ("" if prompt.no_generation_prompt else "assistant: ")
        ids = tuple(self.tokenizer.encode(prompt)) if isinstance(prompt, str) else prompt
        return Tokenization(ids, self.model_info().max_model_len)

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
