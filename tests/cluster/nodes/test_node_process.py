"""A node whose Ray is lost is known by the process that listens at its address."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import psutil
import pytest

from cluster.nodes.node_process import NodeProcess
from cluster.state.registry_types import NodeRecord
from paceline.rpc.identity import Identity

LISTENS = (
    "import socket, time; s = socket.create_server(('127.0.0.1', 0)); "
    "print(s.getsockname()[1], flush=True); time.sleep(60)"
)


@pytest.fixture
def node() -> Iterator[tuple[psutil.Process, NodeRecord]]:
    with subprocess.Popen([sys.executable, "-c", LISTENS], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        address = f"127.0.0.1:{int(child.stdout.readline())}"
        yield (
            psutil.Process(child.pid),
            NodeRecord("decode-0", "decode", 1, address, pid=child.pid, hostname=socket.gethostname()),
        )
        child.kill()


def test_the_process_that_listens_there_is_watched_and_ended(node: tuple[psutil.Process, NodeRecord]) -> None:
    process, record = node
    known = NodeProcess(record, Identity("router"))
    assert known.pid == process.pid
    assert not known.died()
    known.kill()
    process.wait(5)
    assert known.died()


def test_a_record_that_names_another_process_ends_none(node: tuple[psutil.Process, NodeRecord]) -> None:
    """Mutant: the record's word is taken."""
    process, record = node
    with socket.create_server(("127.0.0.1", 0)) as elsewhere:
        moved = replace(record, address=f"127.0.0.1:{elsewhere.getsockname()[1]}")
        known = NodeProcess(moved, Identity("router"))
    assert known.died()
    known.kill()
    assert process.is_running()


def test_a_process_of_another_host_is_left_to_its_fence(node: tuple[psutil.Process, NodeRecord]) -> None:
    process, record = node
    known = NodeProcess(replace(record, hostname="elsewhere"), Identity("router"))
    assert (known.pid, known.died()) == (0, False)
    known.kill()
    assert process.is_running()
