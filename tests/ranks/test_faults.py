"""A follower that fails, goes or is out of step ends the step of rank 0 with one error, and nothing waits on."""

from __future__ import annotations

import time

import pytest

from paceline.errors import NodeUnavailable
from paceline.ranks.channel import Frame, Kind
from paceline.ranks.follower import Follower
from paceline.ranks.group import Group
from paceline.ranks.leader import Followers
from tests.support import thread_ranks
from tests.support.exactness import run
from tests.support.needs import needs_kernels
from tests.support.thread_ranks import ranks_runner, ranks_spec
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
        Follower._run(self, Frame(Kind.EMBED, frame.number, bytearray(b"\x08" + bytes(15))))


@pytest.mark.parametrize(
    ("follower", "said"), [(Raises, "no memory"), (Ends, "gone"), (Skips, "silent"), (RunsAnother, "step")]
)
def test_one_clear_error(follower: type[Faulty], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_ranks, "TIMEOUT_S", TIMEOUT_S)
    runner = ranks_runner(4, ranks_spec(), "fp32", follower, drafter="none", prefix_cache=False)
    assert runner.alive()
    began = time.monotonic()
    with pytest.raises(NodeUnavailable, match=f"ranks of this node are lost.*{said}"):
        run(runner, [tiny_request()])
    assert not runner.alive()
    with pytest.raises(NodeUnavailable, match="ranks of this node are lost"):  # at once, from then on
        runner.kv.gather(range(2), runner.kv.data[0].new_zeros(1).long())
    runner.close()
    assert time.monotonic() - began < TIMEOUT_S + 1.0


def test_an_error_without_a_text_has_its_name() -> None:
    followers = Followers([], [], [], Group(0, 1, [], TIMEOUT_S))
    with pytest.raises(NodeUnavailable, match="MemoryError"), followers.running(Kind.LOGITS, []):
        raise MemoryError
