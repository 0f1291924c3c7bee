"""The router copies what nodes on its host log, whole lines, as long as there is something to copy."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from cluster.nodes import node_logs
from cluster.nodes.node_logs import POLL_S, NodeLogs
from cluster.state.registry_types import NodeRecord


def record(log: Path, name: str = "decode-0", generation: int = 1) -> NodeRecord:
    return NodeRecord(name, name.partition("-")[0], generation, "h:1", pid=7, hostname="host", log=str(log))


def append(path: Path, text: str) -> Path:
    with path.open("a") as file:
        file.write(text)
    return path


async def test_whole_lines_are_copied_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = append(tmp_path / "err", ":job_id:01\n:actor_name:NodeHost\nfirst\nsec")
    logs = NodeLogs()
    logs.follow([record(path)])
    assert capsys.readouterr().err == "first\n"
    append(path, "ond\nthi")
    await asyncio.sleep(3 * POLL_S)
    assert capsys.readouterr().err == "second\n"
    append(path, "rd\n")
    logs.close()
    assert capsys.readouterr().err == "third\n"


async def test_last_words_of_a_node_that_is_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = append(tmp_path / "1", "old\n"), append(tmp_path / "2", "new\n")
    logs = NodeLogs()
    logs.follow([record(old)])
    append(old, "last\n")
    logs.follow([record(new, generation=2)])
    assert capsys.readouterr().err == "old\nlast\nnew\n"
    append(old, "from a dead node\n")
    logs.close()
    assert capsys.readouterr().err == ""


async def test_a_node_that_comes_back_is_not_copied_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = append(tmp_path / "err", "first\n")
    logs = NodeLogs()
    logs.follow([record(path)])
    logs.follow([])
    append(path, "without a lease\n")
    assert capsys.readouterr().err == "first\n"
    logs.follow([record(path)])
    logs.close()
    assert capsys.readouterr().err == "without a lease\n"


async def test_the_places_of_lost_nodes_are_bounded(tmp_path: Path) -> None:
    logs = NodeLogs()
    for i in range(node_logs.MAX_LEFT + 3):
        logs.follow([record(append(tmp_path / str(i), "line\n"))])
    logs.close()
    assert len(logs._left) == node_logs.MAX_LEFT


async def test_a_file_elsewhere_is_named_and_not_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    logs = NodeLogs()
    with caplog.at_level(logging.INFO, logger=node_logs.__name__):
        for _ in range(2):
            logs.follow([record(tmp_path / "elsewhere")])
    assert [entry.getMessage() for entry in caplog.records] == [
        f"decode-0 is process 7 and logs to host:{tmp_path}/elsewhere"
    ]
    append(tmp_path / "elsewhere", "another's\n")
    logs.close()
    assert capsys.readouterr().err == ""


async def test_its_own_log_is_not_copied_to_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = append(tmp_path / "err", "line\n")
    monkeypatch.setattr(node_logs, "stderr_file", lambda: str(path))
    logs = NodeLogs()
    logs.follow([record(path)])
    logs.close()
    assert capsys.readouterr().err == ""
