"""Shared fixtures, what a worker may hold, and what a run could not check."""

from __future__ import annotations

import gc
import os
import sys
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.worker_memory import give_back, memory

if TYPE_CHECKING:
    from tests.support.interpreter import Again
    from tests.support.server import Server

# Read when OpenMP is loaded. Other tests want the core on which a helper would wait for the next parallel region.
os.environ.setdefault("GOMP_SPINCOUNT", "0")

# Objects that may be made between two looks for cycles. Python looks at every 700, among all that tests have imported.
gc.set_threshold(20_000)

MIB = 1 << 20
COLLECT_AT_BYTES = 100 * MIB
WORKER_LIMIT_BYTES = 2048 * MIB  # a file of the real model takes up to 1,940, with a CUDA build of torch


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """The real model's folder, fetched and converted at the first use."""
    from paceline.models.hub import resolve_model

    return resolve_model("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def served_model() -> Iterator[Server]:
    """The deployment that ``paceline serve`` makes of the real model without further options, for clients and programs
    that take what is there."""
    from tests.support.server import serve

    with serve("--no-standby", "--kv-cache-tokens", "16384") as made:
        yield made


@pytest.fixture(scope="session")
def run_again_interpreted(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Again]:
    """Runs a file's tests in Triton's interpreter, one process of which takes them all."""
    from tests.support.interpreter import Interpreter

    interpreter = Interpreter(pytestconfig, tmp_path_factory.mktemp("interpreter") / "log")
    yield interpreter.run_again
    interpreter.end()


@pytest.fixture(autouse=True)
def one_thread_one_seed() -> None:
    """Every test starts alike: a runner that was built without ``threads`` leaves the kernels all cores. Tests of the
    parts that need no torch must not load it for this."""
    torch, build = sys.modules.get("torch"), sys.modules.get("paceline.layers.build")
    if build is not None and build.load_kernels.cache_info().currsize:
        build.set_threads(1)
    if torch is not None:
        torch.set_num_threads(1)
        if torch.cuda.is_available():
            torch.manual_seed(0)
        else:  # without the stack that torch formats for a GPU that may still come: half a millisecond
            torch.default_generator.manual_seed(0)


class WorkerMemory:
    """Keeps a worker small, and fails the test in which it grew past the limit.

    A deployment is full of reference cycles, so its weights and pages wait for Python's collector, which counts objects
    and not bytes: dozens of deployments may wait at once. glibc keeps what it is given back unless told to trim.
    """

    def __init__(self) -> None:
        self.after_collection = self.between_files = memory("RssAnon")  # bytes that a collection left
        self.told = False
        self.highest = 0  # bytes in memory at once, so far

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, object, object]:
        result = yield  # until then the test holds its fixtures
        ends_file = nextitem is None or nextitem.path != item.path  # its own fixtures are gone
        if memory("RssAnon") > (self.between_files if ends_file else self.after_collection) + COLLECT_AT_BYTES:
            give_back()
            self.after_collection = memory("RssAnon")
            if ends_file:
                self.between_files = self.after_collection
                gc.freeze()
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self) -> Generator[None, object, object]:
        """What a file imports stays: the collector would walk it again and again as it grows."""
        gc.disable()
        try:
            return (yield)
        finally:
            gc.enable()

    def pytest_collection_finish(self) -> None:
        """Modules and tests stay until the end: collections need not look at them, which took a second each."""
        gc.freeze()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self) -> Generator[None]:
        yield
        highest = memory("VmHWM")
        if highest <= self.highest:
            return  # it did not grow here, and which files it had in memory then is not known any more
        self.highest = highest
        peak = highest - memory("RssFile")  # libraries are there once for all workers
        torch = sys.modules.get("torch")
        on_gpu = torch is not None and torch.cuda.is_initialized()  # its driver alone maps gigabytes
        if peak > WORKER_LIMIT_BYTES and not self.told and not on_gpu:
            self.told = True
            limit = WORKER_LIMIT_BYTES // MIB
            pytest.fail(f"the worker grew to {peak // MIB} MiB here; the limit is {limit} MiB", pytrace=False)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(WorkerMemory())


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what tests/slow.txt names; files of the real model come first, while workers are small."""
    slow = set(Path(__file__).with_name("slow.txt").read_text().splitlines())
    for item in items:
        test = item.nodeid.partition("[")[0]
        if test in slow or test.partition("::")[0] in slow:
            item.add_marker("slow")
    large = {item.path for item in items if item.get_closest_marker("real_model")}
    items.sort(key=lambda item: item.path not in large)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Generator[None]:
    """End with one line of all that this machine lacks, from skip reasons that begin with "needs"."""
    yield
    reasons = (report.longrepr[2].removeprefix("Skipped: ") for report in terminalreporter.stats.get("skipped", []))
    lacking = Counter(reason.removeprefix("needs ") for reason in reasons if reason.startswith("needs "))
    if lacking:
        told = ", ".join(f"{what} ({count})" for what, count in sorted(lacking.items()))
        terminalreporter.write_line(f"not checked here (tests left out): {told}")
