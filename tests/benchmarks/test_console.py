"""What a benchmark says on stderr while it works."""

from __future__ import annotations

import pytest

from benchmarks.common import console
from benchmarks.common.timing import median_s


def test_a_step_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    console.step(3, 20, "batch of 8")
    assert capsys.readouterr() == ("", "3/20 batch of 8\n")


def test_a_bar_is_few_lines_where_stderr_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 1.0
    monkeypatch.setattr("benchmarks.common.console.time.monotonic", lambda: now)
    with console.bar("prompts") as show:
        for done in range(24):
            show(done, 24, "ngram")
            now += 0.5
    lines = [f"{done}/24 prompts: ngram" for done in (0, 10, 20)]
    assert capsys.readouterr() == ("", "\n".join(["prompts: loading", *lines, ""]))


@pytest.mark.parametrize(("what", "said"), [("", ""), ("runs", "0/3 runs\n1/3 runs\n2/3 runs\n")])
def test_each_run_that_is_timed_is_told_where_it_has_a_name(
    what: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[int] = []
    assert median_s(lambda: calls.append(1), 2, what) >= 0.0
    assert (len(calls), capsys.readouterr().err) == (3, said)
