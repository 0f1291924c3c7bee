"""Chat templates of model folders: what they use, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.errors import ConfigError, InvalidRequest
from paceline.text.tokenizer import Tokenizer
from tests.support.tiny_tokenizers import byte_level, write_folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(write_folder(tmp_path_factory.mktemp("byte_level"), byte_level()))


class TestChatTemplate:
    def test_ids(self, tokenizer: Tokenizer) -> None:
        ids = tokenizer.apply_chat_template([{"role": "user", "content": "the dog"}])
        assert tokenizer.decode(ids, skip_special_tokens=False) == "<s><|user|>the dog</s><|assistant|>"
        assert (ids[0], ids[1], ids[-1]) == (0, 2, 3)  # special tokens, not their spelling; one beginning only

    def test_without_generation_prompt(self, tokenizer: Tokenizer) -> None:
        ids = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], add_generation_prompt=False)
        assert ids[-1] == 1

    def test_file_wins_over_settings(self, tmp_path: Path) -> None:
        write_folder(tmp_path, byte_level())
        (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}!")
        tokenizer = Tokenizer.from_folder(tmp_path)
        assert tokenizer.decode(tokenizer.apply_chat_template([{"role": "user", "content": "hey"}])) == "hey!"

    def test_a_processors_template_where_there_is_no_other(self, tmp_path: Path) -> None:
        """Mutants: it is not read; it is read though the settings have one."""
        for own in (None, "own"):
            write_folder(tmp_path, byte_level(), template=own)
            (tmp_path / "chat_template.json").write_text('{"chat_template": "its processor\'s"}')
            tokenizer = Tokenizer.from_folder(tmp_path)
            ids = tokenizer.apply_chat_template([{"role": "user", "content": "x"}])
            assert tokenizer.decode(ids) == (own or "its processor's")

    def test_named_templates(self, tmp_path: Path) -> None:
        named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
        tokenizer = Tokenizer.from_folder(write_folder(tmp_path, byte_level(), template=named))
        assert tokenizer.decode(tokenizer.apply_chat_template([{"role": "user", "content": "x"}])) == "yes"

    @pytest.mark.parametrize(
        ("template", "expected"),
        [
            ("  {% if true %}\n  a\n  {% endif %}\nb", "  a\nb"),  # blocks trimmed as transformers trims them
            ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
            ("{{ {'b': 1, 'a': 2} | tojson(sort_keys=true, separators=(',', ':')) }}", '{"a":2,"b":1}'),
            ("{{ strftime_now('%Y') | length }}", "4"),
            ("{% generation %}x{% endgeneration %}y", "xy"),
            ("{% for m in messages %}{% break %}{% endfor %}z", "z"),
            ("{{ tools is none }}{{ 'q' if tools is not none }}", "True"),
        ],
    )
    def test_what_templates_use(self, tmp_path: Path, template: str, expected: str) -> None:
        tokenizer = Tokenizer.from_folder(write_folder(tmp_path, byte_level(), template=template))
        assert tokenizer.decode(tokenizer.apply_chat_template([{"role": "user", "content": "x"}])) == expected

    @pytest.mark.parametrize(
        ("messages", "field"),
        [
            ([], "messages"),
            ([{"role": "user", "content": 3}], "messages[0].content"),
            ([{"role": "user", "content": "x"}, {"role": None, "content": "x"}], "messages[1].role"),
            ([{"role": "wizard", "content": "x"}], "messages[0].role"),
            ([{"role": "user"}], "messages[0].content"),
            (["hello"], "messages[0]"),
            ([{"role": "user", "content": "\udc00"}], "messages[0].content"),
        ],
    )
    def test_malformed_messages(self, tokenizer: Tokenizer, messages: Any, field: str) -> None:
        with pytest.raises(InvalidRequest) as raised:
            tokenizer.apply_chat_template(messages)
        assert raised.value.field == field

    @pytest.mark.parametrize(
        "template",
        [
            "{{ raise_exception('user must speak first') }}",
            "{{ messages.append(1) }}",
            "{{ ''.__class__.__mro__ }}",
            "{{ messages[9].role.x }}",
            "{{ 1 // 0 }}",
        ],
    )
    def test_refusals_of_the_template(self, tmp_path: Path, template: str) -> None:
        tokenizer = Tokenizer.from_folder(write_folder(tmp_path, byte_level(), template=template))
        with pytest.raises(InvalidRequest, match="messages: the chat template"):
            tokenizer.apply_chat_template([{"role": "user", "content": "x"}])

    def test_no_template(self, tmp_path: Path) -> None:
        tokenizer = Tokenizer.from_folder(write_folder(tmp_path, byte_level(), template=None))
        with pytest.raises(InvalidRequest, match="no chat template"):
            tokenizer.apply_chat_template([{"role": "user", "content": "x"}])

    @pytest.mark.parametrize("template", ["{% for %}", ["{{ x }}"], [{"name": "default"}]])
    def test_broken_template(self, template: Any, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="chat template"):
            Tokenizer.from_folder(write_folder(tmp_path, byte_level(), template=template))
