"""Nodes with different numbers of ranks, through Ray: the tokens of one rank, whichever rank is hurt."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from paceline.assembly.build import build_runner
from paceline.client import AsyncClient
from paceline.config import NodeConfig
from paceline.request import SamplingParams, SequenceRequest
from tests.support.exactness import run
from tests.support.needs import needs_kernels
from tests.support.ranked_model import write_ranked_model
from tests.support.server import Server, paceline, serve

pytestmark = [needs_kernels, pytest.mark.e2e, pytest.mark.timeout(180)]

STREAMS, TOKENS = 4, 300
BACK_S = 45.0  # for a process to end, and for its node to serve again
NODES = ("--prefill-tp", "4", "--decode-nodes", "2", "--decode-tp", "2", "--drafter", "ngram", "--no-standby")
LOGS = ("--log-level", "debug", "--log-format", "json")


def prompt(number: int) -> tuple[int, ...]:
    return tuple(range(40 + number, 100 + number))


def of_one_rank(folder: Path) -> list[tuple[int, ...]]:
    """What one process of one rank answers, without drafts."""
    runner = build_runner(NodeConfig(model=str(folder), drafter="none", kv_cache_tokens=4096))
    asked = [SamplingParams(max_tokens=TOKENS, temperature=1.0, seed=n, ignore_eos=True) for n in range(STREAMS)]
    requests = [SequenceRequest(str(n), prompt(n), params) for n, params in enumerate(asked)]
    return [outcome.token_ids for outcome in run(runner, requests, batch=STREAMS)]


async def texts(client: AsyncClient, begun: asyncio.Event) -> list[tuple[int, ...]]:
    """Token ids of some streams, run together. begun: set when one of them is under way."""

    async def one(number: int) -> tuple[int, ...]:
        got: list[int] = []
        stream = client.stream(prompt(number), max_tokens=TOKENS, temperature=1.0, seed=number, ignore_eos=True)
        async with stream as chunks:
            async for chunk in chunks:
                assert chunk.first_index == len(got)
                got += chunk.token_ids
                if len(got) > TOKENS // 10:
                    begun.set()
        return tuple(got)

    return list(await asyncio.gather(*(one(number) for number in range(STREAMS))))


def listed(server: Server) -> dict[str, dict[str, object]]:
    """The nodes, by id, as ``paceline nodes list`` shows them."""
    command = [paceline(), "nodes", "list", "--json", "--admin", server.admin]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return {node["node_id"]: node for node in json.loads(done.stdout)}


def followers(server: Server, pid: int) -> list[psutil.Process]:
    """Those of the node whose rank 0 is process ``pid``."""
    found = [process for process in server.processes() if process.ppid() == pid]
    return [process for process in found if "paceline.ranks.process" in process.cmdline()]


def entries(server: Server) -> list[dict[str, Any]]:
    """The JSON lines that the deployment has logged so far."""
    return [json.loads(line) for line in server.log.read_text().splitlines() if line.startswith("{")]


async def rounds_are_logged(client: AsyncClient, server: Server) -> None:
    """The log options reach every process, and the logs and counts of nodes the router."""
    done = (await client.generate(prompt(9), max_tokens=8, temperature=0.0, ignore_eos=True)).completion

    def rounds() -> list[dict[str, Any]]:
        return [entry for entry in entries(server) if " round " in entry["message"]]

    await until(lambda: len(rounds()) == done.speculation.rounds)
    assert {(entry["node"], entry["level"]) for entry in rounds()} == {(done.nodes.decode, "debug")}
    assert " round 1: ngram drafted " in rounds()[0]["message"]
    assert {"router", "prefill-0", "decode-0", "decode-1"} <= {entry["node"] for entry in entries(server)}
    copied = r'paceline_node_copy_rounds_total\{drafter="ngram",node="decode-\d",result="\w+"\} ([\d.]+)'

    def counted() -> float:
        return sum(map(float, re.findall(copied, httpx.get(f"http://{server.http}/metrics").text)))

    await until(lambda: counted() >= len(rounds()) - 1)  # the last round may have had no room for a draft
    assert counted() <= len(rounds())


async def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + BACK_S
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        await asyncio.sleep(0.1)


def gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


async def test_the_tokens_of_one_rank_whichever_rank_is_hurt(tmp_path: Path) -> None:
    """Mutants: decode nodes have the ranks of prefill nodes; a node lives on without one of its ranks; a rank outlives
    its node."""
    folder = write_ranked_model(tmp_path)
    expected = of_one_rank(folder)
    with serve("--model", str(folder), "--kv-cache-tokens", "4096", "--admin", "127.0.0.1:0", *NODES, *LOGS) as server:
        nodes = listed(server)
        assert {name: node["ranks"] for name, node in nodes.items()} == {"prefill-0": 4, "decode-0": 2, "decode-1": 2}
        async with AsyncClient(server.grpc) as client:
            await rounds_are_logged(client, server)
            assert await texts(client, asyncio.Event()) == expected
            for number, hurt in enumerate((signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM)):
                in_hand_off = hurt == signal.SIGSTOP  # rows come to a rank that takes none
                pid = int(str(listed(server)[f"decode-{number % 2}"]["pid"]))
                (victim,) = followers(server, pid)
                if in_hand_off:
                    victim.send_signal(hurt)
                begun = asyncio.Event()
                running = asyncio.create_task(texts(client, begun))
                if not in_hand_off:
                    await begun.wait()
                    victim.send_signal(hurt)
                assert await running == expected
                await until(lambda victim=victim, pid=pid: gone(victim) and not psutil.pid_exists(pid))  # type: ignore[misc]
