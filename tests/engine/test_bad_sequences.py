"""Sequences of tokens that must not come: they hold at every node of a draft tree, and the text is that of plain
decoding."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.errors import InvalidRequest
from paceline.request import Grammar, GrammarKind, SamplingParams, SequenceRequest
from paceline.sampling.params import adjust, banned_tokens
from tests.support.exactness import run
from tests.support.grammar_engines import answers, grammar_request, grammar_runner, text_of
from tests.support.needs import needs_kernels
from tests.support.tiny_model import VOCAB, tiny_request, tiny_runner

VARIANTS: dict[str, dict[str, object]] = {
    "a chain": {"drafter": "ngram", "num_draft_tokens": 6},
    "a tree": {"drafter": "ngram", "num_draft_tokens": 8, "tree": "static", "tree_width": 3},
    "heads": {"drafter": "mtp", "num_draft_tokens": 4, "tree": "static", "tree_width": 2},
}
NEAR = {40: 12.0, 41: 12.0, 42: 11.5}  # logit bias: answers of three tokens, which repeat themselves
BAD = ((40, 40), (41, 42, 41), (42, 42, 42), (40, 41, 40, 41))


def asked(bad: tuple[tuple[int, ...], ...] = BAD) -> list[SequenceRequest]:
    """Some repeat what is bad; the last one forbids a token alone, and a sequence that ends with another."""
    made = [
        tiny_request(index=i, temperature=t, max_tokens=48, logit_bias=NEAR, bad_token_ids=bad)
        for i, t in enumerate((0.0, 0.7, 1.0, 1.0))
    ]
    last = tiny_request(index=4, temperature=1.0, max_tokens=48, logit_bias=NEAR, bad_token_ids=bad and ((41,), *bad))
    return [*made, last]


def occurring(request: SequenceRequest, tokens: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Bad sequences that the tokens have."""
    starts = range(len(tokens))
    return [ids for ids in request.params.bad_token_ids if any(tokens[at : at + len(ids)] == ids for at in starts)]


@needs_kernels
def test_the_text_is_that_of_plain_decoding_and_has_none_of_them() -> None:
    """Mutants: a node sees the committed output alone; a sequence of one token is left out."""
    requests = asked()
    plain = run(tiny_runner(drafter="none", prefix_cache=False), requests)
    free = run(tiny_runner(drafter="none"), asked(()))
    for request, banned, before in zip(requests, plain, free, strict=True):
        assert occurring(request, before.token_ids)
        assert not occurring(request, banned.token_ids)
    for name, options in VARIANTS.items():
        got = run(tiny_runner(**options), requests, batch=5)
        assert [one.token_ids for one in got] == [one.token_ids for one in plain], name
        assert max(n for one in got for n in one.accepted_per_round) > 1, name
    replayed = [
        replace(request, output_token_ids=one.token_ids[:9]) for request, one in zip(requests, plain, strict=True)
    ]
    again = run(tiny_runner(**VARIANTS["a tree"]), replayed)
    assert [one.token_ids for one in again] == [one.token_ids[9:] for one in plain]


def test_a_grammar_that_allows_nothing_else_wins(tmp_path: Path) -> None:
    for bad in (((64, 64),), ((64,),)):  # "a"
        request = grammar_request(Grammar(GrammarKind.CHOICE, '["aaaa"]'), bad_token_ids=bad, temperature=1.0)
        for drafter in ("none", "ngram"):
            (done,) = answers(grammar_runner(tmp_path / drafter, drafter=drafter), [request])
            assert text_of(done.token_ids) == "aaaa"
    either = Grammar(GrammarKind.CHOICE, '["aa", "ab"]')
    request = grammar_request(either, bad_token_ids=((64, 64),), temperature=0.0)
    (done,) = answers(grammar_runner(tmp_path / "either", drafter="ngram"), [request])
    assert text_of(done.token_ids) == "ab"


def test_a_grammar_that_lets_the_text_end_allows_something_else() -> None:
    """Mutant: stop tokens count as shut before the minimum length and after it."""
    allowed = np.zeros(8, dtype=bool)
    allowed[[2, 5]] = True
    for min_tokens, comes in ((0, 2), (3, 5)):
        params = SamplingParams(bad_token_ids=((5,),), stop_token_ids=(2,), min_tokens=min_tokens)
        assert torch.isfinite(adjust(torch.zeros(8), params, [], [1], allowed)).nonzero().flatten().tolist() == [comes]


def test_only_the_end_of_the_output_counts() -> None:
    params = SamplingParams(bad_token_ids=((1, 2, 3), (2, 4), (5,)))
    assert banned_tokens(params, [1, 2]) == {3, 4, 5}
    assert banned_tokens(params, [9, 1], (2,)) == {3, 4, 5}
    assert banned_tokens(params, [1, 2, 9]) == {5}
    assert banned_tokens(params, []) == {5}
    assert banned_tokens(SamplingParams(), [1, 2]) == set()


@pytest.mark.parametrize("bad", [((),), ((VOCAB,),), ((1,),) * 129, ((1,) * 33,)])
def test_what_no_node_takes(bad: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(InvalidRequest, match="bad_token_ids"):
        SamplingParams(bad_token_ids=bad).validate(VOCAB)
