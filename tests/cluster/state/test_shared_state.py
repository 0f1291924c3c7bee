"""What builds share in one deployment does not change without a word."""

from __future__ import annotations

from tests.support.shared_state import changes


def test_what_routers_of_two_builds_share_is_as_it_was_kept() -> None:
    """When this fails, a router of the last release and one of this build read each other's state or nodes otherwise.

    Where that would be wrong, or a request of one would be refused by the other, raise ``SHARED_STATE`` in
    cluster/state/published.py: the builds then do not serve together. Then, or where both read it as they should, keep
    it by ``python -m tests.support.shared_state --write``. Mutants: another script, message, field or default.
    """
    assert changes() == []
