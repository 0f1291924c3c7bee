"""Nodes with different numbers of ranks, through Ray: the tokens of one rank, whichever rank is hurt."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
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
from tests.support.server import Server, operator, serve

pytestmark = [needs_kernels, pytest.mark.e2e]

STREAMS = 4
BACK_S = 90.0  # for a process to end, and for its node to serve again
NODES = ("--prefill-tp", "4", "--decode-nodes", "2", "--decode-tp", "2", "--drafter", "ngram", "--no-standby")
LOGS = ("--log-level", "debug", "--log-format", "json")
CHUNKS = ("--prefill-chunk-tokens", "16")  # a long prompt is computed and handed over in many steps
STEPS_S = 0.05  # that a rank has computed when it has run several of them
VICTIMS = (
    ("decode-0", signal.SIGKILL),
    ("decode-1", signal.SIGSTOP),
    ("prefill-0", signal.SIGSTOP),
)


@dataclass(frozen=True)
class Asked:
    """Lengths of a request, in tokens."""

    prompt: int
    text: int


SHORT, LONG = Asked(60, 300), Asked(600, 40)
BRIEF = Asked(SHORT.prompt, 40)  # the beginning of SHORT, which nobody hurts


def prompt(number: int, length: int = SHORT.prompt) -> tuple[int, ...]:
    return tuple(40 + (number + i) % 200 for i in range(length))


def of_one_rank(folder: Path, asked: Asked) -> list[tuple[int, ...]]:
    """What one process of one rank answers, without drafts."""
    runner = build_runner(NodeConfig(model=str(folder), drafter="none", kv_cache_tokens=4096))
    params = [SamplingParams(max_tokens=asked.text, temperature=1.0, seed=n, ignore_eos=True) for n in range(STREAMS)]
    requests = [SequenceRequest(str(n), prompt(n, asked.prompt), one) for n, one in enumerate(params)]
    return [outcome.token_ids for outcome in run(runner, requests, batch=STREAMS)]


async def texts(client: AsyncClient, asked: Asked, begun: asyncio.Event) -> list[tuple[int, ...]]:
    """Token ids of some streams, run together. begun: set when one of them is under way."""

    async def one(number: int) -> tuple[int, ...]:
        got: list[int] = []
        ids = prompt(number, asked.prompt)
        async with client.stream(ids, max_tokens=asked.text, temperature=1.0, seed=number, ignore_eos=True) as chunks:
            async for chunk in chunks:
                assert chunk.first_index == len(got)
                got += chunk.token_ids
                if len(got) > asked.text // 10:
                    begun.set()
        return tuple(got)

    return list(await asyncio.gather(*(one(number) for number in range(STREAMS))))


def listed(server: Server) -> dict[str, dict[str, object]]:
    """The nodes, by id, as ``paceline nodes list`` shows them."""
    done = operator("nodes", "list", "--json", "--admin", server.admin)
    assert done.returncode == 0, done.stderr
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


async def computing(process: psutil.Process) -> None:
    """Until a rank is in the midst of a prompt, whose rows cross as its layers are computed."""
    idle = process.cpu_times().user
    async with asyncio.timeout(BACK_S):
        while process.cpu_times().user < idle + STEPS_S:
            await asyncio.sleep(0.001)


async def test_the_tokens_of_one_rank_whichever_rank_is_hurt(tmp_path: Path) -> None:
    """Followers of decode in the midst of streams, one that is stopped before rows come to it, and one of prefill that
    is stopped in the midst of a hand-off. Mutants: decode nodes have the ranks of prefill nodes; a decode node, or a
    prefill node, lives on without one of its ranks; a rank outlives its node."""
    folder = write_ranked_model(tmp_path)
    expected = {asked: of_one_rank(folder, asked) for asked in (SHORT, LONG)}
    options = ("--model", str(folder), "--kv-cache-tokens", "4096", "--admin", "127.0.0.1:0")
    with serve(*options, *NODES, *CHUNKS, *LOGS) as server:
        nodes = listed(server)
        assert {name: node["ranks"] for name, node in nodes.items()} == {"prefill-0": 4, "decode-0": 2, "decode-1": 2}
        async with AsyncClient(server.grpc) as client:
            await rounds_are_logged(client, server)
            undisturbed = await texts(client, BRIEF, asyncio.Event())
            assert undisturbed == [ids[: BRIEF.text] for ids in expected[SHORT]]
            for node, hurt in VICTIMS:
                pid = int(str(listed(server)[node]["pid"]))
                victim = followers(server, pid)[-1]
                takes_no_rows = node == "decode-1"
                if takes_no_rows:
                    victim.send_signal(hurt)
                if node == "prefill-0":
                    await prefills(client, 9)
                begun, asked = asyncio.Event(), LONG if node == "prefill-0" else SHORT
                running = asyncio.create_task(texts(client, asked, begun))
                if not takes_no_rows:
                    await (computing(victim) if node == "prefill-0" else begun.wait())
                    assert begun.is_set() == (node != "prefill-0")
                    victim.send_signal(hurt)
                assert await running == expected[asked]
                await until(lambda victim=victim, pid=pid: gone(victim) and not psutil.pid_exists(pid))  # type: ignore[misc]
            await prefills(client, 100)


async def prefills(client: AsyncClient, first: int) -> None:
    """Until the prefill node serves. first: number of a prompt that no node has cached, nor those that follow."""
    async with asyncio.timeout(BACK_S):
        for number in itertools.count(first):
            done = await client.generate(prompt(number), max_tokens=1, temperature=0.0)
            if done.completion.nodes.prefill == "prefill-0":
                return
            await asyncio.sleep(0.2)
