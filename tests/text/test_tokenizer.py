"""Text to tokens and back: model folders, and the real model against transformers."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ConfigError, InvalidRequest
from paceline.grammar.tokens import GrammarTokens
from paceline.text.tokenizer import Tokenizer
from tests.support.tiny_tokenizers import QUICK, byte_level, stream, write_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("byte_level"), byte_level())


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(folder)


def test_a_long_text_leaves_the_interpreter_to_others(tokenizer: Tokenizer) -> None:
    """Encoded in a thread beside an event loop: a text of 4 MB stopped every stream of the router for 18 s."""
    started, ended = threading.Event(), threading.Event()

    def encode() -> None:
        started.set()
        tokenizer.encode("a b" * 100_000)
        ended.set()

    thread = threading.Thread(target=encode)
    thread.start()
    started.wait()
    turns = 0
    while not ended.wait(0.001):
        turns += 1
    thread.join()
    assert turns > 20


class TestFolder:
    def test_ids(self, tokenizer: Tokenizer) -> None:
        assert tokenizer.eos_token_ids == (1,)
        assert tokenizer.vocab_size == 363
        assert tokenizer.encode("<s>hi")[0] == 0

    def test_generation_config_names_the_end(self, tmp_path: Path) -> None:
        write_folder(tmp_path, byte_level())
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 3]}))
        assert Tokenizer.from_folder(tmp_path).eos_token_ids == (1, 3)

    def test_the_tokenizers_own_end_is_one_too(self, tmp_path: Path) -> None:
        """A fine-tune's tokenizer ends a turn, and the configs beside it are the base model's. Mutants: the configs
        count alone; the tokenizer's counts alone; it counts twice; a text that is no token."""
        for own, ends in (("</s>", (3, 1)), ({"content": "</s>"}, (3, 1)), ("<s>", (3, 0)), ("<none>", (3,))):
            write_folder(tmp_path, byte_level(), eos_token=own)
            (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 3}))
            assert Tokenizer.from_folder(tmp_path).eos_token_ids == ends
            assert GrammarTokens.from_folder(tmp_path, 400).eos_token_ids == ends
        write_folder(tmp_path, byte_level(), eos_token="</s>")
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 3]}))
        assert Tokenizer.from_folder(tmp_path).eos_token_ids == (1, 3)

    def test_bos_where_the_settings_say_so(self, tmp_path: Path) -> None:
        with_bos = Tokenizer.from_folder(write_folder(tmp_path / "a", byte_level(), add_bos_token=True))
        without = Tokenizer.from_folder(write_folder(tmp_path / "b", byte_level(), add_bos_token=False))
        assert with_bos.encode("dog") == [0, *without.encode("dog")]

    def test_bos_where_tokenizer_json_says_so(self, tmp_path: Path) -> None:
        from tokenizers.processors import TemplateProcessing

        backend = byte_level()
        plain = backend.encode("dog").ids
        backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
        assert Tokenizer.from_folder(write_folder(tmp_path, backend)).encode("dog") == [0, *plain]

    def test_saved_truncation_is_ignored(self, tmp_path: Path) -> None:
        backend = byte_level()
        backend.enable_truncation(4)
        assert len(Tokenizer.from_folder(write_folder(tmp_path, backend)).encode("x y z x y z x y z")) > 4

    def test_half_a_surrogate_pair_is_refused(self, tokenizer: Tokenizer) -> None:
        with pytest.raises(InvalidRequest, match="prompt"):
            tokenizer.encode("a\ud800")

    def test_missing_tokenizer(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"tokenizer\.json"):
            Tokenizer.from_folder(tmp_path)

    def test_damaged_tokenizer(self, folder: Path, tmp_path: Path) -> None:
        (tmp_path / "tokenizer.json").write_text((folder / "tokenizer.json").read_text()[:-100])
        with pytest.raises(ConfigError, match=r"tokenizer\.json"):
            Tokenizer.from_folder(tmp_path)

    def test_imports_no_torch(self) -> None:
        import subprocess
        import sys

        program = "import sys, paceline.text.tokenizer; "
        program += "print(*{'torch', 'transformers', 'ray', 'numpy'} & set(sys.modules))"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout.strip() == ""


REAL_TEXTS = [
    "",
    " ",
    "\n\n\t ",
    "Hello, world!",
    "  leading and trailing  ",
    "What is the capital of France, and what is it famous for?",
    "1234567890 3.14159 1,000,000 0x1F 2nd 3rd",
    "①②③ ٣٤٥ ½ Ⅷ x² 10⁻³",  # digits that are not ASCII
    "don't we've they'll I'm you'd CAN'T",
    "naïve café résumé Ünïcödé",
    "日本語のテキスト、中文文本，한국어",
    "Ελληνικά кириллица ไทย हिन्दी العربية עברית",
    "🦊🚀 👩‍👩‍👧‍👦 🇫🇷 👍🏽",
    "e\u0301 vs é, \u200b zero width \ufeff bom \ufffd",
    "\x00\x01\x7f control",
    "def f(x):\n    return x  # comment\n\n\nclass A: pass",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "text <|im_end|> in <|endoftext|>the<repo_name>middle",
    "<|im_start|",
    "|im_end|>",
    "<|IM_START|>",
    "https://example.com/a?b=c&d=%20#frag user@example.org",
    "SELECT * FROM t WHERE a >= 10 AND b <> 'x';",
    '{"key": [1, 2.5, null, true], "nested": {"a": "b"}}',
    "| a | b |\n|---|---|\n| 1 | 2 |",
    "$e^{i\\pi} + 1 = 0$ \\frac{1}{2}",
    "a" * 300,
    "ab " * 100,
    "!" * 50,
    " " * 70,
    "\n" * 30,
    "0" * 40,
    "CamelCaseWords snake_case_words kebab-case-words",
    "ALL CAPS TEXT and MiXeD cAsE",
    "tabs\tand\r\nwindows\r\nlines",
    "quotes “curly” ‘single’ «guillemets» — dashes – … ellipsis",
    "€100 £50 ¥1000 ₿0.5 100% 50°C ±5",
    "supercalifragilisticexpialidocious antidisestablishmentarianism",
    "The quick brown fox jumps over the lazy dog.",
    "Straße Łódź Đà Nẵng İstanbul ﬁ ligature",
    "\U0001f468\u200d\U0001f4bb \U00020000 \U0010ffff",
    "mixed日本and英語text混在",
    "1st2nd3rd v1.2.3-rc4 2024-01-31T12:34:56Z",
    "x=1;y=2;z=x+y;print(z)",
    "    indented\n        more\n\tback",
    "a\u00a0non\u2003breaking\u3000space",
    "emoji at end 🙂",
    "ends with newline\n",
    "¿Qué? ¡Sí! Ça va? Größe?",
    "\\n \\t literal \\u0041",
    "<html><body class='x'>&amp;</body></html>",
    "word" + "\u0301" * 5,
]


@pytest.fixture(scope="module")
def theirs(smollm2_folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2_folder)


@pytest.fixture(scope="module")
def ours(smollm2_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(smollm2_folder)


@pytest.mark.real_model
class TestSmolLM2:
    def test_facts(self, ours: Tokenizer) -> None:
        assert (ours.vocab_size, ours.eos_token_ids) == (49152, (2,))
        assert ours.encode("x")[0] > 16  # no beginning-of-sequence token

    def test_ids_equal_transformers(self, ours: Tokenizer, theirs: Any) -> None:
        assert len(REAL_TEXTS) >= 50
        for text in REAL_TEXTS:
            ids = ours.encode(text)
            assert ids == theirs.encode(text), text
            assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids) == text
            assert stream(ours, ids)[0] == theirs.decode(ids, skip_special_tokens=True), text

    @pytest.mark.parametrize("add_generation_prompt", [True, False])
    def test_chat_ids_equal_transformers(self, ours: Tokenizer, theirs: Any, add_generation_prompt: bool) -> None:
        for first, second in zip(REAL_TEXTS, reversed(REAL_TEXTS), strict=True):
            chat = [{"role": "user", "content": first}, {"role": "assistant", "content": second}]
            for messages in (chat[:1], chat, [{"role": "system", "content": second}, *chat]):
                told = theirs.apply_chat_template(
                    messages, add_generation_prompt=add_generation_prompt, sanitize_control_tokens=True
                )["input_ids"]
                ids = ours.apply_chat_template(messages, add_generation_prompt)
                if any("<|im_" in message["content"] for message in messages):  # see test_forging.py
                    assert [i for i in ids if i < 17] == [i for i in told if i < 17]
                else:
                    assert ids == told

    @QUICK
    @given(ids=st.lists(st.integers(0, 49151), max_size=40), skip=st.booleans())
    def test_stream_of_any_ids(self, ours: Tokenizer, theirs: Any, ids: list[int], skip: bool) -> None:
        expected = theirs.decode(ids, skip_special_tokens=skip)
        assert stream(ours, ids, skip_special_tokens=skip)[0] == expected
