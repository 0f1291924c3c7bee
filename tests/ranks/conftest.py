"""``OMP_NUM_THREADS=1 pytest tests/ranks --whole`` runs every combination of ``cases`` marks, where others run few."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

import pytest

from tests.support.exactness import Outcome
from tests.support.ranks_matrix import OneRank

DIFFERS, ROWS = "logit rows that differ", "logit rows"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("ranks").addoption(
        "--whole", action="store_true", help="the whole matrix of nodes of several ranks"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    whole = metafunc.config.getoption("whole", default=False)
    for mark in metafunc.definition.iter_markers("cases"):
        names, few, every = mark.args
        metafunc.parametrize(names, every if whole else few, **mark.kwargs)


@pytest.fixture(scope="session")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> OneRank:
    return OneRank(tmp_path_factory.mktemp("drafters"))


@pytest.fixture
def same_rows(record_property: Callable[[str, object], None]) -> Callable[[Sequence[object], Sequence[object]], None]:
    """Compares logit rows, or digests of them, with those of one rank, and counts them for the last line of a run."""

    def check(got: Sequence[object], expected: Sequence[object]) -> None:
        differ = sum(one != other for one, other in zip(got, expected, strict=True))
        record_property(ROWS, len(expected))
        record_property(DIFFERS, differ)
        assert differ == 0, f"{differ} of {len(expected)} logit rows are not those of one rank"

    return check


@pytest.fixture
def same_outcomes(same_rows: Callable[[Sequence[object], Sequence[object]], None]) -> Callable[..., bool]:
    """Whether logit bits, tokens and accepted drafts of requests are those of one rank. It fails itself with tokens or
    bits that differ, to say which or how many."""

    def same(got: Sequence[Outcome], expected: Sequence[Outcome]) -> bool:
        assert [outcome.token_ids for outcome in got] == [outcome.token_ids for outcome in expected]
        same_rows(*([bits for outcome in side for bits in outcome.logit_bits] for side in (got, expected)))
        return list(got) == list(expected)

    return same


@pytest.hookimpl(wrapper=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Generator[None]:
    yield
    if terminalreporter.config.getoption("whole", default=False):
        called = [
            report
            for reports in terminalreporter.stats.values()
            for report in reports
            if isinstance(report, pytest.TestReport) and report.when == "call"
        ]
        told = [pair for report in called for pair in report.user_properties]
        rows, differ = (sum(int(str(count)) for name, count in told if name == what) for what in (ROWS, DIFFERS))
        terminalreporter.write_line(f"{len(called)} cases, {rows} logit rows compared, {differ} differ in a bit")
