"""Arrivals by law and by trace, and prompts of the asked length."""

from __future__ import annotations

import statistics
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.serving.arrivals import Arrival, at_rate, mean_rate, parse_mix, poisson, read_trace
from benchmarks.serving.questions import read
from benchmarks.serving.workload import fitted, plan, warm_up
from benchmarks.speculation.prompts import Prompt
from paceline.errors import ConfigError

PROMPTS, OUTPUTS = parse_mix("64:3,1024", "prompt_tokens"), parse_mix("32", "output_tokens")


def gaps(arrivals: list[Arrival]) -> list[float]:
    times = [0.0, *(a.at_s for a in arrivals)]
    return [b - a for a, b in pairwise(times)]


def words(text: str) -> int:
    return len(text.split())


def test_arrivals_are_poisson_and_lengths_follow_their_weights() -> None:
    arrivals = poisson(2.5, 7, PROMPTS, OUTPUTS, requests=4000)
    assert statistics.mean(gaps(arrivals)) == pytest.approx(1 / 2.5, rel=0.05)
    assert statistics.pstdev(gaps(arrivals)) == pytest.approx(1 / 2.5, rel=0.05)  # of an exponential law
    assert statistics.correlation(gaps(arrivals)[:-1], gaps(arrivals)[1:]) == pytest.approx(0, abs=0.05)
    assert sum(a.prompt_tokens == 64 for a in arrivals) / 4000 == pytest.approx(0.75, abs=0.03)


def test_a_seed_fixes_the_run_and_a_rate_only_stretches_it() -> None:
    slow, fast = (poisson(rate, 3, PROMPTS, OUTPUTS, requests=50) for rate in (0.5, 2.0))
    assert slow == poisson(0.5, 3, PROMPTS, OUTPUTS, requests=50)
    assert slow != poisson(0.5, 4, PROMPTS, OUTPUTS, requests=50)
    assert [a.prompt_tokens for a in slow] == [a.prompt_tokens for a in fast]
    assert [a.at_s / 4 for a in slow] == pytest.approx([a.at_s for a in fast])


def test_a_duration_ends_arrivals() -> None:
    arrivals = poisson(4.0, 1, PROMPTS, OUTPUTS, duration_s=10.0)
    assert 20 < len(arrivals) < 60
    assert arrivals[-1].at_s < 10.0


@pytest.mark.parametrize("text", ["", "64,", "a", "64:0", "0", "64:-1", "64:nan", "-3"])
def test_a_wrong_mix_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_mix(text, "prompt_tokens")
    assert error.value.key == "prompt_tokens"


def test_a_trace_of_seconds(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("model,timestamp,prompt_tokens,output_tokens\nx,12.5,10,3\n\nx,10,20,4\nx,14,30,5\n")
    assert read_trace(path) == [Arrival(0.0, 20, 4), Arrival(2.5, 10, 3), Arrival(4.0, 30, 5)]
    assert len(read_trace(path, requests=2)) == 2
    assert len(read_trace(path, duration_s=2.0)) == 1
    assert mean_rate(read_trace(path)) == 0.5
    assert [a.at_s for a in at_rate(read_trace(path), 2.0)] == [0.0, 0.625, 1.0]


def test_a_trace_of_dates_in_the_columns_of_azure(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9951690,396,109\n"
    )
    first, second = read_trace(path)
    assert (first, second.prompt_tokens) == (Arrival(0.0, 374, 44), 396)
    assert second.at_s == pytest.approx(4.31458, abs=1e-4)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("when,prompt_tokens,output_tokens\n1,2,3\n", 1),
        ("timestamp,prompt_tokens,output_tokens\n1,2,3\n2,3\n", 3),
        ("timestamp,prompt_tokens,output_tokens\nsoon,2,3\n", 2),
        ("timestamp,prompt_tokens,output_tokens\nnan,2,3\n", 2),
        ("timestamp,prompt_tokens,output_tokens\n1,2,3\n1,0,3\n", 3),
        ("timestamp,prompt_tokens,output_tokens\n1,2,-3\n", 2),
        ("timestamp,prompt_tokens,output_tokens\n1,2.5,3\n", 2),
    ],
)
def test_a_bad_line_is_named(text: str, line: int, tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"bad.csv line {line}:"):
        read_trace(path)


def test_an_empty_trace_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "empty.csv"
    path.write_text("timestamp,prompt_tokens,output_tokens\n")
    with pytest.raises(ConfigError, match="no request"):
        read_trace(path)


def test_prompts_have_the_asked_length() -> None:
    questions = [Prompt(str(i), "qa", (" ".join(f"q{i}w{j}" for j in range(6 + i)),)) for i in range(30)]
    arrivals = [Arrival(float(i), (4, 8, 40)[i % 3], 5) for i in range(9)]
    asks = plan(arrivals, questions, words, seed=11)
    assert [ask.prompt_tokens for ask in asks] == [words(ask.text) for ask in asks] == [4, 8, 40] * 3
    assert len({ask.text for ask in asks if ask.prompt_tokens > 4}) == 6
    assert [ask.seed for ask in asks] == list(range(11, 20))
    asked = next(ask for ask in asks if ask.prompt_tokens == 40).text.split("\n\n")[-1]
    assert asked in {question.turns[0] for question in questions}  # whole, at the end


def test_another_run_has_other_prompts() -> None:
    questions = [Prompt(str(i), "qa", (" ".join(f"q{i}w{j}" for j in range(8)),)) for i in range(30)]
    arrivals = [Arrival(float(i), 40, 5) for i in range(9)]
    first, second = (plan(arrivals, questions, words, 0, skip) for skip in (0, 9))
    assert not {ask.text for ask in first} & {ask.text for ask in second}
    assert not {ask.text for ask in first} & {ask.text for ask in warm_up(first, words, 3)}


def test_too_few_words_are_refused() -> None:
    with pytest.raises(ConfigError, match="shorter than 100"):
        fitted("one two", ["three four"], words, 100)


def test_the_kept_texts_are_long_enough_for_the_default_mix() -> None:
    asks = plan([Arrival(0.0, 1024, 5)] * 20, read(None), words, 0)
    assert all(1000 <= ask.prompt_tokens <= 1024 for ask in asks)
