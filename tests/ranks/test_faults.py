"""A follower that fails, goes or is out of step ends the step of rank 0 with one error, and nothing waits on."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
import torch

from paceline.errors import NodeUnavailable
from paceline.ranks.channel import Frame, Kind
from paceline.ranks.follower import Follower
from paceline.ranks.leader import Followers
from paceline.ranks.sockets import SocketGroup
from paceline.ranks.target import ParallelTarget
from tests.support import thread_ranks
from tests.support.exactness import run
from tests.support.needs import needs_kernels
from tests.support.thread_ranks import family_spec, ranks_runner, ranks_spec
from tests.support.tiny_model import tiny_request

pytestmark = needs_kernels

TIMEOUT_S = 2.0


class Faulty(Follower):
    """Does something else than a command after the checks of the start."""

    def fault(self, frame: Frame) -> None:
        raise NotImplementedError

    def _run(self, frame: Frame) -> None:
        if frame.number == 30:
            self.fault(frame)
        else:
            super()._run(frame)


class Raises(Faulty):
    def fault(self, frame: Frame) -> None:
        raise RuntimeError("no memory")


class Ends(Faulty):
    def fault(self, frame: Frame) -> None:
        self._group.shut()
        self._commands.shut()


class Skips(Faulty):
    """It is a step behind from then on."""

    def fault(self, frame: Frame) -> None:
        with self._stepped:
            self._done = frame.number


class RunsAnother(Faulty):
    """The sizes of what it tells differ."""

    def fault(self, frame: Frame) -> None:
        Follower._run(self, Frame(Kind.EMBED, frame.number, bytearray(2 * (b"\x08" + bytes(15)))))


class LeavesOut(Follower):
    """It has no row, and takes no part in the exchange of one layer: what data-parallel attention hangs on."""

    def _run(self, frame: Frame) -> None:
        share = self._group.share_rows

        def leave_out(part: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
            assert part.shape[0] == counts[self._group.rank] == 0
            return part.new_empty(sum(counts), part.shape[1])

        if frame.number >= 30:
            self._group.share_rows = leave_out  # type: ignore[method-assign]
        super()._run(frame)
        self._group.share_rows = share  # type: ignore[method-assign]


@pytest.mark.parametrize("sums", ["sockets", "collective"])
def test_a_rank_without_rows_must_take_part(sums: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence lives on rank 0, so rank 1 has nothing to attend."""
    monkeypatch.setattr(thread_ranks, "TIMEOUT_S", TIMEOUT_S)
    options = {"drafter": "none", "prefix_cache": False, "rank_sums": sums, "attention_dp": 2}
    runner = ranks_runner(2, family_spec("deepseek_v3"), "fp32", LeavesOut, **options)
    began = time.monotonic()
    with pytest.raises(NodeUnavailable, match="ranks of this node are lost"):
        run(runner, [tiny_request(max_tokens=40)])
    assert time.monotonic() - began < TIMEOUT_S + 1.0
    runner.close()


@pytest.mark.parametrize(
    ("sums", "follower", "said"),
    [
        ("sockets", Raises, "no memory"),
        ("sockets", Ends, "gone"),
        ("sockets", Skips, "silent"),
        ("sockets", RunsAnother, "step"),
        ("collective", Raises, "no memory"),
        ("collective", Ends, "gone"),
        ("collective", Skips, "silent"),
    ],
)
def test_one_clear_error(sums: str, follower: type[Faulty], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutants: a collective waits for ever; the end of a rank ends no collective."""
    monkeypatch.setattr(thread_ranks, "TIMEOUT_S", TIMEOUT_S)
    options = {"drafter": "none", "prefix_cache": False, "rank_sums": sums}
    runner = ranks_runner(4, ranks_spec(), "fp32", follower, **options)
    assert runner.alive()
    began = time.monotonic()
    with pytest.raises(NodeUnavailable, match=f"ranks of this node are lost.*{said}"):
        run(runner, [tiny_request()])
    assert not runner.alive()
    with pytest.raises(NodeUnavailable, match="ranks of this node are lost"):  # at once, from then on
        runner.kv.gather(range(2), runner.kv.data[0].new_zeros(1).long())
    runner.close()
    assert time.monotonic() - began < TIMEOUT_S + 1.0


def test_tokens_of_a_step_in_which_a_rank_was_lost_are_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's kernel that is aborted ends as one that was right, with other data. Mutant: who reads the tokens does not
    ask whether the ranks are there."""
    runner = ranks_runner(2, ranks_spec(), "fp32", drafter="none", prefix_cache=False, rank_sums="collective")
    logits = ParallelTarget.logits

    def aborted(target: ParallelTarget, hidden: torch.Tensor) -> torch.Tensor:
        target.followers.fail(NodeUnavailable("rank 1 ended"))
        return torch.zeros(len(hidden), 519)

    assert len(logits(runner.model, torch.zeros(1, 96))) == 1  # type: ignore[arg-type]
    monkeypatch.setattr(ParallelTarget, "logits", aborted)
    with pytest.raises(NodeUnavailable, match="lost in a step"):
        run(runner, [tiny_request(max_tokens=1)])
    with pytest.raises(NodeUnavailable, match="rank 1 ended"):  # rows neither, whoever holds all of them
        runner.kv.gather(range(0), runner.kv.data[0].new_zeros(1).long())
    runner.close()


def test_an_error_without_a_text_has_its_name() -> None:
    followers = Followers([], [], [], SocketGroup(0, 1, [], TIMEOUT_S))
    with pytest.raises(NodeUnavailable, match="MemoryError"), followers.running(Kind.LOGITS, []):
        raise MemoryError
