"""Runs test files side by side, each in a worker that imports it when it takes it: ``-p tests.support.side_by_side``.

A worker is a pytest of its own; the one that started it reports what it tells. Workers that import every file before
the first test, as those of pytest-xdist do, take half a minute and 400 MiB each for it.
"""

from __future__ import annotations

import os
import pickle
import queue
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import pytest

from tests.support.worker_memory import memory

TOGETHER = (  # one worker takes them all
    ("tests/fuzz/",),  # they share one deployment
    ("tests/clients/", "tests/examples/"),  # so do these
    ("tests/e2e/test_disaggregated_matrix.py", "tests/engine/test_exactness_matrix.py"),  # and these a loaded target
    (  # and these transformers, whose import takes seconds
        "tests/models/quantization/test_gguf_",
        "tests/models/quantization/test_smooth.py",
        "tests/models/test_deepseek_parity.py",
        "tests/models/test_mimo.py",
        "tests/models/test_model_spec.py",
        "tests/models/test_moe_parity.py",
        "tests/models/test_rope_configs.py",
        "tests/models/test_window_parity.py",
        "tests/models/test_wrapped.py",
        "tests/parsing/test_call_grammar.py",
        "tests/spec_decode/heads/test_eagle_heads.py",
        "tests/text/test_forging.py",
        "tests/text/test_tekken.py",
        "tests/text/test_tool_templates.py",
    ),
    (  # and these a process with Triton's interpreter
        "tests/assembly/test_warm.py",
        "tests/attention/test_flashinfer_rest.py",
        "tests/attention/test_placed.py",
        "tests/attention/test_triton_attention.py",
        "tests/kvcache/test_device_pages.py",
        "tests/layers/test_exact_products.py",
        "tests/layers/test_ops_triton.py",
        "tests/sampling/test_device_sampling.py",
        "tests/spec_decode/accept/test_device_walk.py",
    ),
)
FIRST = (  # these take longest and mostly wait
    "tests/e2e/test_ranks.py",
    "tests/e2e/test_redis_and_routers.py",
    "tests/e2e/test_role_switch.py",
    "tests/e2e/test_takeover.py",
)
FAILED, NOTHING_RAN = 1, 5  # exit codes of pytest
FROM_THE_END = 2  # workers that take the short files, which compute while whole deployments wait
# A worker that holds so much after a file makes room for a new one. Another file of the real model may follow one: the
# largest adds 1,511 MiB to what its worker begins with, which is 180 MiB, or 325 with a CUDA build of torch.
RETIRES_AT_BYTES, AFTER_REAL_MODEL_BYTES = 1 << 30, 352 << 20
TAIL = 4000  # characters of a dead worker's output that are shown

Unit = list[str]  # files that one worker runs one after another, relative to the root


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("side by side")
    group.addoption("--workers", type=int, default=0, help="run test files in this many workers")
    group.addoption("--worker", default="", help="descriptors by which a worker is spoken to; workers are given them")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("worker"):
        asked, told = map(int, config.getoption("worker").split(":"))
        config.pluginmanager.register(Worker(asked, told))
    elif config.getoption("workers"):
        config.pluginmanager.register(Workers(config))


class Worker:
    """Runs the units that it is asked for, and tells of every report."""

    def __init__(self, asked: int, told: int) -> None:
        for descriptor in (asked, told):
            os.set_inheritable(descriptor, False)  # what a test leaves running must not keep them open
        self._asked, self._told = os.fdopen(asked, "rb"), os.fdopen(told, "wb")
        self._children: dict[pytest.Collector, Sequence[pytest.Item | pytest.Collector]] = {}

    def pytest_collection(self) -> bool:
        """Nothing yet."""
        return True

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        with suppress(EOFError):
            while True:
                unit = pickle.load(self._asked)
                most = AFTER_REAL_MODEL_BYTES if of_real_model(unit) else RETIRES_AT_BYTES
                self._run(session, unit)
                goes_on = memory("RssAnon") < most
                send(self._told, goes_on)
                if not goes_on:
                    break
        return True

    def _run(self, session: pytest.Session, unit: Unit) -> None:
        hook, config = session.config.hook, session.config
        items = [item for name in unit for item in session.genitems(self._module(session, Path(name)))]
        hook.pytest_collection_modifyitems(session=session, config=config, items=items)
        session.items = items
        session.testscollected += len(items)
        hook.pytest_collection_finish(session=session)
        for item, following in zip(items, [*items[1:], None], strict=False):
            hook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.shouldfail:
                return

    def _module(self, session: pytest.Session, name: Path) -> pytest.Item | pytest.Collector:
        """The node of a file. Folders on the way are looked into once: fixtures belong to their nodes."""
        node: pytest.Item | pytest.Collector = session
        for part in [*reversed(name.parents), name]:
            path = session.path / part
            assert isinstance(node, pytest.Collector)
            node = next(child for child in self._below(node, path) if child.path == path)
        return node

    def _below(self, node: pytest.Collector, path: Path) -> Sequence[pytest.Item | pytest.Collector]:
        if node not in self._children:
            if isinstance(node, pytest.Session):
                self._children[node] = [node.ihook.pytest_collect_directory(path=path, parent=node)]
            else:
                report = node.ihook.pytest_make_collect_report(collector=node)
                assert report.passed, str(report.longrepr)
                self._children[node] = report.result
        return self._children[node]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._tell(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if not report.passed:
            self._tell(report)

    def _tell(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        send(self._told, data)

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self._config = session.config


class Workers:
    """Starts the workers, gives them units, and reports what they tell."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._units = deque(units(config))
        self._heard: queue.Queue[pytest.TestReport | pytest.CollectReport | None] = queue.Queue()

    def pytest_collection(self) -> bool:
        """Workers do."""
        return True

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        count = self._config.getoption("workers")
        for number in range(count):
            threading.Thread(target=self._feed, args=(number,), daemon=True).start()
        while count:
            report = self._heard.get()
            if report is None:
                count -= 1
            elif isinstance(report, pytest.TestReport):
                session.testscollected += report.when == "teardown"
                self._config.hook.pytest_runtest_logreport(report=report)
            else:
                self._config.hook.pytest_collectreport(report=report)
            if session.shouldfail:
                self._units.clear()
        return True

    def _feed(self, number: int) -> None:
        """Runs in a thread for each worker. One that ended has a successor."""
        log = Path(self._config.rootpath, ".pytest_cache", f"worker-{number}.log")
        log.parent.mkdir(exist_ok=True)
        try:
            while self._units:
                self._feed_one(number, log)
        finally:
            self._heard.put(None)

    def _feed_one(self, number: int, log: Path) -> None:
        """Until nothing is left, or it retires or dies."""
        unit, died = Unit(), False
        # Without files: pytest forgets the conftest.py of those that it was started with after the first of them.
        given = [str(word) for word in self._config.invocation_params.args]
        words = [word for word in given if word not in self._config.args]
        words += ["-o", f"cache_dir=.pytest_cache/worker-{number}"]
        with log.open("w") as output, started(words, output) as fed:
            try:
                while fed.goes_on and (taken := self._take(number)):
                    unit = taken
                    for data in fed.run(unit):
                        self._report(fed, data)
            except (EOFError, BrokenPipeError):
                died = True
        if died or fed.ended_otherwise():
            why = f"a worker ended with {fed.process.returncode}: {log.read_text()[-TAIL:]}"
            for name in unit:
                self._heard.put(pytest.TestReport(name, (name, None, name), {}, "failed", why, "call"))

    def _take(self, number: int) -> Unit:
        try:
            return self._units.pop() if 0 < number <= FROM_THE_END else self._units.popleft()
        except IndexError:
            return []

    def _report(self, fed: Fed, data: dict[str, Any]) -> None:
        report = self._config.hook.pytest_report_from_serializable(config=self._config, data=data)
        fed.failed |= report.failed
        self._heard.put(report)


@dataclass
class Fed:
    """A worker as its parent sees it. failed: whether something in it failed. goes_on: it takes another unit."""

    process: subprocess.Popen[bytes]
    asked: BinaryIO
    told: BinaryIO
    failed: bool = False
    goes_on: bool = True

    def run(self, unit: Unit) -> Iterator[dict[str, Any]]:
        """Reports, as dictionaries. Raises EOFError or BrokenPipeError when it dies."""
        send(self.asked, unit)
        while isinstance(data := pickle.load(self.told), dict):
            yield data
        self.goes_on = data

    def ended_otherwise(self) -> bool:
        """Whether its exit code, which its last steps may change, is not what its reports say."""
        return self.process.returncode not in ((FAILED,) if self.failed else (0, NOTHING_RAN))


@contextmanager
def started(words: Sequence[str], output: TextIO) -> Iterator[Fed]:
    """A worker with these arguments, which ends when nothing more is asked."""
    (asked, asks), (tells, told) = os.pipe(), os.pipe()
    command = [sys.executable, "-m", "pytest", *words, "--worker", f"{asked}:{told}"]
    process = subprocess.Popen(command, stdout=output, stderr=output, pass_fds=(asked, told))
    for descriptor in (asked, told):
        os.close(descriptor)
    with process, os.fdopen(tells, "rb") as hears, os.fdopen(asks, "wb", 0) as says:
        yield Fed(process, says, hears)


def send(file: BinaryIO, message: object) -> None:
    """It is there when this returns."""
    file.write(pickle.dumps(message))
    file.flush()


def units(config: pytest.Config) -> list[Unit]:
    """The arguments' files: FIRST, then those of the real model, while workers are small, then other deployments, then
    others that start processes, then short ones."""
    left_out = [Path(path).resolve() for path in config.getoption("ignore") or ()]
    found: dict[str | tuple[str, ...], Unit] = {}
    for argument in config.args:
        path = Path(argument).resolve()
        if not path.exists():
            raise pytest.UsageError(f"{argument}: workers take folders and files")
        for file in sorted(path.rglob("test_*.py")) if path.is_dir() else [path]:
            if not any(file.is_relative_to(other) for other in left_out):
                name = file.relative_to(config.rootpath).as_posix()
                unit = next((group for group in TOGETHER if name.startswith(group)), name)
                found.setdefault(unit, []).append(name)
    return sorted(found.values(), key=_late)


def _late(unit: Unit) -> tuple[bool, ...]:
    text = _text(unit)
    starts_processes = "subprocess" in text or "run_again_interpreted" in text
    return (
        unit[0] not in FIRST,
        not of_real_model(unit),
        "mark.e2e" not in text and len(unit) == 1,
        not starts_processes,
    )


def of_real_model(unit: Unit) -> bool:
    """Whether tests in it load one."""
    return "mark.real_model" in _text(unit)


def _text(unit: Unit) -> str:
    return "".join(Path(name).read_text() for name in unit)
