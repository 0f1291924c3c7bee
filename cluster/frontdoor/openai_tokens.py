"""The bodies that ``/tokenize`` and ``/detokenize`` take: vLLM's, as models."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from cluster.contract.generation import MAX_MESSAGES
from cluster.frontdoor.json_models import JsonObject, Neutral, Text, at_most
from cluster.frontdoor.openai_requests import Message, TokenId


class TokenizeRequest(JsonObject):
    """A body of ``/tokenize``: a prompt or messages."""

    model: Text | None = None
    """The model, which must be the one that is served. It may be left out."""
    prompt: Annotated[Text, Field(min_length=1)] | None = None
    """A text."""
    messages: (
        Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True), at_most(MAX_MESSAGES)]
        | None
    ) = None
    """The turns of a chat, to which the model's template is applied."""
    add_special_tokens: bool | None = None
    """Begin a text with the model's special tokens, as prompts do. The default is true. A chat has its template's."""
    add_generation_prompt: bool | None = None
    """End a chat with what makes the model answer. The default is true."""
    return_token_strs: bool | None = None
    """Tell the text of each token too. The default is false."""
    continue_final_message: Annotated[Any, Neutral(False)] = None
    chat_template: Annotated[Any, Neutral()] = None
    tools: Annotated[Any, Neutral([])] = None


class DetokenizeRequest(JsonObject):
    """A body of ``/detokenize``."""

    model: Text | None = None
    """The model, which must be the one that is served. It may be left out."""
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]
    """Token ids."""
