"""What the soak looks with: it sees a wrong token, a leak and a process that is not there."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy

import psutil
import pytest

from tests.soak.answers import Answer, Heard, wrong_when_complete, wrong_when_cut
from tests.soak.asks import KINDS, MOMENTS, WAYS, make_asks, make_turn
from tests.soak.kills import Streams
from tests.soak.processes import Sample, Watch, grown, slope_per_1000, table, trends

RIGHT = Heard(2, {0: Answer([5, 6, 7], "abc", "stop"), 1: Answer([8, 9], "de", "length")}, closed=True)


def token(heard: Heard) -> None:
    heard.answers[0].token_ids[1] = 60


def text(heard: Heard) -> None:
    heard.answers[1].text = "dE"


def reason(heard: Heard) -> None:
    heard.answers[1].finish_reason = "stop"


def twice(heard: Heard) -> None:
    heard.answers[0].token_ids.append(7)


def choice(heard: Heard) -> None:
    heard.answers[2] = Answer([1], "x", "stop")


def problem(heard: Heard) -> None:
    heard.problems.append("token 3 came after 2 tokens")


@pytest.mark.parametrize("spoil", [token, text, reason, twice, choice, problem])
def test_what_is_wrong_is_found(spoil: Callable[[Heard], None]) -> None:
    heard = deepcopy(RIGHT)
    assert wrong_when_complete(heard, RIGHT) == wrong_when_cut(heard, RIGHT) == []
    spoil(heard)
    assert len(wrong_when_complete(heard, RIGHT)) == 1
    assert len(wrong_when_cut(heard, RIGHT)) == 1


def test_a_part_is_no_whole() -> None:
    part = Heard(2, {0: Answer([5, 6], "ab"), 1: Answer([8, 9], "de", "length")}, closed=True)
    assert not part.complete
    assert wrong_when_cut(part, RIGHT) == []
    assert len(wrong_when_complete(part, RIGHT)) == 3
    assert part.share_of(RIGHT) == 0.8
    assert Heard(2, {0: Answer(text="ab")}).share_of(RIGHT) == 0.4
    assert wrong_when_complete(Heard(2), RIGHT)


def test_turns_are_the_seeds_and_of_every_sort() -> None:
    asks = make_asks(7)
    assert make_asks(7) == asks != make_asks(8)
    assert {ask.kind for ask in asks} == set(KINDS)
    turns = [make_turn(7, number, asks) for number in range(600)]
    assert turns == [make_turn(7, number, asks) for number in range(600)]
    assert {turn.way for turn in turns} == set(WAYS)
    assert {turn.which for turn in turns} == set(range(len(asks)))
    left = [turn.leave for turn in turns if turn.leave]
    assert {leave.moment for leave in left} == {*MOMENTS, "at any time"}
    assert len(left) >= 200
    assert len({turn.tenant for turn in turns}) > 60


def test_the_slope_is_that_of_the_line() -> None:
    requests = [10.0, 60.0, 110.0, 400.0]
    assert slope_per_1000(requests, [3.0 + 0.004 * x for x in requests]) == pytest.approx(4.0)
    assert slope_per_1000(requests, [8.0, 8.0, 8.0, 8.0]) == 0.0
    assert slope_per_1000([5.0, 5.0], [1.0, 9.0]) == 0.0


def test_what_fills_in_the_first_half_is_no_growth() -> None:
    samples = [Sample(n, min(n, 40) * 1.0, 50.0, 9, 3) for n in range(0, 101, 2)]
    found = trends(samples, 100)
    assert found is not None
    assert (found["private"].first, found["private"].last, found["private"].per_1000) == (0.0, 40.0, 0.0)
    assert trends(samples[:30], 100) is None  # it went away
    assert trends(samples[-10:], 100) is None  # it came late


LEAK = """
import sys
kept = []
for line in sys.stdin:
    if line == "leak\\n":
        kept.append((bytearray(b"x") * 65536, open("/dev/null")))
    else:
        bytearray(b"x") * 65536, open("/dev/null").close()
    print(flush=True)
"""


@contextmanager
def child() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", LEAK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("word", ["leak", "use"])
def test_a_process_that_keeps_something_of_each_request_is_found(word: str) -> None:
    served, turns = 0, 400
    with child() as process:
        watch = Watch(psutil.Process(process.pid), lambda: served)
        assert process.stdin is not None
        assert process.stdout is not None
        for served in range(turns + 1):
            process.stdin.write(f"{word}\n")
            process.stdin.flush()
            process.stdout.readline()
            if served % 20 == 0:
                watch.look()
    slopes = trends(watch.samples[process.pid], turns)
    assert slopes is not None
    found = grown({"child": slopes}, turns)
    assert [line.split()[1] for line in found] == (["private", "resident", "files"] if word == "leak" else [])
    if word == "leak":
        assert slopes["private"].per_1000 == pytest.approx(62.5, rel=0.2)
        assert slopes["files"].per_1000 == pytest.approx(1000.0)
    assert "child" in table({"child": slopes})


def test_streams_that_lost_their_node() -> None:
    """Those that had a token at a kill, and that the router tried again. Mutant: all that were open at a kill."""
    streams = Streams(with_tokens={"eagle3-1", "mtp-2", "none-3"})
    streams.killed("decode", 2)
    streams.with_tokens = {"ngram-4"}
    tried = ("eagle3-1", "mtp-2#1", "ngram-4", "suffix-5")
    assert streams.moved("".join(f"WARNING {name}: trying again after a loss\n" for name in tried)) == {
        "eagle3-1",
        "mtp-2",
    }
    assert (streams.kills, streams.running_when_killed) == ({"decode": 1}, 2)
