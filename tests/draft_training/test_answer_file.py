"""The file of a growing corpus: the lowest number keeps a prompt, a cut line goes, strangers' files stay whole."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import permutations
from pathlib import Path

import pytest

from draft_training.answer_file import SAID_BEFORE, AnswerFile
from paceline.errors import ConfigError

ASKED = {0: (1, 2), 1: (3,), 2: (1, 2), 3: (4,), 4: (1, 2)}  # number -> prompt


def answer(file: AnswerFile, number: int) -> None:
    file.add_answer(number, "test", 0.0, "stop", ASKED[number], (7, number))


def write(path: Path, claims: Sequence[int], answers: Sequence[int], reopened: int = -1) -> None:
    """Claim and answer in these orders; from the answer ``reopened`` on in a second run, which claims again."""
    with AnswerFile(path, "run") as file:
        for number in claims:
            if not file.claim(number, ASKED[number]):
                file.leave_out(number, "test", SAID_BEFORE)
        answers = [n for n in answers if n not in file.done]
        for number in answers[: reopened if reopened >= 0 else None]:
            answer(file, number)
        if reopened < 0:
            file.settle()
    if reopened >= 0:
        left = answers[reopened:]
        with AnswerFile(path, "run") as file:
            assert file.done.isdisjoint(left)
            for number in left:
                if file.claim(number, ASKED[number]):
                    answer(file, number)
                else:
                    file.leave_out(number, "test", SAID_BEFORE)
            file.settle()


def test_the_lowest_number_keeps_a_prompt_whatever_the_order(tmp_path: Path) -> None:
    plain = tmp_path / "plain.jsonl"
    write(plain, range(5), range(5))
    expected = plain.read_bytes()
    told = [json.loads(line) for line in expected.splitlines()]
    assert [row["answer_ids"] for row in told] == [[7, 0], [7, 1], [], [7, 3], []]
    assert [row["number"] for row in told if row.get("left_out") == SAID_BEFORE] == [2, 4]
    for i, order in enumerate(permutations((0, 2, 4))):
        for j, finishes in enumerate(permutations((0, 2, 4))):
            for reopened in (-1, 0, 1, 2, 4):
                path = tmp_path / f"{i}-{j}-{reopened}.jsonl"
                write(path, (*order, 1, 3), (3, *finishes, 1), reopened)
                assert path.read_bytes() == expected


def test_counts_follow_the_lines(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with AnswerFile(path, "run") as file:
        for number in (4, 1, 0):
            assert file.claim(number, ASKED[number])
            answer(file, number)
        assert (file.answers, file.answer_tokens, file.left_out) == (3, 6, 0)
        file.settle()
        assert (file.answers, file.answer_tokens, file.left_out) == (2, 4, 1)
    with AnswerFile(path, "run") as file:
        assert (file.answers, file.answer_tokens, file.left_out) == (2, 4, 1)
        assert file.done == {0, 1, 4}


def test_a_line_cut_anywhere_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    write(path, (1, 3), (1, 3))
    content = path.read_bytes()
    first = content.index(b"\n") + 1
    for end in range(first, len(content)):
        path.write_bytes(content[:end])
        with AnswerFile(path, "run") as file:
            assert file.done == {1}
        assert path.read_bytes() == content[:first]


@pytest.mark.parametrize("content", ["a note", '{"prompt": "hi"}\n', '{"number": 3}\n', "[1]\n", '{"number": "x"\n'])
def test_a_file_of_something_else_is_refused_and_kept(tmp_path: Path, content: str) -> None:
    path = tmp_path / "notes.txt"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"out: .*notes\.txt:1"):
        AnswerFile(path, "run")
    assert path.read_text() == content


def test_one_run_writes_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with AnswerFile(path, "run"), pytest.raises(ConfigError, match="another run is writing"):
        AnswerFile(path, "run")
    AnswerFile(path, "run").__exit__(None, None, None)  # free again


def test_places_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="compress it when it is finished"):
        AnswerFile(tmp_path / "out.jsonl.xz", "run")
    with pytest.raises(ConfigError, match="cannot be written"):
        AnswerFile(tmp_path, "run")
