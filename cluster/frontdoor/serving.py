"""The router, as far as the HTTP front door needs it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Protocol

from cluster.contract.generation import GenerationRequest, Prompt
from cluster.contract.plan import Plan
from cluster.frontdoor.openai_stream import Decoder
from paceline.results import Chunk, ModelInfo, Tokenization


class TokenText(Protocol):
    """paceline.text.tokenizer.Tokenizer, as far as these endpoints need it."""

    def encode(self, text: str, add_special_tokens: bool = True) -> Sequence[int]:
        """Token ids of ``text``."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ``ids``."""

    def token_bytes(self, token_id: int, skip_special_tokens: bool = False) -> bytes:
        """What the token adds to a text."""


class ServingTokenizer(Decoder, TokenText, Protocol):
    """paceline.text.tokenizer.Tokenizer, as far as HTTP needs it."""


class Serving(Protocol):
    """cluster.routing.router.Router, as far as HTTP needs it."""

    @property
    def tokenizer(self) -> ServingTokenizer: ...

    def generate(
        self, request: GenerationRequest, on_plan: Callable[[Plan], None] = lambda plan: None
    ) -> AsyncGenerator[Chunk, None]:
        """Chunks of all choices as they come. Closing it cancels the request. on_plan: called when the request may
        run, before the first chunk."""

    async def tokenize(self, prompt: Prompt) -> Tokenization:
        """Token ids of a text or a chat."""

    def model_info(self) -> ModelInfo:
        """What is served and how."""

    def ready(self) -> bool:
        """Whether a decode node is there to serve."""
