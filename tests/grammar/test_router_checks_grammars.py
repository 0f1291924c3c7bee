"""The router refuses a grammar by name before any node is asked, and lets an answer under one end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cluster.contract.generation import Chat, ChatMessage, GenerationRequest, Tool, ToolChoice
from cluster.contract.plan import ServedModel, make_plan
from cluster.contract.public_wire import from_journal_entry, journal_entry, plan_digest
from cluster.contract.tools import answer_style
from paceline.config import ServeConfig
from paceline.errors import InvalidRequest
from paceline.grammar.check import GrammarChecker
from paceline.request import Grammar, GrammarKind, SamplingParams
from paceline.text.tokenizer import Tokenizer
from tests.support.grammar_engines import GRAMMAR_VOCAB
from tests.support.tiny_chat import EOS, write_chat_tokenizer

SERVED = ServedModel("tiny", 512, GRAMMAR_VOCAB, ("ngram",), ServeConfig(model="tiny"))


def asked(source: str, **changes: object) -> GenerationRequest:
    sampling = SamplingParams(seed=1, grammar=Grammar(GrammarKind.REGEX, source))
    return GenerationRequest(prompt=(1, 2), sampling=replace(sampling, **changes), max_tokens=8)  # type: ignore[arg-type]


async def test_a_grammar_is_checked_with_the_plan(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(write_chat_tokenizer(tmp_path))
    grammars = GrammarChecker(tmp_path, GRAMMAR_VOCAB)
    with pytest.raises(InvalidRequest, match="unclosed group") as refused:
        await make_plan(asked("(a"), SERVED, tokenizer, grammars)
    assert refused.value.field == "grammar"
    plan = await make_plan(asked("a+", ignore_eos=True), SERVED, tokenizer, grammars)
    assert plan.sequences[0].params.grammar == Grammar(GrammarKind.REGEX, "a+")
    assert EOS in plan.sequences[0].params.stop_token_ids
    grammars.close()


@pytest.mark.parametrize(
    ("choice", "field"),
    [(ToolChoice.REQUIRED, "tools[1].parameters"), (ToolChoice.AUTO, None), (ToolChoice.NAMED, None)],
)
async def test_a_tool_is_named_where_its_schema_is_refused(
    tmp_path: Path, choice: ToolChoice, field: str | None
) -> None:
    """The client asked for no grammar. A tool whose arguments need not fit may have any schema."""
    tokenizer = Tokenizer.from_folder(write_chat_tokenizer(tmp_path))
    served = replace(SERVED, max_model_len=4096, style=answer_style(ServeConfig(model="tiny"), tokenizer.template))
    grammars = GrammarChecker(tmp_path, GRAMMAR_VOCAB)
    tools = (Tool("good", "", '{"type": "object"}'), Tool("bad", "", '{"type": "object", "not": {}}'))
    chat = Chat((ChatMessage("user", "hi"),), tools=tools, tool_choice=choice, tool_name="good")
    request = GenerationRequest(prompt=chat, sampling=SamplingParams(seed=1), max_tokens=8)
    try:
        if field is None:
            await make_plan(request, served, tokenizer, grammars)
        else:
            with pytest.raises(InvalidRequest, match="Unimplemented keys") as refused:
                await make_plan(request, served, tokenizer, grammars)
            assert refused.value.field == field
    finally:
        grammars.close()


async def test_the_journal_and_the_digest_know_the_grammar(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(write_chat_tokenizer(tmp_path))
    one, other = [(await make_plan(asked(source), SERVED, tokenizer)).admitted for source in ("a+", "b+")]
    assert from_journal_entry(journal_entry(one)).sampling.grammar == one.sampling.grammar
    assert plan_digest(replace(one, request_id="")) != plan_digest(replace(other, request_id=""))
