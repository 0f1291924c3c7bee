"""``/tokenize`` and ``/detokenize``, in vLLM's shapes. Long texts are worked on off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Protocol

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from cluster.contract.generation import Chat, Prompt
from cluster.frontdoor import openapi
from cluster.frontdoor.http_errors import check_model
from cluster.frontdoor.http_exchange import read_object
from cluster.frontdoor.json_models import read
from cluster.frontdoor.openai_answers import Detokenized, Tokens
from cluster.frontdoor.openai_parse import chat_message
from cluster.frontdoor.openai_tokens import DetokenizeRequest, TokenizeRequest
from cluster.frontdoor.serving import TokenText
from paceline.errors import InvalidRequest
from paceline.results import ModelInfo, Tokenization


class Tokenizing(Protocol):
    """cluster.routing.router.Router, as far as these endpoints need it."""

    @property
    def tokenizer(self) -> TokenText: ...

    async def tokenize(self, prompt: Prompt) -> Tokenization:
        """Token ids of a text or a chat."""

    def model_info(self) -> ModelInfo:
        """What is served and how."""


def add_tokens(app: FastAPI, router: Tokenizing) -> None:
    """Add the endpoints."""

    @app.post("/tokenize", **openapi.TOKENIZE)
    async def tokenize(request: Request) -> Response:
        """Tell the tokens of a text, or of a chat after the model's template. The shape is vLLM's."""
        asked = await read_object(request, partial(read, TokenizeRequest))
        info = router.model_info()
        check_model(asked.model, info.names)
        token_ids = await _token_ids(router, asked)
        texts = await asyncio.to_thread(_texts, router.tokenizer, token_ids) if asked.return_token_strs else None
        made = Tokens(count=len(token_ids), max_model_len=info.max_model_len, tokens=list(token_ids), token_strs=texts)
        return JSONResponse(made)

    @app.post("/detokenize", **openapi.DETOKENIZE)
    async def detokenize(request: Request) -> Response:
        """Tell the text of tokens, special ones included. The shape is vLLM's."""
        asked = await read_object(request, partial(read, DetokenizeRequest))
        info = router.model_info()
        check_model(asked.model, info.names)
        for position, token_id in enumerate(asked.tokens):
            if token_id >= info.vocab_size:
                raise InvalidRequest(f"tokens[{position}]", f"is outside the vocabulary of {info.vocab_size}")
        return JSONResponse(Detokenized(prompt=await asyncio.to_thread(router.tokenizer.decode, asked.tokens, False)))


async def _token_ids(router: Tokenizing, asked: TokenizeRequest) -> Sequence[int]:
    if asked.prompt is not None and asked.messages is not None:
        raise InvalidRequest("messages", "and prompt do not go together; give one of them")
    if asked.prompt is not None:
        if asked.add_special_tokens is False:
            return await asyncio.to_thread(router.tokenizer.encode, asked.prompt, False)
        return (await router.tokenize(asked.prompt)).token_ids
    if asked.messages is None:
        raise InvalidRequest("prompt", "is missing; give it or messages")
    if asked.add_special_tokens:
        raise InvalidRequest("add_special_tokens", "does not go with messages; the template has the special tokens")
    turns = tuple(chat_message(i, message) for i, message in enumerate(asked.messages))
    return (await router.tokenize(Chat(turns, no_generation_prompt=asked.add_generation_prompt is False))).token_ids


def _texts(tokenizer: TokenText, token_ids: Sequence[int]) -> list[str]:
    return [tokenizer.token_bytes(token_id).decode("utf-8", "replace") for token_id in token_ids]
