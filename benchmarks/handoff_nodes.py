"""The two processes of the hand-off benchmark: in each a node, and an end of a raw gloo pipe beside it."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, Literal

import torch

from benchmarks.thin_model import thin_runner
from decode_node.node import DecodeNode
from kv_transfer.torch_dist import TorchDistTransport, create_store, open_transport
from kv_transfer.transport import MESSAGE_BYTES
from paceline.config import NodeConfig
from paceline.errors import PacelineError
from prefill_node.node import PrefillNode

Role = Literal["prefill", "decode"]

TIMEOUT_S = 30.0
START_TIMEOUT_S = 300.0  # of a node: it may have to compile kernels
COPIED = torch.uint8


class RawEnd:
    """One end of a gloo pipe of its own that copies messages as a hand-off cuts them, and does nothing else."""

    def __init__(self, transport: TorchDistTransport, sends: bool) -> None:
        self._transport, self._sends = transport, sends
        self._buffer = torch.ones(MESSAGE_BYTES, dtype=COPIED)

    def copy(self, sizes: Sequence[int]) -> float:
        """Seconds from the first byte to the last, as this end sees it."""
        move = self._transport.send if self._sends else self._transport.recv
        move(torch.ones(1, dtype=COPIED))  # both ends are here
        began = time.perf_counter()
        for size in sizes:
            move(self._buffer[:size])
        return time.perf_counter() - began

    def close(self) -> None:
        """End the pipe."""
        self._transport.close()


def _serve(role: Role, config: NodeConfig, thin: bool, pipe: Connection) -> None:
    torch.set_num_threads(config.threads)
    runner = thin_runner(config, decodes=role == "decode") if thin else None
    make = PrefillNode if role == "prefill" else DecodeNode
    asyncio.run(_answer(role, make(config, f"{role}-0", runner), pipe, config.host))


async def _answer(role: Role, node: PrefillNode | DecodeNode, pipe: Connection, host: str) -> None:
    """Run a node until the pipe ends; answer what is asked through it."""
    pipe.send(await node.start())
    store = None
    raw: RawEnd | None = None
    try:
        while (asked := await asyncio.to_thread(_receive, pipe)) is not None:
            verb, value = asked
            if verb == "store":
                store = create_store(host, 0, True, TIMEOUT_S)
                pipe.send(store.port)
            elif verb == "open":
                own = store or create_store(host, value, False, TIMEOUT_S)
                rank: Literal[0, 1] = 0 if role == "prefill" else 1
                transport = await asyncio.to_thread(open_transport, "gloo", own, "raw", rank, host, TIMEOUT_S)
                raw = RawEnd(transport, role == "prefill")
                pipe.send(None)
            elif raw is not None:
                pipe.send(await asyncio.to_thread(raw.copy, value))
    finally:
        logging.disable(logging.WARNING)  # the links end with the processes
        if raw is not None:
            raw.close()
        await node.stop(0.0)
        if store is not None:
            store.close()


def _receive(pipe: Connection) -> Any:
    try:
        return pipe.recv()
    except EOFError:
        return None


class NodeProcesses:
    """A prefill and a decode node, each in a process of its own. Made, then closed. ``thin``: of a thin model."""

    def __init__(self, config: NodeConfig, *, thin: bool) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: dict[Role, Connection] = {}
        self._processes = []
        for role in ("prefill", "decode"):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(role, config, thin, theirs), name=role, daemon=True)
            process.start()
            theirs.close()
            self._pipes[role] = mine
            self._processes.append(process)
        self.addresses = {role: str(self._read(role, START_TIMEOUT_S)) for role in self._pipes}
        self._pipes["decode"].send(("store", None))
        port = self._read("decode")
        self._ask_both("open", port)

    def raw_copy_s(self, sizes: Sequence[int]) -> float:
        """Seconds of a raw copy of messages of ``sizes``, as the receiving end sees it. Blocks."""
        return float(self._ask_both("copy", list(sizes))["decode"])

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
