"""To which faults a pause of a stream is counted."""

from __future__ import annotations

from tests.chaos.faults import Fault
from tests.chaos.report import Hit, had_spare


def hit(fault: Fault, since: float, gap_s: float, request_id: str = "one", choice: int = 0) -> Hit:
    return Hit(fault, request_id, "greedy", choice, since, gap_s, "")


def test_a_pause_had_a_spare_only_if_every_fault_that_claims_it_left_one() -> None:
    stop = Fault("stop", ("decode-1",), True, at=10.0, until=19.0)
    cut = Fault("cut off", ("decode-1",), False, at=19.1, until=22.0)  # while decode-0 is gone
    before, after = hit(stop, 11.0, 1.5), hit(stop, 19.2, 3.5)
    claims = [before, after, hit(cut, 19.3, 3.4)]
    assert had_spare(before, claims)
    assert not had_spare(after, claims)
    assert had_spare(after, [after, hit(cut, 19.3, 3.4, request_id="two"), hit(cut, 19.3, 3.4, choice=1)])
    assert had_spare(after, [after, hit(cut, 22.7, 3.0)])  # begins where it ends
    assert had_spare(after, [after, hit(cut, 11.0, 1.5)])  # was over before
