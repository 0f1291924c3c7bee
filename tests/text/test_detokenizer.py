"""Tokens to text as a stream, cut anywhere; stop strings against their naive definition."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import InvalidRequest
from paceline.text.tokenizer import IncrementalDetokenizer, Tokenizer
from tests.support.tiny_tokenizers import (
    CORPUS,
    QUICK,
    byte_fallback,
    byte_ids,
    byte_level,
    library,
    stream,
    write_folder,
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(write_folder(tmp_path_factory.mktemp("byte_level"), byte_level()))


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(write_folder(tmp_path_factory.mktemp("byte_fallback"), byte_fallback()))


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
