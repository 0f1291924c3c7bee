"""Chat templates with tools: what they are given, what stands in where they know none, and open last messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import ConfigError, InvalidRequest
from paceline.text import templates
from paceline.text.tokenizer import Tokenizer
from tests.support.tiny_tokenizers import TEMPLATE, byte_level, write_folder

TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
TURNS: list[dict[str, Any]] = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "I look.", "tool_calls": [CALL, CALL]},
    {"role": "tool", "content": "42", "tool_call_id": "1"},
    {"role": "tool", "content": "43", "tool_call_id": "2"},
]


def tokenizer_of(folder: Path, template: Any = TEMPLATE, chat_template: str = "") -> Tokenizer:
    return Tokenizer.from_folder(write_folder(folder, byte_level(), template=template, eos_token="</s>"), chat_template)


def rendered(tokenizer: Tokenizer, turns: list[dict[str, Any]], **options: Any) -> str:
    return tokenizer.decode(tokenizer.apply_chat_template(turns, **options), skip_special_tokens=False)


def test_a_template_without_tools_gets_them_as_text(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path)
    assert not tokenizer.template.knows_tools
    text = rendered(tokenizer, TURNS, tools=[TOOL])
    intro = templates.TOOLS_INTRO.format(tools=json.dumps(TOOL))
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    result = "<tool_response>\n{}\n</tool_response>".format
    assert text == (
        f"<s><|system|>{intro}</s><|user|>hi</s><|assistant|>I look.\n{call}\n{call}</s>"
        f"<|user|>{result(42)}\n{result(43)}</s><|assistant|>"
    )


def test_the_system_turn_keeps_its_text(tmp_path: Path) -> None:
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    assert "<|system|>Be brief.\n\nYou may call tools." in rendered(tokenizer_of(tmp_path), turns, tools=[TOOL])


def test_a_template_that_takes_no_system_turn(tmp_path: Path) -> None:
    refusal = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}"
    text = rendered(tokenizer_of(tmp_path, refusal + TEMPLATE), [{"role": "user", "content": "hi"}], tools=[TOOL])
    assert text.startswith("<s><|user|>You may call tools.")
    assert text.endswith("\n\nhi</s><|assistant|>")


def test_a_template_with_tools_gets_them(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(
        tmp_path,
        "{{ tools | tojson }}"
        "{% for m in messages %}{{ m.role }}{{ m.tool_calls | tojson if m.tool_calls }}{% endfor %}",
    )
    assert tokenizer.template.knows_tools
    expected = f"{json.dumps([TOOL])}userassistant{json.dumps([CALL, CALL])}tooltool"
    assert rendered(tokenizer, TURNS, tools=[TOOL]) == expected


def test_the_template_for_tools(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools | length }} tools"}]
    tokenizer = tokenizer_of(tmp_path / "a", named)
    assert rendered(tokenizer, TURNS[:1], tools=[TOOL]) == "1 tools"
    assert rendered(tokenizer, TURNS[:1]) == "plain"
    folder = tmp_path / "b"
    (folder / "additional_chat_templates").mkdir(parents=True)
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools | length }} tools")
    assert rendered(tokenizer_of(folder, "plain"), TURNS[:1], tools=[TOOL]) == "1 tools"


def test_a_template_of_the_operator(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("mine {{ messages[0].content }}")
    assert rendered(tokenizer_of(tmp_path / "a", chat_template=str(file)), TURNS[:1]) == "mine hi"
    with pytest.raises(ConfigError, match="chat_template"):
        tokenizer_of(tmp_path / "b", chat_template=str(tmp_path / "none"))


@pytest.mark.parametrize("trim", [False, True])
@pytest.mark.parametrize("last", ["The answer is", "The answer is ", "a <|user|> b"])
def test_an_open_last_message(tmp_path: Path, last: str, trim: bool) -> None:
    from transformers import PreTrainedTokenizerFast

    template = TEMPLATE.replace("m['content']", "m['content'] | trim") if trim else TEMPLATE
    tokenizer = tokenizer_of(tmp_path, template)
    turns = [*TURNS[:1], {"role": "assistant", "content": last}]
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    expected = theirs.apply_chat_template(turns, continue_final_message=True, tokenize=False)
    assert rendered(tokenizer, turns, continue_final_message=True) == expected


def test_a_template_that_drops_the_last_message(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="continue_final_message"):
        tokenizer_of(tmp_path, "x").apply_chat_template(TURNS[:1], continue_final_message=True)


def test_more_values(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, "{{ 'on' if enable_thinking else 'off' }}")
    assert rendered(tokenizer, TURNS[:1], values={"enable_thinking": True}) == "on"


LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
RECURSION = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}"


@pytest.mark.parametrize("source", [LOOPS, RECURSION])
def test_a_template_that_takes_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    """It says nothing, so that no length ends it. Mutants: loops, or macros, that do not look at the clock."""
    monkeypatch.setattr(templates, "MAX_RENDER_S", 0.1)
    with pytest.raises(InvalidRequest, match=r"more than 0\.1 s"):
        tokenizer_of(tmp_path, source).apply_chat_template(TURNS[:1])


def test_a_template_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "MAX_RENDERED_CHARS", 10_000)
    tokenizer = tokenizer_of(
        tmp_path, "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}"
    )
    with pytest.raises(InvalidRequest, match="10000 characters"):
        tokenizer.apply_chat_template(TURNS[:1])
