"""A router without nodes that yields given chunks: thoughts, text and calls of tools, as the parsers give them."""

from __future__ import annotations

from dataclasses import replace

from cluster.contract.generation import GenerationRequest
from paceline.request import FinishReason, SamplingParams
from paceline.results import Chunk, Completion, ToolCallPart, Usage
from tests.support.fake_router import PROMPT_IDS, FakeRouter


def thought(text: str) -> Chunk:
    return Chunk(0, 0, reasoning=text)


def text(text: str) -> Chunk:
    return Chunk(0, 0, text=text)


def call(index: int, arguments: str, call_id: str = "", name: str = "") -> Chunk:
    """A part of a call; the first one of a call has id and name."""
    return Chunk(0, 0, tool_calls=(ToolCallPart(index, call_id, name, arguments),))


class ChunkRouter(FakeRouter):
    """Yields ``chunks``, then ``completion``."""

    def __init__(self) -> None:
        super().__init__()
        self.chunks: list[Chunk] = []
        self.completion = Completion(FinishReason.STOP, Usage(len(PROMPT_IDS), 9, 2), seed=77)

    def _chunks(self, request: GenerationRequest, sampling: SamplingParams) -> list[Chunk]:
        return [*self.chunks, Chunk(0, 0, completion=replace(self.completion, request_id=request.request_id))]
