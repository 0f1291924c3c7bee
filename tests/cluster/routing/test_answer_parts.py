"""Answers with calls and reasoning, from the nodes' tokens to the chunks: rounds, failover and resume never show."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cluster.contract import public_wire
from cluster.contract.generation import Chat, ChatMessage, GenerationRequest, ReceivedChoice, Tool, ToolChoice
from cluster.contract.plan import Plan
from cluster.routing.choice import ChoiceRun
from paceline.errors import InvalidRequest
from paceline.parsing.answer import AnswerFormat, AnswerParts, CallableTool, call_ids
from paceline.parsing.parser import AnswerParser
from paceline.request import FinishReason, Grammar, GrammarKind, SamplingParams, SequenceRequest
from paceline.results import Chunk, ToolCall, joined
from paceline.text.markers import keeping
from paceline.text.tokenizer import IncrementalDetokenizer, Tokenizer
from tests.support import scripted_nodes
from tests.support.scripted_nodes import fleet
from tests.support.tiny_chat import EOS, TEMPLATE, write_chat_tokenizer

ARGUMENTS = '{"city": "Paris ☂", "days": 3}'
ANSWER = f'I look.\n<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
SCHEMA = '{"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}'
TOOL = Tool("get_weather", "The weather.", SCHEMA)
FORM = AnswerFormat("hermes", tools=(CallableTool("get_weather", ("city",)),))
PROMPT = (1, 2, 3)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(write_chat_tokenizer(tmp_path_factory.mktemp("chat")))


def says(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Every node's model writes ``text`` and ends."""
    tokens = [*text.encode(), EOS]
    ids = {byte: i for i, byte in enumerate(_alphabet())}
    monkeypatch.setattr(
        scripted_nodes,
        "output_token",
        lambda request, index: EOS if tokens[index] == EOS else ids[tokens[index]],
    )


def _alphabet() -> list[int]:
    """Bytes in the order of their ids in `tiny_chat`."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    letters = {b: chr(b) for b in printable} | {b: chr(0x100 + i) for i, b in enumerate(others)}
    return sorted(letters, key=lambda b: letters[b])


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return [*tokenizer.encode(text), EOS]


def run_of(tokenizer: Tokenizer, form: AnswerFormat = FORM, stop: Sequence[str] = (), **params: Any) -> ChoiceRun:
    options: dict[str, Any] = {"max_tokens": 500, "seed": 5, "stop_token_ids": (EOS,)}
    sampling = SamplingParams(**options | params)
    sequence = SequenceRequest("r", PROMPT, sampling)
    parser = AnswerParser(form, call_ids(PROMPT, 5, None))
    return ChoiceRun(0, "r", sequence, IncrementalDetokenizer(tokenizer, PROMPT, stop), 0.0, True, parser)


def take(run: ChoiceRun, ids: Sequence[int], size: int) -> list[Chunk]:
    chunks = []
    for at in range(0, len(ids), size):
        if run.finish_reason is None:
            chunks.append(run.take(at, ids[at : at + size], [], ()))
    run.end_by_tokens()
    return [*(chunk for chunk in chunks if chunk is not None), run.complete()]


def parts(chunks: Sequence[Chunk]) -> AnswerParts:
    found = AnswerParts()
    for chunk in chunks:
        found += AnswerParts(chunk.text, chunk.reasoning, chunk.tool_calls)
    return found


def reason(chunks: Sequence[Chunk]) -> FinishReason:
    assert chunks[-1].completion is not None
    return chunks[-1].completion.finish_reason


@pytest.mark.parametrize("size", [1, 2, 3, 7, 500])
def test_rounds_of_any_size(tokenizer: Tokenizer, size: int) -> None:
    chunks = take(run_of(tokenizer), ids_of(tokenizer, ANSWER), size)
    (call,) = joined(parts(chunks).tool_calls)
    assert (call.name, call.arguments) == ("get_weather", ARGUMENTS)
    assert call.id == call_ids(PROMPT, 5, None)(0)
    assert (parts(chunks).text, reason(chunks)) == ("I look.", FinishReason.TOOL_CALLS)


def test_a_resumed_choice_gives_what_follows(tokenizer: Tokenizer) -> None:
    """Wherever a stream breaks: what the client has, and what comes after, are the whole."""
    ids = ids_of(tokenizer, ANSWER)
    whole = parts(take(run_of(tokenizer), ids, 1))
    for had in range(len(ids)):
        before = run_of(tokenizer)
        first = AnswerParts()
        for at in range(had):
            chunk = before.take(at, ids[at : at + 1], [], ())
            first += parts([chunk] if chunk else [])
        for given in (ids[:had], []):
            after = run_of(tokenizer)
            after.resume(ReceivedChoice(0, had, tuple(given)))
            rest = [after.take(at, ids[at : at + 5], [], ()) for at in range(len(given), len(ids), 5)]
            after.end_by_tokens()
            second = parts([*(chunk for chunk in rest if chunk is not None), after.complete()])
            assert first.text + second.text == whole.text
            assert joined((*first.tool_calls, *second.tool_calls)) == joined(whole.tool_calls), had


def test_the_end_of_one_call(tokenizer: Tokenizer) -> None:
    form = AnswerFormat("hermes", tools=FORM.tools, one_tool_call=True)
    for size in (1, 4, 500):
        run = run_of(tokenizer, form)
        chunks = take(run, ids_of(tokenizer, ANSWER + ANSWER), size)
        assert [call.arguments for call in joined(parts(chunks).tool_calls)] == [ARGUMENTS]
        assert run.token_ids == tokenizer.encode(ANSWER[: ANSWER.index("}") + 1])
        assert reason(chunks) is FinishReason.TOOL_CALLS


def test_ends(tokenizer: Tokenizer) -> None:
    cut = ids_of(tokenizer, ANSWER)[:70]
    assert reason(take(run_of(tokenizer, max_tokens=70), cut, 3)) is FinishReason.LENGTH
    assert reason(take(run_of(tokenizer), ids_of(tokenizer, "No call."), 3)) is FinishReason.STOP
    chunks = take(run_of(tokenizer, stop=["days"]), ids_of(tokenizer, ANSWER), 3)
    assert joined(parts(chunks).tool_calls)[0].arguments == '{"city": "Paris ☂", "'
    assert reason(chunks) is FinishReason.TOOL_CALLS


def test_markers_that_are_special_tokens_are_read(tmp_path: Path) -> None:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Backend

    backend = Backend.from_file(str(write_chat_tokenizer(tmp_path) / "tokenizer.json"))
    backend.add_special_tokens([AddedToken("[TOOL_CALLS]", special=True), AddedToken("[ARGS]", special=True)])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(tmp_path)
    ids = tokenizer.encode("[TOOL_CALLS]get_weather[ARGS]{}</s>")
    kept = keeping(tokenizer, ("[TOOL_CALLS]", "[ARGS]", "{"))
    text = IncrementalDetokenizer(kept)
    assert "".join(map(text.push, ids)) + text.finish() == "[TOOL_CALLS]get_weather[ARGS]{}"
    assert keeping(tokenizer, ("{",)) is tokenizer


# -- through the router --------------------------------------------------------------------------------------------


def ask(**options: Any) -> GenerationRequest:
    chat = Chat((ChatMessage("user", "Weather?"),), **({"tools": (TOOL,)} | options))
    return GenerationRequest(chat, SamplingParams(seed=3), request_id="r")


async def test_nodes_that_die_never_show(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    says(monkeypatch, ANSWER)
    plans: list[Plan] = []
    found = []
    for die_after in (None, 5, 40, 60):
        async with fleet(decode=2, tokenizer=tokenizer, max_model_len=4096) as made:
            for node in made.nodes.values():
                node.script.die_after = die_after if node.record.role == "decode" else None
            chunks = [chunk async for chunk in made.router.generate(ask(), plans.append)]
            found.append((parts(chunks).text, joined(parts(chunks).tool_calls), reason(chunks)))
    assert all(one == found[0] for one in found)
    text, (call,), why = found[0]
    assert (text, call.arguments, why) == ("I look.", ARGUMENTS, FinishReason.TOOL_CALLS)
    assert plans[0].admitted.answer_format == FORM
    assert "<tool_call>" in tokenizer.decode(
        plans[0].sequences[0].prompt_token_ids
    )  # the template knows no tools: told in text


async def test_the_admitted_request_reads_its_answer_again(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As another router does: from the journal's entry alone."""
    says(monkeypatch, ANSWER)
    plans: list[Plan] = []
    async with fleet(tokenizer=tokenizer, max_model_len=4096) as made:
        first = [chunk async for chunk in made.router.generate(ask(), plans.append)]
        entry = public_wire.journal_entry(plans[0].admitted)
        again = [chunk async for chunk in made.router.generate(public_wire.from_journal_entry(entry), plans.append)]
    assert parts(first) == parts(again) or joined(parts(first).tool_calls) == joined(parts(again).tool_calls)
    one, two = (public_wire.plan_digest(plan.admitted) for plan in plans)
    assert one == two
    assert public_wire.plan_digest(GenerationRequest(plans[0].admitted.prompt, plans[0].admitted.sampling)) != one


async def test_without_tools_nothing_is_read(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    says(monkeypatch, ANSWER)
    async with fleet(tokenizer=tokenizer, max_model_len=4096) as made:
        for options in ({"tools": ()}, {"tool_choice": ToolChoice.NONE}):
            plans: list[Plan] = []
            chunks = [chunk async for chunk in made.router.generate(ask(**options), plans.append)]
            assert (parts(chunks).text, parts(chunks).tool_calls, reason(chunks)) == (ANSWER, (), FinishReason.STOP)
            assert plans[0].admitted.answer_format is None
            assert "tools" not in tokenizer.decode(plans[0].sequences[0].prompt_token_ids)


async def test_reasoning_by_what_the_template_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    says(monkeypatch, "hm\n</think>\n\nHello.")
    thinks = TEMPLATE.replace("<s>assistant\n", "<s>assistant\n<think>\n") + "{# </think> #}"
    tokenizer = Tokenizer.from_folder(write_chat_tokenizer(tmp_path, thinks))
    for parser, expected in (("auto", ("Hello.", "hm")), ("none", ("hm\n</think>\n\nHello.", ""))):
        async with fleet(tokenizer=tokenizer, max_model_len=4096, reasoning_parser=parser) as made:
            (choice,) = (await made.router.complete(ask(tools=()))).choices
        assert (choice.text, choice.reasoning) == expected


GRAMMARS: list[tuple[dict[str, Any], bool]] = [
    ({}, False),
    ({"tool_choice": ToolChoice.REQUIRED}, True),
    ({"tool_choice": ToolChoice.NAMED, "tool_name": "get_weather"}, True),
    ({"tools": (Tool("a", "", SCHEMA, strict=True),)}, True),
    ({"tools": (TOOL,), "one_tool_call": True}, False),
    ({"tools": (Tool("a", strict=True),), "tool_choice": ToolChoice.NONE}, False),
]


@pytest.mark.parametrize(("options", "grammar"), GRAMMARS)
async def test_which_requests_get_a_grammar(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], grammar: bool
) -> None:
    says(monkeypatch, "x")
    plans: list[Plan] = []
    async with fleet(tokenizer=tokenizer, max_model_len=4096) as made:
        _ = [chunk async for chunk in made.router.generate(ask(**options), plans.append)]
    made_grammar = plans[0].sequences[0].params.grammar
    assert (made_grammar is not None) is grammar
    if made_grammar is not None:
        assert made_grammar.kind is GrammarKind.EBNF
        assert json.dumps(json.loads(SCHEMA)) in made_grammar.source


async def test_an_answer_format_is_of_token_ids(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    says(monkeypatch, ANSWER)
    wrong = [
        (GenerationRequest(ask().prompt, answer_format=FORM), "answer_format"),
        (GenerationRequest(PROMPT, answer_format=AnswerFormat("none")), "answer_format.tool_calls"),
        (GenerationRequest(PROMPT, answer_format=AnswerFormat(reasoning="x")), "answer_format.reasoning"),
        (
            GenerationRequest(PROMPT, answer_format=AnswerFormat(tools=(CallableTool(""),))),
            "answer_format.tools[0].name",
        ),
    ]
    async with fleet(tokenizer=tokenizer, max_model_len=4096) as made:
        (choice,) = (await made.router.complete(GenerationRequest(PROMPT, answer_format=FORM))).choices
        assert choice.tool_calls[0].arguments == ARGUMENTS
        for request, field in wrong:
            with pytest.raises(InvalidRequest) as raised:
                await made.router.complete(request)
            assert raised.value.field == field


CALL = ChatMessage("assistant", "", (ToolCall("1", "get_weather", "{}"),))
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"tools": (TOOL, Tool("a"), TOOL)}, "tools[2].name"),
    ({"tools": (Tool("a b"),)}, "tools[0].name"),
    ({"tools": (Tool("a" * 65),)}, "tools[0].name"),
    ({"tools": (Tool("a", "\ud800"),)}, "tools[0].description"),
    ({"tools": (Tool("a", "", "[1]"),)}, "tools[0].parameters"),
    ({"tools": (Tool("a", "", "{"),)}, "tools[0].parameters"),
    ({"tools": (Tool("a", "", '{"type": "array"}'),)}, "tools[0].parameters"),
    ({"tools": (Tool("a", "", '{"a": ' * 20_000),)}, "tools[0].parameters"),
    ({"tools": (Tool("a", "", '{"a": ' * 2_000),)}, "tools[0].parameters"),
    ({"tools": tuple(Tool(f"a{i}", "d" * 60_000) for i in range(10))}, "tools"),
    ({"tools": (TOOL,) * 129}, "tools"),
    ({"tools": (), "tool_choice": ToolChoice.REQUIRED}, "tool_choice"),
    ({"tool_choice": ToolChoice.NAMED, "tool_name": "other"}, "tool_name"),
    ({"messages": (ChatMessage("user", "a", CALL.tool_calls),)}, "messages[0].tool_calls"),
    ({"messages": (ChatMessage("assistant", "", (ToolCall("1", "a b", "{}"),)),)}, "messages[0].tool_calls[0].name"),
    ({"messages": (ChatMessage("assistant", "", (ToolCall("1", "a", "{"),)),)}, "messages[0].tool_calls[0].arguments"),
    ({"messages": (CALL, ChatMessage("tool", "x", tool_call_id="2"))}, "messages[1].tool_call_id"),
    ({"messages": (ChatMessage("tool", "x", tool_call_id="1"),)}, "messages[0].tool_call_id"),
    ({"messages": (ChatMessage("user", "x", tool_call_id="1"),)}, "messages[0].tool_call_id"),
    ({"messages": (ChatMessage("user", "x", reasoning="1"),)}, "messages[0].reasoning"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"template_values": "[]"}, "template_values"),
    ({"template_values": '{"messages": 1}'}, "template_values.messages"),
    ({"template_values": '{"a": "' + "x" * 20_000 + '"}'}, "template_values"),
]


@pytest.mark.parametrize(("options", "field"), WRONG, ids=lambda value: value if isinstance(value, str) else "")
async def test_what_is_refused(tokenizer: Tokenizer, options: dict[str, Any], field: str) -> None:
    request = GenerationRequest(Chat(options["messages"])) if "messages" in options else ask(**options)
    async with fleet(tokenizer=tokenizer, max_model_len=4096) as made:
        with pytest.raises(InvalidRequest) as raised:
            await made.router.complete(request)
    assert raised.value.field == field


async def test_a_deployment_without_a_parser_refuses_tools(tokenizer: Tokenizer) -> None:
    async with fleet(tokenizer=tokenizer, max_model_len=4096, tool_call_parser="none") as made:
        with pytest.raises(InvalidRequest, match="tools"):
            await made.router.complete(ask())


async def test_a_body_and_tools(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    says(monkeypatch, "x")
    plans: list[Plan] = []
    body = Grammar(GrammarKind.JSON_SCHEMA, '{"type": "integer"}')
    request = GenerationRequest(ask().prompt, SamplingParams(grammar=body))
    async with fleet(tokenizer=tokenizer, max_model_len=4096) as made:
        _ = [chunk async for chunk in made.router.generate(request, plans.append)]
    grammar = plans[0].admitted.sampling.grammar
    assert grammar is not None
    assert "body:" in grammar.source
    assert "calls:" in grammar.source
