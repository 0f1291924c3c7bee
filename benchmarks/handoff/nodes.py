"""The two processes of the hand-off benchmark: in each a node, and an end of a raw gloo pipe beside it."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing  # noqa: TID251 - pipes to its own two processes
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection  # noqa: TID251 - the same
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.thin_model import thin_runner
from decode_node.node import DecodeNode
from kv_transfer.handoff.block import TARGET_KV, RowBlock
from kv_transfer.handoff.cut import message_sizes
from kv_transfer.transports.base import Transport
from kv_transfer.transports.registry import open_transport
from kv_transfer.transports.rendezvous import torch_dist
from paceline.config import NodeConfig
from paceline.engine.fingerprint import fingerprint_of
from paceline.errors import PacelineError
from paceline.host_memory import host_zeros
from paceline.kvcache.layout import LayerOwner
from paceline.rpc.identity import Identity
from paceline.serving.loop import notify
from paceline.v1 import handoff_pb2
from prefill_node.links import LinkContext, LinkPool
from prefill_node.node import PrefillNode

Role = Literal["prefill", "decode"]

TIMEOUT_S = 30.0
START_TIMEOUT_S = 300.0  # of a node: it may have to compile kernels


class RawEnd:
    """One end of a gloo pipe of its own that copies messages as a hand-off cuts them, out of as much memory into as
    much, and does nothing else."""

    def __init__(self, transport: Transport, sends: bool) -> None:
        self._transport, self._sends = transport, sends
        self._buffer = host_zeros(0)

    def copy(self, sizes: Sequence[int]) -> float:
        """Seconds from the first byte to the last, as this end sees it."""
        move = self._transport.send if self._sends else self._transport.recv
        if self._buffer.numel() < sum(sizes):
            self._buffer = host_zeros(sum(sizes)).fill_(1)
        messages = torch.split(self._buffer[: sum(sizes)], list(sizes))
        move(torch.ones(1, dtype=torch.uint8))  # both ends are here
        began = time.perf_counter()
        for message in messages:
            move(message)
        return time.perf_counter() - began

    def close(self) -> None:
        """End the pipe."""
        self._transport.close()


@dataclass(frozen=True)
class Order:
    """To hand the first rows of a pool over."""

    ticket: str
    decode_address: str
    num_tokens: int


@dataclass(frozen=True)
class HandedOver:
    """What became of it: when the first byte left, Unix time, and the bytes of each message."""

    began_s: float
    sizes: tuple[int, ...]


class RowsNode:
    """The links of a prefill node over a pool, without an engine: rows that nobody computes beside them."""

    def __init__(self, config: NodeConfig) -> None:
        self._runner = thin_runner(config, decodes=False)
        for rows in self._runner.kv.data:
            rows.fill_(1.0)  # untouched memory would all be one page of zeros
        self._config = config
        self._sizes: list[int] = []
        self._began_s = 0.0
        self._ended: asyncio.Future[str | None] | None = None

    async def start(self) -> str:
        """An address where nobody listens: nothing is asked of it by RPC."""
        self._loop = asyncio.get_running_loop()
        context = LinkContext(
            "rows-0",
            fingerprint_of(self._runner),
            self._config,
            self._runner.kv,
            Identity("prefill"),
            self._on_ended,
            self._on_sent,
        )
        self._links = LinkPool(context)
        return "127.0.0.1:0"

    async def stop(self, grace_s: float) -> None:
        """End the links."""
        await self._links.close()

    async def hand_over(self, order: Order) -> HandedOver:
        """All target rows and a state. PacelineError when the hand-off failed."""
        link = await self._links.get(order.decode_address)
        self._sizes = []
        self._ended = self._loop.create_future()
        layers = self._runner.kv.layout.layer_range(LayerOwner.TARGET)
        tokens = range(order.num_tokens)
        link.begin(order.ticket, tokens)
        link.rows(order.ticket, RowBlock(TARGET_KV, layers, tokens), torch.arange(order.num_tokens))
        link.state(order.ticket, handoff_pb2.State(first_token_id=1), None)
        async with asyncio.timeout(TIMEOUT_S):
            failure = await self._ended
        if failure:
            raise PacelineError(f"the hand-off failed: {failure}")
        return HandedOver(self._began_s, tuple(self._sizes))

    def _on_sent(self, message: handoff_pb2.HandoffMessage, began: float) -> None:
        """On the sender's thread."""
        sizes = message_sizes(message)
        if sizes and not self._sizes:
            self._began_s = time.time() - (time.monotonic() - began)
        self._sizes.extend(sizes)

    def _on_ended(self, ticket: str, failure: str | None) -> None:
        """On a link's thread."""
        if self._ended is not None:
            notify(self._loop, self._ended.set_result, failure)


def _serve(role: Role, config: NodeConfig, computes: bool, pipe: Connection) -> None:
    torch.set_num_threads(config.threads)
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > 1:  # a node of one machine takes no time from those of another
        os.sched_setaffinity(0, {cores[0 if role == "prefill" else 1]})
    asyncio.run(_answer(role, _node(role, config, computes), pipe, config.host))


def _node(role: Role, config: NodeConfig, computes: bool) -> PrefillNode | DecodeNode | RowsNode:
    if role == "prefill":
        return PrefillNode(config, "prefill-0") if computes else RowsNode(config)
    return DecodeNode(config, "decode-0", None if computes else thin_runner(config, decodes=True))


async def _answer(role: Role, node: PrefillNode | DecodeNode | RowsNode, pipe: Connection, host: str) -> None:
    """Run a node until the pipe ends; answer what is asked through it."""
    pipe.send(await node.start())
    raw: RawEnd | None = None
    try:
        while (asked := await asyncio.to_thread(_receive, pipe)) is not None:
            verb, value = asked
            if verb == "open":
                own = torch_dist.FileStore(value)
                rank: Literal[0, 1] = 0 if role == "prefill" else 1
                transport = await asyncio.to_thread(open_transport, "gloo", own, "raw", rank, host, TIMEOUT_S)
                raw = RawEnd(transport, role == "prefill")
                pipe.send(None)
            elif verb == "hand over":
                assert isinstance(node, RowsNode)
                pipe.send(await node.hand_over(value))
            elif raw is not None:
                pipe.send(await asyncio.to_thread(raw.copy, value))
    finally:
        logging.disable(logging.WARNING)  # the links end with the processes
        if raw is not None:
            raw.close()
        await node.stop(0.0)


def _receive(pipe: Connection) -> Any:
    try:
        return pipe.recv()
    except EOFError:
        return None


class NodeProcesses:
    """A prefill and a decode node, each in a process of its own. Made, then closed. ``computes`` not: the prefill node
    is a `RowsNode`, and the model of the other is thin."""

    def __init__(self, config: NodeConfig, *, computes: bool) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: dict[Role, Connection] = {}
        self._processes = []
        for role in ("prefill", "decode"):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(role, config, computes, theirs), name=role, daemon=True)
            process.start()
            theirs.close()
            self._pipes[role] = mine
            self._processes.append(process)
        self.addresses = {role: str(self._read(role, START_TIMEOUT_S)) for role in self._pipes}
        with tempfile.TemporaryDirectory() as folder:  # both are on this machine
            self._ask_both("open", str(Path(folder) / "keys"))

    def raw_copy_s(self, sizes: Sequence[int]) -> float:
        """Seconds of a raw copy of messages of ``sizes``, as the receiving end sees it. Blocks."""
        return float(self._ask_both("copy", list(sizes))["decode"])

    def hand_over(self, order: Order) -> HandedOver:
        """See RowsNode. Blocks."""
        self._pipes["prefill"].send(("hand over", order))
        answer = self._read("prefill")
        assert isinstance(answer, HandedOver)
        return answer

    def close(self) -> None:
        """End both processes."""
        for pipe in self._pipes.values():
            pipe.close()
        for process in self._processes:
            process.join(TIMEOUT_S)
            if process.is_alive():
                process.kill()

    def _ask_both(self, verb: str, value: object) -> dict[Role, Any]:
        for pipe in self._pipes.values():
            pipe.send((verb, value))
        return {role: self._read(role) for role in self._pipes}

    def _read(self, role: Role, timeout_s: float = TIMEOUT_S) -> Any:
        pipe = self._pipes[role]
        try:
            if pipe.poll(timeout_s):
                return pipe.recv()
        except (EOFError, OSError) as error:
            raise PacelineError(f"the {role} process ended: {error!r}") from error
        raise PacelineError(f"the {role} process did not answer within {timeout_s:g} s")
