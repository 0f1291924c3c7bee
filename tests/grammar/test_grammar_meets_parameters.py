"""Grammars beside the other parameters of a request, and what forced drafts save."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.engine.model_runner import ModelRunner
from paceline.request import FinishReason, Grammar, GrammarKind, SequenceRequest, SpeculationParams
from tests.grammar.test_grammar_in_engine import JSON, plain, requests
from tests.support.asked import Asked
from tests.support.grammar_engines import answers, grammar_request, grammar_runner, text_of
from tests.support.tiny_chat import EOS

LETTERS = Grammar(GrammarKind.REGEX, "[ab]{2,40}")
LONG = "the quick brown fox jumps over the lazy dog"
CONSTANT = Grammar(GrammarKind.CHOICE, json.dumps([LONG + " once", LONG + " twice"]))


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    return grammar_runner(tmp_path_factory.mktemp("tokenizer"), drafter="ngram")


CASES: tuple[tuple[Asked, int, int], ...] = (  # what is asked, the least and the greatest number of letters
    ({}, 2, 40),
    ({"min_tokens": 20}, 20, 40),
    ({"min_tokens": 64}, 40, 40),
    ({"ignore_eos": True}, 40, 40),
    ({"logit_bias": {EOS: 100.0}}, 2, 2),
    ({"logit_bias": {EOS: 100.0}, "min_tokens": 10}, 10, 10),
    ({"logit_bias": {5: 100.0}}, 2, 40),
    ({"repetition_penalty": 1.5, "frequency_penalty": 0.7, "top_k": 3, "top_p": 0.9}, 2, 40),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case[0]))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_length_is_the_grammar_s_and_within_it_the_request_s(
    runner: ModelRunner, case: tuple[Asked, int, int], temperature: float
) -> None:
    asked, least, most = case
    for index in range(3):
        (done,) = answers(runner, [grammar_request(LETTERS, index=index, **({"temperature": temperature} | asked))])
        text = text_of(done.token_ids)
        assert set(text) <= {"a", "b"}
        assert least <= len(text) <= most
        assert done.finish_reason is FinishReason.STOP
        assert done.token_ids[-1] == EOS


def test_a_stop_token_of_the_request_that_the_grammar_allows_ends_the_answer(runner: ModelRunner) -> None:
    (done,) = answers(runner, [grammar_request(CONSTANT)])
    letter = done.token_ids[4]
    (cut,) = answers(runner, [grammar_request(CONSTANT, stop_token_ids=(EOS, letter))])
    assert cut.token_ids == done.token_ids[: done.token_ids.index(letter) + 1]
    assert cut.finish_reason is FinishReason.STOP


def test_max_tokens_cuts_and_a_cut_answer_is_a_beginning(runner: ModelRunner) -> None:
    (whole,) = answers(runner, [grammar_request(JSON, max_tokens=96)])
    for most in (1, 2, 7, 20):
        (cut,) = answers(runner, [grammar_request(JSON, max_tokens=most)])
        assert cut.token_ids == whole.token_ids[:most]
        assert cut.finish_reason is FinishReason.LENGTH


def test_log_probabilities_are_the_model_s_own(runner: ModelRunner) -> None:
    free = grammar_request(None, max_tokens=1, top_logprobs=3)
    (unmasked,) = answers(runner, [free])
    (masked,) = answers(runner, [replace(free, params=replace(free.params, grammar=CONSTANT))])
    assert masked.token_ids != unmasked.token_ids
    assert masked.logprobs[0].top_ids == unmasked.logprobs[0].top_ids
    assert masked.logprobs[0].top_logprobs == unmasked.logprobs[0].top_logprobs
    assert masked.logprobs[0].logprob < masked.logprobs[0].top_logprobs[-1]


@pytest.mark.parametrize("drafter", ["none", "ngram", "mtp"])
def test_forced_tokens_are_drafted_and_never_refused(tmp_path: Path, drafter: str) -> None:
    (done,) = answers(grammar_runner(tmp_path, drafter=drafter), [grammar_request(CONSTANT)])
    assert text_of(done.token_ids).startswith(LONG)
    assert done.stats.rounds <= 3 + -(-len(LONG) // 16)
    forced = done.stats.rounds_by_drafter["grammar"]
    assert forced >= 2
    assert done.stats.accepted_per_round[0] == 16


def test_a_request_that_turned_speculation_off_drafts_nothing(runner: ModelRunner) -> None:
    asked = replace(grammar_request(CONSTANT), speculation=SpeculationParams(num_draft_tokens=0))
    (done,) = answers(runner, [asked])
    assert done.stats.draft_tokens == 0
    assert done.stats.rounds == len(done.token_ids) - 1
    assert done.token_ids == answers(runner, [grammar_request(CONSTANT)])[0].token_ids


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_on_a_device_grammars_are_judged_on_the_host(tmp_path: Path, temperature: float) -> None:
    """The device's sampler knows no masks, and unread drafts cannot be fitted."""
    runner = grammar_runner(tmp_path, drafter="mtp", num_draft_tokens=3)
    runner.samples_on_device = True
    done = answers(runner, requests(temperature))
    assert [one.token_ids for one in done] == plain(tmp_path, temperature)


def test_pages_are_whole_and_the_prefix_cache_knows_no_grammar(tmp_path: Path) -> None:
    runner = grammar_runner(tmp_path, drafter="ngram", tree="static", tree_width=3)
    free = requests(0.0)[5]
    (before,) = answers(runner, [free])
    masked = SequenceRequest("masked", free.prompt_token_ids, replace(free.params, grammar=LETTERS))
    (done,) = answers(runner, [masked])
    assert done.cached_tokens > 0
    (after,) = answers(runner, [free])
    assert after.token_ids == before.token_ids
    assert runner.allocator.check_integrity() == []
