"""Grammars of calls, by llguidance itself: they let through what the parser reads, and nothing that does not fit."""

from __future__ import annotations

import json
from collections.abc import Callable

import llguidance
import llguidance.hf
import pytest
from llguidance import LLMatcher
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from paceline.errors import InvalidRequest
from paceline.parsing.answer import AnswerFormat, CallableTool
from paceline.parsing.formats.base import ToolSchema
from paceline.parsing.formats.lark import quoted
from paceline.parsing.grammar import Calls, Thinking, call_grammar, thinking_grammar
from paceline.parsing.reasoning import THINK
from paceline.parsing.registry import TOOL_FORMATS
from paceline.request import Grammar, GrammarKind
from tests.support.recorded_answers import BEGIN, CALL, CALL_END, FINISH, SEP, read

MARKERS = sorted({m for form in TOOL_FORMATS.values() for m in form.markers} | {"<think>", "</think>"})
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"enum": ["C", "F"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [ToolSchema("get_weather", json.dumps(SCHEMA)), ToolSchema("add", "")]
CALLABLE = (CallableTool("get_weather", ("city", "unit")), CallableTool("add"))
NUMBER = Grammar(GrammarKind.JSON_SCHEMA, '{"type": "integer"}')
JSON = '{"city": "Paris", "days": 3}'
TAGS = "<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n"
XML = "<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n"


def one_call(name: str, special: bool) -> str:
    """A call as the grammar of the format writes it."""
    named = f'[{{"name": "get_weather", "arguments": {JSON}}}]'
    return {
        "hermes": f'<tool_call>\n{{"name": "get_weather", "arguments": {JSON}}}\n</tool_call>',
        "llama3_json": f'{{"name": "get_weather", "parameters": {JSON}}}',
        "mistral": f"[TOOL_CALLS]get_weather[ARGS]{JSON}" if special else f"[TOOL_CALLS]{named}",
        "deepseek_v3": f"{BEGIN}{CALL}function{SEP}get_weather\n```json\n{JSON}\n```{CALL_END}{FINISH}",
        "deepseek_v31": f"{BEGIN}{CALL}get_weather{SEP}{JSON}{CALL_END}{FINISH}",
        "glm45": f"<tool_call>get_weather\n{TAGS}</tool_call>",
        "qwen3_coder": f"<tool_call>\n<function=get_weather>\n{XML}</function>\n</tool_call>",
    }[name]


class Checker:
    """Texts against grammars, over a tokenizer of bytes with the markers as special tokens, or without."""

    def __init__(self, special: bool) -> None:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        self.backend = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
        self.backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self.backend.decoder = decoders.ByteLevel()
        added = ["</s>", *(MARKERS if special else [])]
        self.backend.add_special_tokens([AddedToken(text, special=True) for text in added])
        theirs = PreTrainedTokenizerFast(tokenizer_object=self.backend, eos_token="</s>")
        self.tokenizer = llguidance.hf.from_tokenizer(theirs)
        self.special = special

    def literal(self, text: str) -> str:
        return f"<[{self.backend.token_to_id(text)}]>" if self.special and text in MARKERS else quoted(text)

    def takes(self, grammar: Grammar, text: str) -> bool:
        """Whether ``text`` is a whole answer."""
        matcher = LLMatcher(self.tokenizer, LLMatcher.grammar_from_lark(grammar.source))
        assert not matcher.get_error(), matcher.get_error()
        ids = self.backend.encode(text, add_special_tokens=False).ids
        return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


@pytest.fixture(scope="module", params=[False, True], ids=["as text", "as special tokens"])
def checker(request: pytest.FixtureRequest) -> Checker:
    return Checker(request.param)


@pytest.mark.parametrize("name", TOOL_FORMATS)
class TestEveryFormat:
    @pytest.mark.parametrize("thinks", [None, True, False], ids=["plain", "open", "thinks"])
    @pytest.mark.parametrize("calls", Calls)
    def test_what_passes(self, checker: Checker, name: str, calls: Calls, thinks: bool | None) -> None:
        thinking = None if thinks is None else Thinking(THINK, thinks)
        before = "" if thinks is None else "a < b</think>\n\n" if thinks else "<think>\na < b</think>\n\n"
        body = NUMBER if calls is Calls.OR_BODY else None
        grammar = call_grammar(TOOL_FORMATS[name], TOOLS, checker.literal, calls=calls, body=body, thinking=thinking)
        good = one_call(name, checker.special)

        def takes(text: str) -> bool:
            return checker.takes(grammar, before + text)

        assert takes(good)
        assert not takes(good.replace("city", "town"))
        assert not takes(good.replace("get_weather", "get_whether"))
        assert not takes(good.replace("3", "three"))
        assert takes("hello") == (calls is Calls.FREE)
        assert takes("12") == (calls is not Calls.SOME)
        form = AnswerFormat(name, THINK.name if thinking else "", bool(thinks), CALLABLE)
        assert read(form, [before + good]) == ("", "a < b" if before else "", (("id-0", "get_weather", JSON),))

    def test_how_many(self, checker: Checker, name: str) -> None:
        call = one_call(name, checker.special)
        end = {"mistral": "" if checker.special else "]", "deepseek_v3": FINISH, "deepseek_v31": FINISH}.get(name, "")
        between = {"hermes": "\n", "glm45": "\n", "qwen3_coder": "\n", "llama3_json": "; ", "deepseek_v3": "\n"}
        begin = {"deepseek_v3": BEGIN, "deepseek_v31": BEGIN}.get(name, "")
        second = call.removeprefix(begin)
        separator = between.get(name, "")
        if name == "mistral" and not checker.special:
            second, separator = call.removeprefix("[TOOL_CALLS]["), ", "
        two = call.removesuffix(end) + separator + second
        for one in (False, True):
            grammar = call_grammar(TOOL_FORMATS[name], TOOLS, checker.literal, calls=Calls.SOME, one=one)
            assert checker.takes(grammar, call)
            assert checker.takes(grammar, two) is not one
        assert len(read(AnswerFormat(name, tools=CALLABLE), [two])[2]) == 2


@pytest.mark.parametrize("name", sorted(TOOL_FORMATS.keys() - {"glm45", "qwen3_coder"}))
def test_a_tool_without_a_schema_takes_any_object(checker: Checker, name: str) -> None:
    tight, loose = (
        call_grammar(TOOL_FORMATS[name], tools, checker.literal, calls=Calls.SOME)
        for tools in (TOOLS[:1], [ToolSchema("get_weather", "")])
    )
    other = one_call(name, checker.special).replace("city", "town")
    assert (checker.takes(tight, other), checker.takes(loose, other)) == (False, True)


@pytest.mark.parametrize("name", ["glm45", "qwen3_coder"])
def test_arguments_as_tags_need_listed_properties(name: str) -> None:
    with pytest.raises(InvalidRequest, match=r"tools\[0\].parameters"):
        call_grammar(TOOL_FORMATS[name], [ToolSchema("a", '{"anyOf": []}')], quoted, calls=Calls.SOME)


BODIES: list[tuple[Grammar, str, str]] = [
    (NUMBER, "12", "x"),
    (Grammar(GrammarKind.JSON_OBJECT), '{"a": 1}', "[1]"),
    (Grammar(GrammarKind.CHOICE, '["yes", "n\\"o"]'), 'n"o', "maybe"),
    (Grammar(GrammarKind.REGEX, "[a-c]+/d"), "abc/d", "d"),
]


@pytest.mark.parametrize(("body", "good", "bad"), BODIES, ids=lambda value: str(value)[:20])
def test_bodies(checker: Checker, body: Grammar, good: str, bad: str) -> None:
    wrap: list[Callable[[str], str]] = [lambda text: text, lambda text: f"hm</think>\n\n{text}"]
    either = call_grammar(TOOL_FORMATS["hermes"], TOOLS, checker.literal, calls=Calls.OR_BODY, body=body)
    after = thinking_grammar(body, checker.literal, Thinking(THINK, True))
    for grammar, wrapped in zip((either, after), wrap, strict=True):
        assert checker.takes(grammar, wrapped(good))
        assert not checker.takes(grammar, wrapped(bad))
    assert not checker.takes(after, good)


def test_a_free_grammar_cannot_be_part_of_another() -> None:
    with pytest.raises(InvalidRequest, match="grammar"):
        thinking_grammar(Grammar(GrammarKind.EBNF, 'start: "a"'), quoted, Thinking(THINK, True))
