"""Text to tokens and back: chat templates, streams cut anywhere, stop strings against their naive definition."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from paceline.errors import ConfigError, InvalidRequest
from paceline.tokenizer import IncrementalDetokenizer, Tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. Stop! STOP the stream, please: END of turn.\n\n",
    "naïve café — “quotes” … 12345 tabs\tand\r\nnewlines; aaaa aaab abab ababab",
    "日本語のテキスト、中文文本，한국어 텍스트。 Ελληνικά кириллица ไทย हिन्दी العربية",
    "🦊🦊🚀 👩‍👩‍👧‍👦 🇫🇷 e\u0301 \ufffd \x00 zero",
]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<s>", "</s>", "<|user|>", "<|assistant|>", "<|pad me|>"]
QUICK = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def byte_level() -> Backend:
    """A small byte-level BPE: most characters beyond ASCII take several tokens."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=360,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens(["<tool call>", "né", "ｆ▁w"])  # outside the byte alphabet, half in it, outside it
    return backend


@functools.cache
def library() -> Backend:
    """The backend that ``tokenizer`` was saved from: training is deterministic."""
    return byte_level()


@functools.cache
def byte_ids() -> dict[int, int]:
    """Byte -> id of the token of ``byte_level`` that is this byte alone."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    vocabulary = library().get_vocab()
    found = {b: vocabulary[chr(b)] for b in printable}
    return found | {b: vocabulary[chr(256 + i)] for i, b in enumerate(others)}


def byte_fallback() -> Backend:
    """A SentencePiece-like vocabulary: words with a visible space, and bytes for everything else."""
    pieces = ["<unk>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "▁a", "a", "b", "▁the", "é", "日", "▁▁"]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(["<s>", "</s>"])
    return backend


def write_folder(folder: Path, backend: Backend, *, template: Any = TEMPLATE, **config: Any) -> Path:
    """A model folder as far as a tokenizer needs it."""
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": {"content": "</s>", "special": True}}
    settings_ = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template} | special | config
    (folder / "tokenizer_config.json").write_text(json.dumps(settings_))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 1, "model_type": "llama"}))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("byte_level"), byte_level())


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(write_folder(tmp_path_factory.mktemp("byte_fallback"), byte_fallback()))


def stream(tokenizer: Tokenizer, ids: Sequence[int], **options: Any) -> tuple[str, str | None]:
    """(everything that came out, stop string or None)."""
    detokenizer = IncrementalDetokenizer(tokenizer, **options)
    text = ""
    for token_id in ids:
        text += detokenizer.push(token_id)
        if detokenizer.stopped:
            break
    text += detokenizer.finish()
    return text, (detokenizer.stop_string if detokenizer.stopped else None)


def cut_at_first_stop(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """The definition: the earliest character that completes a stop string ends the text; then the longest counts."""
    for end in range(1, len(text) + 1):
        found = [s for s in stops if text[:end].endswith(s)]
        if found:
            stop = max(found, key=len)
            return text[: end - len(stop)], stop
    return text, None


any_text = st.one_of(st.text(), st.text("ab STOP!\n"), st.text("日本🦊é👩‍👧\ufffd\x00"), st.sampled_from(CORPUS))


class TestStream:
    @QUICK
    @given(data=st.data(), skip=st.booleans())
    def test_equals_decode_for_any_ids(self, tokenizer: Tokenizer, data: st.DataObject, skip: bool) -> None:
        ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=60))  # some outside the vocabulary
        text, stop = stream(tokenizer, ids, skip_special_tokens=skip)
        assert text == tokenizer.decode(ids, skip_special_tokens=skip)
        assert stop is None

    @QUICK
    @given(data=st.data(), skip=st.booleans())
    def test_equals_the_library_for_any_ids(self, tokenizer: Tokenizer, data: st.DataObject, skip: bool) -> None:
        ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=60))
        assert stream(tokenizer, ids, skip_special_tokens=skip)[0] == library().decode(ids, skip_special_tokens=skip)

    @QUICK
    @given(text=any_text)
    def test_gives_text_back(self, tokenizer: Tokenizer, text: str) -> None:
        assert stream(tokenizer, tokenizer.encode(text), skip_special_tokens=False)[0] == text

    @QUICK
    @given(raw=st.binary(max_size=60))
    def test_invalid_bytes_come_out_as_python_reads_them(self, tokenizer: Tokenizer, raw: bytes) -> None:
        assert stream(tokenizer, [byte_ids()[b] for b in raw])[0] == raw.decode(errors="replace")

    def test_long_invalid_run_is_not_withheld(self, tokenizer: Tokenizer) -> None:
        detokenizer = IncrementalDetokenizer(tokenizer)
        said = 0
        for pushed in range(1, 400):
            said += len(detokenizer.push(byte_ids()[0xFF]))
            assert pushed == said

    def test_never_half_a_character(self, tokenizer: Tokenizer) -> None:
        ids = tokenizer.encode("🦊日本🚀")
        assert len(ids) > 4  # the characters are split
        detokenizer = IncrementalDetokenizer(tokenizer)
        pieces = [detokenizer.push(i) for i in ids]
        assert all("\ufffd" not in piece for piece in pieces)
        assert "".join(pieces) == "🦊日本🚀"  # complete with its last byte: nothing waits for another token
        assert detokenizer.finish() == ""

    def test_a_token_is_read_once(self, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
        """So the cost of a token does not grow with the text, however long characters stay incomplete."""
        read: list[int] = []
        token_bytes = tokenizer.token_bytes

        def watched(token_id: int, skip_special_tokens: bool = False) -> bytes:
            read.append(token_id)
            return token_bytes(token_id, skip_special_tokens)

        monkeypatch.setattr(tokenizer, "token_bytes", watched)
        ids = [byte_ids()[b] for b in ("🦊x" * 300).encode() + b"\xff\xc3" * 300]
        stream(tokenizer, ids, stop=("x🦊x🦊y",))
        assert read == ids

    @QUICK
    @given(data=st.data())
    def test_continues_a_prompt(self, tokenizer: Tokenizer, data: st.DataObject) -> None:
        raw = data.draw(st.text("ab🦊é日").map(str.encode))
        cut = data.draw(st.integers(0, len(raw)))  # possibly within a character
        ids = [byte_ids()[b] for b in raw]
        whole, before = raw.decode(), raw[:cut].decode(errors="ignore")
        assert stream(tokenizer, ids[cut:], prompt_ids=ids[:cut])[0] == whole[len(before) :]

    def test_after_the_end_tokens_are_refused(self, tokenizer: Tokenizer) -> None:
        detokenizer = IncrementalDetokenizer(tokenizer, stop=("fox",))
        for token_id in tokenizer.encode("the fox"):
            detokenizer.push(token_id)
        assert detokenizer.stopped
        with pytest.raises(ValueError, match="ended"):
            detokenizer.push(7)
        assert detokenizer.finish() == ""


class TestByteFallback:
    @QUICK
    @given(data=st.data())
    def test_valid_text_equals_the_library(self, sentencepiece: Tokenizer, data: st.DataObject) -> None:
        words = st.sampled_from([[257], [258], [259], [260], [261], [262], [263], [264], [265], [266]])
        spelled = st.text("日é🦊a ", min_size=1, max_size=3).map(lambda text: [1 + b for b in text.encode()])
        ids = [i for part in data.draw(st.lists(st.one_of(words, spelled), max_size=12)) for i in part]
        expected = byte_fallback().decode(ids, skip_special_tokens=True)
        assert sentencepiece.decode(ids) == expected
        assert stream(sentencepiece, ids)[0] == expected

    @QUICK
    @given(ids=st.lists(st.integers(0, 266), max_size=40))
    def test_stream_equals_decode_for_any_ids(self, sentencepiece: Tokenizer, ids: list[int]) -> None:
        assert stream(sentencepiece, ids)[0] == sentencepiece.decode(ids)

    def test_space_after_a_prompt_is_kept(self, sentencepiece: Tokenizer) -> None:
        assert stream(sentencepiece, [258, 261])[0] == "a the"
        assert stream(sentencepiece, [258, 261], prompt_ids=[259])[0] == " a the"


def stop_text(alphabet: str, longest: int) -> st.SearchStrategy[str]:
    """Stop strings of ``alphabet``."""
    return st.text(alphabet, min_size=1, max_size=longest)


class TestStopStrings:
    @QUICK
    @given(
        data=st.data(),
        stops=st.lists(st.one_of(stop_text("abSTOP ", 5), stop_text("日é🦊a\ufffd", 3)), min_size=1, max_size=4),
    )
    def test_equals_the_definition(self, tokenizer: Tokenizer, data: st.DataObject, stops: list[str]) -> None:
        cuts = st.one_of(
            st.text("abSTOP ").map(tokenizer.encode),
            st.text("日é🦊a").map(tokenizer.encode),
            st.binary(max_size=8).map(lambda raw: [byte_ids()[b] for b in raw]),
            st.text("abSTOP日🦊").map(lambda text: [byte_ids()[b] for b in text.encode()]),
        )
        ids = [i for part in data.draw(st.lists(cuts, max_size=6)) for i in part]
        assert stream(tokenizer, ids, stop=tuple(stops)) == cut_at_first_stop(tokenizer.decode(ids), stops)

    @pytest.mark.parametrize(
        ("text", "stops", "expected"),
        [
            ("one two END three", ("END",), ("one two ", "END")),
            ("aaaab", ("aab",), ("aa", "aab")),
            ("abababc", ("ababc",), ("ab", "ababc")),
            ("aabaaabaaaa", ("aabaaaa",), ("aaba", "aabaaaa")),  # falls back twice to a shorter beginning
            ("xabcd", ("abcd", "bc"), ("xa", "bc")),  # "bc" is complete first
            ("xabc", ("abc", "bc"), ("x", "abc")),  # both at once: the longer
            ("ends in EN", ("END",), ("ends in EN", None)),
            ("🦊🚀", ("🚀",), ("🦊", "🚀")),
        ],
    )
    @pytest.mark.parametrize("bytewise", [False, True])
    def test_cases(
        self, tokenizer: Tokenizer, text: str, stops: tuple[str, ...], expected: tuple[str, str | None], bytewise: bool
    ) -> None:
        by_byte = [byte_ids()[b] for b in text.encode()]
        assert stream(tokenizer, by_byte if bytewise else tokenizer.encode(text), stop=stops) == expected

    def test_inside_one_token(self, tmp_path: Path) -> None:
        backend = byte_level()
        backend.add_tokens(["left STOP right"])
        tokenizer = Tokenizer.from_folder(write_folder(tmp_path, backend))
        ids = tokenizer.encode("left STOP right")
        assert len(ids) == 1
        assert stream(tokenizer, ids, stop=("STOP",)) == ("left ", "STOP")

    @pytest.mark.parametrize(
        ("stops", "expected"), [(("abcd", "bc"), ("xa", "bc")), (("bcd", "xabcd", "d"), ("", "xabcd"))]
    )
    def test_several_inside_one_token(self, tmp_path: Path, stops: tuple[str, ...], expected: tuple[str, str]) -> None:
        backend = byte_level()
        backend.add_tokens(["xabcd bc"])
        tokenizer = Tokenizer.from_folder(write_folder(tmp_path, backend))
        whole, bytewise = tokenizer.encode("xabcd bc"), [byte_ids()[b] for b in b"xabcd bc"]
        assert len(whole) == 1
        assert stream(tokenizer, whole, stop=stops) == stream(tokenizer, bytewise, stop=stops) == expected

    def test_empty_one_is_refused(self, tokenizer: Tokenizer) -> None:
        with pytest.raises(InvalidRequest, match="stop"):
            IncrementalDetokenizer(tokenizer, stop=("a", ""))

    def test_beginning_is_withheld_and_the_rest_is_not(self, tokenizer: Tokenizer) -> None:
        detokenizer = IncrementalDetokenizer(tokenizer, stop=("STOP",))
        assert [detokenizer.push(byte_ids()[ord(c)]) for c in "aSTSTx"] == ["a", "", "", "ST", "", "STx"]


class TestFolder:
    def test_ids(self, tokenizer: Tokenizer) -> None:
        assert tokenizer.eos_token_ids == (1,)
        assert tokenizer.vocab_size == 363
        assert tokenizer.encode("<s>hi")[0] == 0

    def test_generation_config_names_the_end(self, tmp_path: Path) -> None:
        write_folder(tmp_path, byte_level())
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

        program = "import sys, paceline.tokenizer; print(*{'torch', 'transformers', 'ray', 'numpy'} & set(sys.modules))"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout.strip() == ""


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

    def test_broken_template(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="chat template"):
            Tokenizer.from_folder(write_folder(tmp_path, byte_level(), template="{% for %}"))


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
                expected = theirs.apply_chat_template(messages, add_generation_prompt=add_generation_prompt)
                assert ours.apply_chat_template(messages, add_generation_prompt) == expected["input_ids"]

    @QUICK
    @given(ids=st.lists(st.integers(0, 49151), max_size=40), skip=st.booleans())
    def test_stream_of_any_ids(self, ours: Tokenizer, theirs: Any, ids: list[int], skip: bool) -> None:
        expected = theirs.decode(ids, skip_special_tokens=skip)
        assert stream(ours, ids, skip_special_tokens=skip)[0] == expected
