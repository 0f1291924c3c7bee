"""Lines of the audit: whole, without keys, and bounded whoever comes from wherever."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.logs import JsonFormatter
from paceline.rpc.audit import ALL_LINES_PER_MINUTE, LINES_PER_MINUTE, MAX_CALLERS, Audit, network_of
from tests.support.api_keys import write_keys


class Told:
    """An audit, its clock, and what it is to do later."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self.now, self.later, self._caplog = 0.0, list[tuple[float, Callable[[], None]]](), caplog
        self.audit = Audit(lambda: self.now, lambda seconds, act: self.later.append((seconds, act)))

    def lines(self) -> list[str]:
        """Since they were asked for."""
        found = self._caplog.messages
        self._caplog.clear()
        return found

    def tell(self) -> str:
        """The line of a minute later."""
        ((seconds, act),) = self.later
        self.later.clear()
        self.now += seconds
        act()
        (line,) = self.lines()
        return line


def test_lines_are_whole_have_no_key_and_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    """Mutants: left out and never told; told with each line."""
    told = Told(caplog)
    for _ in range(LINES_PER_MINUTE + 5):
        told.audit.refused("10.0.0.1", "", "GET /a\nb", "no\r\nkey \u2028")
    told.audit.refused("10.0.0.2", "one", "POST /v1", "expired")
    assert all(record.name == "paceline.audit" and record.levelno >= logging.WARNING for record in caplog.records)
    assert "key=one act='POST /v1' outcome='refused: expired'" in JsonFormatter("router").format(caplog.records[-1])
    lines = told.lines()
    assert len(lines) == LINES_PER_MINUTE + 1  # another caller has lines of its own
    assert not set("".join(lines)) & set("\r\n\u2028")
    assert told.tell() == "peer=- key=- act='audit' outcome='5 lines are left out, 5 of them of 10.0.0.1'"
    told.audit.refused("10.0.0.1", "", "GET /", "no key")
    assert len(told.lines()) == 1
    assert told.later == []


@pytest.mark.parametrize("kind", ["10.{}.{}.1", "2001:db8:{:x}:{:x}::1"])
def test_a_flood_from_many_addresses(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Mutants: addresses are bounded each for itself; what was left out of one that is forgotten is not told; strangers
    take the lines of keys."""
    told, count = Told(caplog), 3 * MAX_CALLERS
    for i in range(count):
        told.audit.refused(kind.format(i // 200, i % 200), "", "GET /", "no key")
    assert len(told.lines()) == ALL_LINES_PER_MINUTE
    told.audit.refused("10.0.0.1", "one", "GET /v1", "its tenant has no trace of this id")
    assert len(told.lines()) == 1
    assert len(told.audit._left_out) <= MAX_CALLERS + 1
    assert f"outcome='{count - ALL_LINES_PER_MINUTE} lines are left out, " in told.tell()
    for _ in range(2):  # a minute later there are as many again
        for i in range(count):
            told.audit.refused(kind.format(i // 200, i % 200), "", "GET /", "no key")
        assert len(told.lines()) == ALL_LINES_PER_MINUTE
        told.tell()


def test_a_key_is_bounded_wherever_it_comes_from(caplog: pytest.LogCaptureFixture) -> None:
    """Mutant: its lines are those of its addresses."""
    told = Told(caplog)
    for i in range(100):
        told.audit.refused(f"10.0.0.{i}", "one", "GET /", "expired")
    assert len(told.lines()) == LINES_PER_MINUTE
    assert "70 lines are left out, 70 of them of key one" in told.tell()


def test_a_network_of_ipv6_is_one_address(caplog: pytest.LogCaptureFixture) -> None:
    """Mutant: each of its addresses has lines of its own."""
    told = Told(caplog)
    for i in range(100):
        told.audit.refused(f"2001:db8::{i:x}:1", "", "GET /", "no key")
    lines = told.lines()
    assert len(lines) == LINES_PER_MINUTE
    assert lines[1].startswith("peer=2001:db8::1:1 ")
    assert "70 of them of 2001:db8::/64" in told.tell()
    addresses = ("10.0.0.1", "::ffff:10.0.0.1", "::1", "fe80::1%eth0", "unix:", "")
    networks = ["10.0.0.1", "10.0.0.1", "::/64", "fe80::/64", "unix:", ""]
    assert [network_of(address) for address in addresses] == networks


async def test_what_is_left_out_is_told_by_the_event_loop(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutant: it waits for the next refusal."""
    monkeypatch.setattr("paceline.rpc.audit.TELL_S", 0.05)
    audit = Audit()
    for _ in range(LINES_PER_MINUTE + 3):
        audit.refused("10.0.0.1", "", "GET /", "no key")
    caplog.clear()
    await asyncio.sleep(0.2)
    assert ["3 lines are left out" in line for line in caplog.messages] == [True]


async def test_what_is_left_out_is_told_at_the_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Mutants: an end without it; an end that tells where nothing was left out."""
    for more in (3, 0):
        access = write_keys(tmp_path / f"{more}.yaml").access("m")
        for _ in range(LINES_PER_MINUTE + more):
            access.audit.refused("10.0.0.1", "", "GET /", "no key")
        caplog.clear()
        await access.close()
        told = [f"{more} lines are left out" in line for line in caplog.messages]
        assert told == [True] * bool(more)
