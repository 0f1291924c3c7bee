"""The check of a request's grammar, told under names that its client knows."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from cluster.contract.generation import Chat, GenerationRequest
from cluster.contract.tools import enforced_schemas
from paceline.errors import InvalidRequest, Overloaded
from paceline.grammar.check import GrammarChecker
from paceline.request import Grammar

NAMING_S = 2.0  # to find the tool that is at fault


async def check_grammar(grammars: GrammarChecker, grammar: Grammar, asked: GenerationRequest) -> None:
    """Raise InvalidRequest for the field that the client knows: the grammar that it asked for, the tool whose schema is
    at fault, or the tools, whose calls together make a grammar that is refused."""
    try:
        await grammars.check(grammar)
    except InvalidRequest as error:
        chat = asked.prompt
        if grammar == asked.sampling.grammar or not isinstance(chat, Chat) or not chat.tools:
            raise
        with suppress(TimeoutError, Overloaded):
            async with asyncio.timeout(NAMING_S):
                for i, schema in enforced_schemas(chat):
                    await _check_arguments(grammars, f"tools[{i}].parameters", schema)
        raise InvalidRequest("tools", f"make a grammar that {error.message}") from None


async def _check_arguments(grammars: GrammarChecker, where: str, schema: Grammar) -> None:
    try:
        await grammars.check(schema)
    except InvalidRequest as error:
        raise InvalidRequest(where, error.message) from None
