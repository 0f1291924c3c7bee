"""Lanes that break, change bytes or stall end what they must, in time, and nothing else.

Mutants that fail here: nobody looks at a lane's checksum; one that does not hold ends its link; a link that ends takes
the other links of its followers with it; a silent follower is waited for; rows of ranks that were lost are sent.
"""

from __future__ import annotations

import threading
import time

import pytest
import torch

from kv_transfer.lanes import leader
from kv_transfer.lanes.ends import LaneEnds
from kv_transfer.transports.base import Pending
from paceline.errors import NodeUnavailable
from paceline.kvcache.layout import KvLayout
from paceline.ranks.sockets import SocketGroup
from tests.kv_transfer.layout.sharded import random_rows
from tests.support.laned_link import laned_link
from tests.support.laned_rows import MODELS, TOTAL, check_landed, fill_source, send

torch.set_num_threads(1)


@pytest.mark.parametrize("side", [0, 1])
def test_a_lane_that_breaks_fails_the_hand_offs_of_its_link_in_time(side: int) -> None:
    """The transports of a follower are cut in the midst: both ends are told, and no page is written any more."""
    spec, layers = MODELS["2 heads"]
    rows = random_rows(KvLayout(layers, torch.bfloat16), TOTAL, 3)
    with laned_link(spec, layers, (2, 2), timeout_s=1.0) as link:
        fill_source(link, rows, 2)
        send(link, "t", range(TOTAL), upto=20)
        link.nodes[side].followers.lanes[0].end(link.lanes[side]._link)
        send(link, "u", range(TOTAL))
        began = time.monotonic()
        assert link.landing.outcome("t") != "ready"
        for ticket in ("t", "u"):
            link.wait_ended(ticket)
        assert time.monotonic() - began < 4
        assert not link.nodes[side].broken
        assert not link.nodes[side].followers.failure  # the node goes on
        assert not link.receiver.alive
        assert "ready" not in link.landing.outcomes.values()


def test_a_lane_that_breaks_leaves_the_other_links_of_a_decode_node() -> None:
    """Two prefill nodes send into the same ranks; the lanes of one are cut."""
    spec, layers = MODELS["2 heads"]
    rows = random_rows(KvLayout(layers, torch.bfloat16), TOTAL, 3)
    with (
        laned_link(spec, layers, (2, 2), timeout_s=1.0) as hurt,
        laned_link(spec, layers, (2, 2), timeout_s=1.0, into=hurt.nodes[1]) as whole,
    ):
        for link, ticket in ((hurt, "hurt"), (whole, "whole")):
            fill_source(link, rows, 2)
            send(link, ticket, range(TOTAL), upto=20)
        hurt.nodes[0].followers.lanes[0].end(hurt.lanes[0]._link)
        send(hurt, "late", range(TOTAL))
        assert hurt.landing.outcome("hurt") != "ready"
        send(whole, "t", range(TOTAL))
        assert whole.landing.outcome("t") == "ready"
        assert whole.receiver.alive
        check_landed(whole, rows, 2, range(TOTAL))


def test_a_byte_that_changes_on_a_lane_fails_its_hand_off_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, layers = MODELS["2 heads"]
    rows = random_rows(KvLayout(layers, torch.bfloat16), TOTAL, 3)
    hit: list[int] = []

    def send_changed(ends: LaneEnds, number: int, layers: range, count: int) -> Pending:
        for lane in ends._lanes:
            if lane.rows.plan.source.rank == 1 and not hit:
                hit.append(number)
                lane.message(number, layers, count)[3] ^= 1
        return send_whole(ends, number, layers, count)

    send_whole = LaneEnds.send
    with laned_link(spec, layers, (2, 2), checksums=True) as link:
        fill_source(link, rows, 2)
        send(link, "before", range(TOTAL))
        assert link.landing.outcome("before") == "ready"
        monkeypatch.setattr(LaneEnds, "send", send_changed)
        send(link, "hurt", range(TOTAL))
        send(link, "after", range(TOTAL))
        assert "rank 1: checksum of 7 rows from rank 1 for rank 1" in link.landing.outcome("hurt")
        assert link.landing.outcome("after") == "ready"
        assert link.receiver.alive
        check_landed(link, rows, 2, range(TOTAL))


def test_a_silent_follower_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is alive and says nothing, in the midst of a hand-off."""
    monkeypatch.setattr(leader, "RANK_TIMEOUT_S", 0.3)
    spec, layers = MODELS["2 heads"]
    rows = random_rows(KvLayout(layers, torch.bfloat16), TOTAL, 3)
    goes_on = threading.Event()

    def silent(number: int) -> None:
        assert goes_on.wait(10)

    with laned_link(spec, layers, (2, 1), ran=(silent, silent), timeout_s=0.4) as link:
        fill_source(link, rows, 2)
        began = time.monotonic()
        send(link, "t", range(TOTAL))
        link.wait_ended("t")
        assert link.landing.outcome("t") != "ready"
        assert time.monotonic() - began < 3
        assert "does not answer about its lanes" in link.nodes[0].followers.failure
        goes_on.set()


def test_a_follower_that_is_gone_ends_the_wait_at_once() -> None:
    spec, layers = MODELS["2 heads"]
    rows = random_rows(KvLayout(layers, torch.bfloat16), TOTAL, 3)
    with laned_link(spec, layers, (2, 1)) as link:
        fill_source(link, rows, 2)
        link.nodes[0].ends[0].shut()
        began = time.monotonic()
        send(link, "t", range(TOTAL))
        link.wait_ended("t")
        assert time.monotonic() - began < 2
        assert "ranks of this node are lost" in link.nodes[0].followers.failure


def test_rows_of_ranks_that_were_lost_are_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """An aborted collective ends as one that was right, with undefined data: the group says so afterwards."""
    spec, layers = MODELS["2 heads"]

    def finish(group: SocketGroup) -> None:
        raise NodeUnavailable("the ranks have ended")

    with laned_link(spec, layers, (2, 1)) as link:
        monkeypatch.setattr(SocketGroup, "finish", finish)
        send(link, "t", range(TOTAL))
        link.wait_ended("t")
        assert link.landing.outcome("t") != "ready"
        assert "the ranks have ended" in link.nodes[0].followers.failure
