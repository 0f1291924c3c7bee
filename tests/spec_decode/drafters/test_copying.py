"""What copying drafters find and grow, against slow searches written from the rules."""

from __future__ import annotations

import random
import sys
from fractions import Fraction

import pytest
import torch

from paceline.spec_decode.base import DraftBudget, TreeKind
from paceline.spec_decode.drafters.copying import (
    BOUNDARY,
    DOUBT,
    GRAM_SIZES,
    MAX_MATCH,
    MAX_OCCURRENCES,
    MAX_TOKENS,
    CopyLimits,
    Occurrence,
    OwnText,
    check_vocab,
    find,
    followers,
    grow,
    longest_first,
    own_occurrences,
    text_of,
)
from tests.support.drafting import new_sequence

torch.set_num_threads(1)
Ends = list[tuple[int, int]]  # (match length, index of what followed), longest first, then newest


def agreeing(tokens: list[int], tail: list[int], end: int) -> int:
    """Tokens before ``end`` that are the last of ``tail``, MAX_MATCH at most."""
    most = min(MAX_MATCH, end, len(tail))
    return next((n for n in range(most) if tokens[end - 1 - n] != tail[-1 - n]), most)


def slow_find(tokens: list[int], tail: list[int], ends: range) -> Ends:
    """Every earlier place where at least the last token stood; when there are too many, those of longer grams first."""
    matches = [(agreeing(tokens, tail, end), end) for end in reversed(ends)]
    found: Ends = []
    for size in GRAM_SIZES:
        found += [one for one in matches if one[0] >= size and one not in found][: MAX_OCCURRENCES - len(found)]
    return sorted(found, key=lambda one: (-one[0], -one[1]))


def slow_shares(tokens: list[int], ends: Ends) -> dict[int, Fraction]:
    """Probability of each next token: of what longer matches left, those of length L have L / (L + DOUBT)."""
    shares: dict[int, Fraction] = {}
    left = Fraction(1)
    for length in sorted({length for length, _ in ends}, reverse=True):
        said = [tokens[end] for n, end in ends if n == length]
        mass = left * length / (length + int(DOUBT))
        for token in set(said):
            shares[token] = shares.get(token, Fraction(0)) + mass * said.count(token) / len(said)
        left -= mass
    return shares


def slow_chain(tokens: list[int], ends: Ends, most: int, least: float) -> list[int]:
    """Always the likeliest token; among equals the one that the longest, then the newest match says."""
    chain: list[int] = []
    probability = Fraction(1)
    while ends and len(chain) < most:
        shares = slow_shares(tokens, ends)
        best = max(shares.values())
        token = next(tokens[end] for _, end in ends if shares[tokens[end]] == best)
        probability *= best
        if probability < least:
            break
        chain.append(token)
        ends = [(n + 1, end + 1) for n, end in ends if tokens[end] == token and end + 1 < len(tokens)]
    return chain


def as_ends(occurrences: list[Occurrence]) -> Ends:
    return [(int(length), after) for length, _, after in occurrences]


def random_tokens(rng: random.Random, longest: int) -> list[int]:
    return [rng.randrange(rng.choice((2, 4, 9))) for _ in range(rng.randrange(1, longest))]


def test_every_earlier_place_is_found_and_the_longest_first() -> None:
    rng = random.Random(0)
    crowded = 0
    for _ in range(300):
        tokens = random_tokens(rng, 200)
        expected = slow_find(tokens, tokens, range(1, len(tokens)))
        assert as_ends(own_occurrences(text_of(tokens))) == expected
        crowded += len(expected) == MAX_OCCURRENCES
    assert crowded > 50


def test_the_end_itself_is_no_place() -> None:
    assert own_occurrences("") == []
    assert own_occurrences(text_of([5])) == []
    assert own_occurrences(text_of([5, 6, 7])) == []
    assert as_ends(own_occurrences(text_of([5, 5, 5]))) == [(2, 2), (1, 1)]  # overlapping is allowed


def test_chains_are_those_of_the_rule() -> None:
    rng = random.Random(1)
    lengths = set()
    for _ in range(300):
        tokens, least = random_tokens(rng, 120), rng.choice((0.0113, 0.0517, 0.2019))
        ends = slow_find(tokens, tokens, range(1, len(tokens)))
        pairs = grow(own_occurrences(text_of(tokens)), CopyLimits(6, 6, 1, least))
        assert [parent for parent, _ in pairs] == list(range(-1, len(pairs) - 1))
        assert [token for _, token in pairs] == slow_chain(tokens, ends, 6, least)
        lengths.add(len(pairs))
    assert lengths == set(range(7))


def test_probabilities_are_those_of_the_rule() -> None:
    rng = random.Random(2)
    for _ in range(200):
        tokens = random_tokens(rng, 120)
        ends = slow_find(tokens, tokens, range(1, len(tokens)))
        found = followers(own_occurrences(text_of(tokens)))
        exact = slow_shares(tokens, ends)
        assert {ord(token): likely for token, likely, _ in found} == pytest.approx(
            {k: float(v) for k, v in exact.items()}
        )
        assert sum(likely for _, likely, _ in found) < 1.0
        assert [likely for _, likely, _ in found] == sorted((likely for _, likely, _ in found), reverse=True)
        for token, _, after in found:
            going_on = [(n + 1, end + 1) for n, end in ends if tokens[end] == ord(token) and end + 1 < len(tokens)]
            assert as_ends(after) == going_on


def test_a_tree_takes_the_likeliest_nodes() -> None:
    """No node that was left out is likelier than one that was taken, but for depth and the width."""
    rng = random.Random(3)
    grown = 0
    for _ in range(100):
        tokens = random_tokens(rng, 150)
        occurrences, bounds = own_occurrences(text_of(tokens)), CopyLimits(7, 4, 3, 0.02)
        pairs = grow(occurrences, bounds)
        every: list[tuple[float, tuple[int, ...]]] = []

        def collect(
            at: list[Occurrence], probability: float, path: tuple[int, ...], every: list[tuple[float, tuple[int, ...]]]
        ) -> None:
            for token, likely, after in followers(at)[:3]:
                if probability * likely >= 0.02:
                    every.append((probability * likely, (*path, ord(token))))
                    if len(path) < 3:
                        collect(after, probability * likely, every[-1][1], every)

        collect(occurrences, 1.0, (), every)
        value = {path: probability for probability, path in every}
        paths: list[tuple[int, ...]] = []
        for parent, token in pairs:
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
        assert len(paths) == len(set(paths)) == min(7, len(every))
        best = sorted(value.values(), reverse=True)[: len(paths)]
        assert sorted((value[path] for path in paths), reverse=True) == pytest.approx(best)
        grown += len(pairs)
    assert grown > 300


def test_texts_of_others_are_searched_whole_and_not_across_their_ends() -> None:
    text = text_of([1, 2, 3]) + BOUNDARY + text_of([4, 2, 3, 9]) + BOUNDARY
    tail = text_of([7, 2, 3])
    assert list(find(text, tail, len(text))) == [(2, text, 7)]  # nothing follows in the first text
    assert list(find(text, text_of([3, 4]), len(text))) == [(1, text, 5)]  # 4, without the 3 of the text before
    (discounted,) = find(text, tail, len(text), discount=0.5)
    assert discounted[0] == 1.5
    (pair,) = grow([discounted], CopyLimits(8, 8, 1))
    assert pair == (-1, 9)  # and ends with its text


def test_a_discounted_match_stands_between_its_length_and_the_shorter_one() -> None:
    own = text_of([1, 2, 60, 8, 2, 70, 1, 2])
    others = text_of([1, 2, 80]) + BOUNDARY
    ranked = longest_first([*own_occurrences(own), *find(others, own[-MAX_MATCH:], len(others), 0.5)])
    assert [ord(text[after]) for _, text, after in ranked] == [60, 80, 70]
    assert [ord(token) for token, _, _ in followers(ranked)] == [60, 80, 70]


def test_bounds_of_a_budget() -> None:
    tree = DraftBudget(5, 3, TreeKind.STATIC, 12, min_confidence=0.3)
    assert CopyLimits.within(tree, 0.1) == CopyLimits(12, 5, 3, 0.1, 0.3)
    chain = DraftBudget(5, 3, TreeKind.CHAIN, 12)
    assert CopyLimits.within(chain) == CopyLimits(5, 5, 1)
    assert grow(own_occurrences(text_of([1, 2, 3, 1, 2])), CopyLimits.within(DraftBudget(0))) == []


def test_own_text_follows_the_sequence_and_is_bounded() -> None:
    seq = new_sequence([5, 6], [7])
    assert OwnText.of(seq) == text_of([5, 6, 7])
    seq.token_ids += [8, 9]
    assert OwnText.of(seq) == OwnText.of(seq) == text_of([5, 6, 7, 8, 9])
    rng = random.Random(4)
    seq.token_ids += [rng.randrange(50_000) for _ in range(MAX_TOKENS)]
    assert OwnText.of(seq) == text_of(seq.token_ids[-MAX_TOKENS:])
    seq.token_ids.append(3)
    assert OwnText.of(seq) == text_of(seq.token_ids[-MAX_TOKENS:])
    assert OwnText.of(new_sequence(seq.token_ids)) == OwnText.of(seq)


def test_any_vocabulary_up_to_the_boundary_is_held() -> None:
    largest = sys.maxunicode - 1
    odd = [0xD800, 0xDFFF, 0, largest, 10]  # lone surrogates, NUL, a line end
    assert as_ends(own_occurrences(text_of([*odd, 7, *odd]))) == [(5, 5)]
    check_vocab(sys.maxunicode)
    with pytest.raises(ValueError, match="vocabulary"):
        check_vocab(sys.maxunicode + 1)
