"""SentencePiece tokenizers of GGUF files: tokens against a plain reference of how SentencePiece merges, on random
vocabularies and texts, and against transformers' classes; files that cannot be read in its way."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import ConfigError
from paceline.models.gguf.file import GgufFile
from paceline.models.gguf.spm import MAX_PIECE, merges_of
from paceline.models.gguf.tokenizer import write_tokenizer
from paceline.text.tokenizer import Tokenizer
from tests.support.gguf_spm import (
    BYTE,
    CONTROL,
    NORMAL,
    UNUSED,
    USER_DEFINED,
    SpmVocabulary,
    random_vocabulary,
    write_spm,
)

GIVEN = {"  ": USER_DEFINED, "   ": USER_DEFINED, "<b>": USER_DEFINED, "<pad>": CONTROL, "[PAD]": UNUSED}
CHARACTERS = "▁abé語"
TEXTS = ("", "a", " a", "a  b", "a    b", "<b>a<b> a", "ab<s>ba</s> a", "語é☂a\n", "▁a a", "[PAD]", "<0x41>a", "🦙" * 3)


def greedy(text: str, vocabulary: SpmVocabulary) -> list[str]:
    """SentencePiece's BPE: the best pair of neighbours is joined, the first of several, until there is none."""
    ids = {token: i for i, token in enumerate(vocabulary.tokens)}
    parts = list(text)
    while True:
        best: tuple[float, int] | None = None
        for at in range(len(parts) - 1):
            i = ids.get(parts[at] + parts[at + 1])
            if i is not None and vocabulary.kinds[i] == NORMAL and (best is None or vocabulary.scores[i] > best[0]):
                best = vocabulary.scores[i], at
        if best is None:
            break
        parts[best[1] : best[1] + 2] = [parts[best[1]] + parts[best[1] + 1]]
    return [name for part in parts for name in ([part] if part in ids else [f"<0x{b:02X}>" for b in part.encode()])]


def reference(text: str, vocabulary: SpmVocabulary, prefix: bool) -> list[str]:
    """Tokens that are known by name are cut out from the left, the longest first; the rest is merged."""
    whole = [token for token, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True) if kind in (2, 3, 4)]
    found: list[str] = []
    stretch = ""
    while text or stretch:
        token = max((token for token in whole if text.startswith(token)), key=len, default="")
        if text and not token:
            stretch, text = stretch + text[0], text[1:]
            continue
        if stretch:
            found += greedy((" " * prefix + stretch).replace(" ", "▁"), vocabulary)
        found += [token] if token else []
        stretch, text = "", text[len(token) :]
    return found


def written(folder: Path, vocabulary: SpmVocabulary, architecture: str = "llama", **fields: Any) -> Tokenizer:
    folder.mkdir(parents=True, exist_ok=True)
    write_spm(folder / "tiny.gguf", vocabulary, fields, architecture)
    write_tokenizer(GgufFile(folder / "tiny.gguf"), folder, 128)
    return Tokenizer.from_folder(folder)


@pytest.mark.parametrize(("architecture", "prefix"), [("llama", None), ("llama", False), ("gemma3", None)])
def test_tokens_are_those_of_sentencepiece(architecture: str, prefix: bool | None, tmp_path: Path) -> None:
    """Mutants: merges of the lowest score first, or by ids; a space first in every file, or in none; tokens given by
    name not cut out, or cut out with a mark for a space; characters that are no token unknown."""
    adds = architecture == "llama" and prefix is None
    changed = ("▁", "<", "  ") if adds else ("▁", "<")  # texts of which tokens tell less, or more
    fields = {} if prefix is None else {"add_space_prefix": prefix}
    for seed in range(12):
        dice = random.Random(seed)
        vocabulary = random_vocabulary(dice, CHARACTERS, 40, GIVEN)
        tokenizer = written(tmp_path / f"{seed}", vocabulary, architecture, **fields)
        letters = [*CHARACTERS, " ", " ", "x", "\n", "<b>", "<pad>", "🦙"]
        texts = ["".join(dice.choices(letters, k=dice.randrange(1, 40))) for _ in range(40)]
        for text in (*TEXTS, *texts):
            ids = tokenizer.encode(text, add_special_tokens=False)
            expected = reference(text, vocabulary, adds)
            assert [vocabulary.tokens[i] for i in ids] == expected, (seed, text)
            assert tokenizer.encode(text)[:1] == [1]  # a text begins with <s>, once
            assert any(name in text for name in changed) or tokenizer.decode(ids) == text


@pytest.mark.parametrize("family", ["Llama", "Gemma"])
def test_transformers_makes_the_same(family: str, tmp_path: Path) -> None:
    """By its own merges, from the same tokens and scores. Mutant: merges by ids."""
    transformers = pytest.importorskip("transformers")
    from transformers.tokenization_utils_base import generate_merges

    dice = random.Random(3)
    vocabulary = random_vocabulary(dice, CHARACTERS, 60, {})
    ids = {token: i for i, token in enumerate(vocabulary.tokens)}
    pieces = dict(zip(vocabulary.tokens[259:], vocabulary.scores[259:], strict=True))
    merges = generate_merges({token: ids[token] for token in pieces}, pieces)
    assert merges_of(pieces) == merges
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<unk>", "mask_token": "<unk>"}
    theirs = getattr(transformers, f"{family}Tokenizer")(vocab=ids, merges=merges, **names)
    mine = written(tmp_path, vocabulary, "llama" if family == "Llama" else "gemma3")
    for _ in range(200):
        text = dice.choice("ab語x") + "".join(dice.choices([*CHARACTERS, " ", "x", "\n"], k=dice.randrange(40)))
        assert mine.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False), text
        assert mine.decode(mine.encode(text)) == theirs.decode(theirs.encode(text), skip_special_tokens=True)


def plain() -> SpmVocabulary:
    return random_vocabulary(random.Random(1), CHARACTERS, 10, {})


def without(name: str) -> SpmVocabulary:
    """Another token in its place."""
    made = plain()
    return SpmVocabulary([f"{name}?" if token == name else token for token in made.tokens], made.scores, made.kinds)


def sharing(score: float) -> SpmVocabulary:
    """With two more pieces of that score, each made of two others."""
    made = plain()
    for piece, own in {"bbbb": 0.25, "bbbbb": score, "éééé": 0.5, "ééééé": score}.items():
        made = made.with_token(piece, own, NORMAL)
    return made


@pytest.mark.parametrize(
    ("vocabulary", "fields", "named"),
    [
        (without("<0x7F>"), {}, "it has no token <0x7F> for a byte"),
        (plain().with_token("<0x7>", 0.0, BYTE), {}, "token '<0x7>' is no byte"),
        (plain().with_token("<s>", 0.0, CONTROL), {}, "two tokens, .*'<s>'"),
        (plain().with_token("", 0.0, CONTROL), {}, "without a text"),
        (plain().with_token("az", 9.0, NORMAL), {}, "the character 'z', which is no token itself"),
        (sharing(2.0), {}, r"tokens 'bbbbb' and 'ééééé' share the score 2\.0"),
        (plain().with_token("a" * (MAX_PIECE + 1), 9.0, NORMAL), {}, f"has more than {MAX_PIECE} characters"),
        (
            plain().with_token("bbbb", 0.0, NORMAL).with_token("bbbbb", 9.0, UNUSED),
            {},
            "'bbbbb' is unused, and made of",
        ),
        (plain().with_token("ab?", float("nan"), CONTROL), {}, "scores is not a list of"),
        (SpmVocabulary(plain().tokens, plain().scores[1:], plain().kinds), {}, "scores is not a list of"),
        (SpmVocabulary(plain().tokens, plain().scores, plain().kinds[1:]), {}, "token_type is not a list of"),
        (plain().with_token("c", 0.0, 7), {}, "kinds from 1 to 6"),
        (plain(), {"add_space_prefix": 1}, "add_space_prefix is 1, expected true or false"),
        (plain(), {"remove_extra_whitespaces": True}, "remove_extra_whitespaces is not supported"),
        (plain(), {"precompiled_charsmap": "x"}, "precompiled_charsmap is not supported"),
        (plain(), {"pre": "tekken"}, "'llama' with tokenizer.ggml.pre 'tekken' is not supported"),
    ],
)
def test_refused(vocabulary: SpmVocabulary, fields: dict[str, Any], named: str, tmp_path: Path) -> None:
    """Each with what helps: tokenizer.json beside the file."""
    with pytest.raises(ConfigError, match=f"{named}.*tokenizer.json beside the file"):
        written(tmp_path, vocabulary, **fields)


def test_more_tokens_than_rows(tmp_path: Path) -> None:
    """Mutant: a text may have tokens that the model has no row for."""
    write_spm(tmp_path / "tiny.gguf", plain())
    file = GgufFile(tmp_path / "tiny.gguf")
    file.fields["tokenizer.ggml.tokens"] = [*plain().tokens, "more"]
    with pytest.raises(ConfigError, match=f"it has {len(plain().tokens) + 1} tokens, and a table of"):
        write_tokenizer(file, tmp_path, 128)


def test_pieces_that_would_take_long() -> None:
    """Mutant: every cut of every piece is tried, however many there are."""
    pieces = {f"{i:0{MAX_PIECE}d}": float(i) for i in range(1 << 16)}
    began = time.monotonic()
    with pytest.raises(ValueError, match=r"have more than .* characters"):
        merges_of(pieces)
    assert time.monotonic() - began < 1


def test_ids_that_are_no_numbers(tmp_path: Path) -> None:
    """Mutant: a traceback."""
    write_spm(tmp_path / "tiny.gguf", plain())
    file = GgufFile(tmp_path / "tiny.gguf")
    file.fields |= {"tokenizer.ggml.eot_token_id": [5], "tokenizer.ggml.bos_token_id": -1}
    write_tokenizer(file, tmp_path, 128)
    assert Tokenizer.from_folder(tmp_path).encode("a") != []
