"""Masks against brute force: a token is allowed exactly when some text of the grammar begins with what then stands."""

from __future__ import annotations

import itertools
import json
import random

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from paceline.errors import InvalidRequest
from paceline.grammar.compile import CompiledGrammar, GrammarCompiler
from paceline.grammar.cursor import GrammarCursor
from paceline.request import Grammar, GrammarKind

LETTERS = "abcx,"
PIECES = ("ab", "bc", "abc", "xx", ",a", "ca")
EOS, OTHER_EOS = 11, 12
VOCAB = 15  # two columns of the logits without a token

TEXTS: dict[str, tuple[Grammar, set[str]]] = {
    "choice": (Grammar(GrammarKind.CHOICE, json.dumps(["a", "abc", "abx", "cab"])), {"a", "abc", "abx", "cab"}),
    "regex": (
        Grammar(GrammarKind.REGEX, "(ab|c){1,3}x?"),
        {"".join(p) + x for n in (1, 2, 3) for p in itertools.product(("ab", "c"), repeat=n) for x in ("", "x")},
    ),
    "lark": (
        Grammar(GrammarKind.EBNF, 'start: item ("," item){0,2}\nitem: "a" | "bc"\n'),
        {",".join(p) for n in (1, 2, 3) for p in itertools.product(("a", "bc"), repeat=n)},
    ),
    "gbnf": (
        Grammar(GrammarKind.EBNF, 'root ::= part part\npart ::= [a-c] | "xx"\n'),
        {a + b for a in ("a", "b", "c", "xx") for b in ("a", "b", "c", "xx")},
    ),
}


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    """Its vocabulary has single letters and pieces of two or three, so that texts can be cut in many ways."""
    folder = tmp_path_factory.mktemp("pieces")
    alphabet = {letter: i for i, letter in enumerate(LETTERS)}
    vocab = alphabet | {piece: len(LETTERS) + i for i, piece in enumerate(PIECES)}
    merges = [("a", "b"), ("b", "c"), ("ab", "c"), ("x", "x"), (",", "a"), ("c", "a")]
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("</s>", special=True), AddedToken("</t>", special=True)])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS, OTHER_EOS]}))
    return GrammarCompiler(folder, VOCAB)


def piece(token: int) -> str:
    return str((*LETTERS, *PIECES)[token])


def brute(texts: set[str], before: str) -> tuple[set[int], bool]:
    """Tokens after which some text can still come, and whether the answer may end."""
    going = {t for t in range(EOS) if any(text.startswith(before + piece(t)) for text in texts)}
    return going, before in texts


def continuation(texts: set[str], before: str) -> str:
    """The characters that every text which may follow begins with; empty where the answer may end."""
    rest = [text[len(before) :] for text in texts if text.startswith(before)]
    return "".join(c[0] for c in itertools.takewhile(lambda c: len(set(c)) == 1, zip(*rest, strict=False)))


def check_state(compiled: CompiledGrammar, cursor: GrammarCursor, texts: set[str], tokens: list[int]) -> list[int]:
    """The mask after ``tokens`` is the brute-force one, or where characters are forced one token of it that begins
    them; a new matcher says the same. Returns the tokens that may follow, the end apart."""
    before = "".join(map(piece, tokens))
    going, ends = brute(texts, before)
    mask = cursor.allowed(tokens).mask
    assert (mask == GrammarCursor(compiled).allowed(tokens).mask).all()
    assert mask.shape == (VOCAB,)
    assert mask[EOS] == mask[OTHER_EOS] == ends
    allowed = {int(i) for i in np.flatnonzero(mask)} - {EOS, OTHER_EOS}
    if allowed != going:
        assert not ends
        assert len(allowed) == 1
        assert continuation(texts, before).startswith(piece(*allowed))
    return sorted(allowed)


@pytest.mark.parametrize("case", TEXTS)
def test_masks_are_those_of_brute_force_in_every_reachable_state(compiler: GrammarCompiler, case: str) -> None:
    grammar, texts = TEXTS[case]
    compiled = compiler.compile(grammar)
    cursor, seen = GrammarCursor(compiled), 0
    waiting: list[tuple[int, ...]] = [()]
    order = random.Random(7)
    while waiting:  # in any order, so that the cursor goes back and forth
        tokens = waiting.pop(order.randrange(len(waiting)))
        seen += 1
        waiting += [(*tokens, token) for token in check_state(compiled, cursor, texts, list(tokens))]
    assert seen >= len(texts)


def test_a_forced_run_is_what_the_library_looks_ahead(compiler: GrammarCompiler) -> None:
    """Token by token, as drafts are made, gives what one look to the end gives."""
    compiled = compiler.compile(Grammar(GrammarKind.REGEX, "(a|c)abcxx,abcx"))
    for first in (0, 2, 10):
        cursor, matcher, run = GrammarCursor(compiled), compiled.matcher(), [first]
        assert matcher.consume_token(first)
        ahead = matcher.compute_ff_tokens()
        while (forced := cursor.allowed(run).forced) is not None:
            run.append(forced)
        assert run[1:] == ahead
        assert len(ahead) > 2


def test_a_path_off_the_grammar_harms_nobody(compiler: GrammarCompiler) -> None:
    cursor = GrammarCursor(compiler.compile(TEXTS["choice"][0]))
    expected = cursor.allowed([0]).mask
    with pytest.raises(InvalidRequest, match="does not allow token 2 of the answer"):
        cursor.allowed([0], (1, 0))
    assert (cursor.allowed([0]).mask == expected).all()


def test_an_answer_that_ignores_its_end_ends_where_nothing_follows(compiler: GrammarCompiler) -> None:
    cursor = GrammarCursor(compiler.compile(TEXTS["choice"][0]), ignore_eos=True)
    assert not cursor.allowed([0]).mask[EOS]
    assert np.flatnonzero(cursor.allowed([0, 1, 2]).mask).tolist() == [EOS, OTHER_EOS]


def test_a_mask_that_takes_too_long_ends_its_answer(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch would wait for its next one as well. A good sequence of the same grammar is asked before and after."""
    grammar = compiler.compile(TEXTS["regex"][0])
    GrammarCursor(grammar).allowed([])
    with monkeypatch.context() as slow:
        slow.setattr("paceline.grammar.cursor.MAX_MASK_S", 0.0)
        with pytest.raises(InvalidRequest, match="too complex to go on after 1 tokens") as refused:
            GrammarCursor(grammar).allowed([LETTERS.index("c")])
    assert refused.value.field == "grammar"
    GrammarCursor(grammar).allowed([LETTERS.index("c")])
