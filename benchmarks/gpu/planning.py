"""Host time of planning a round: ``python -m benchmarks.gpu.planning``.

A round of B sequences drafts K tokens in one captured loop, verifies K + 1 rows of each and digests as many. What is
measured is all that the host does to put these batches in: rows, page lists, lengths, and the copies to the device. On
a GPU with FlashInfer its own planner is part of it. Elsewhere there is no planner, and copies stay on the host.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from rich.console import Console

from paceline.attention.base import Segment, StaticShape
from paceline.attention.flashinfer import FlashInferAttention
from paceline.attention.padding import Scratch
from paceline.attention.placed import ResidentTables
from paceline.kvcache.layout import KvLayer, KvLayout, LayerKind, LayerOwner
from paceline.kvcache.pool import KvPool
from paceline.models.static_forward import Room, StaticForward
from paceline.spec_decode.drafters.head_graphs import ChainRequest, ChainSteps, HeadAt

PAGE_SIZE, HEADS, KV_HEADS, DIM = 16, 32, 8, 128
ACCEPTED = 2  # tokens that a round commits
ROUNDS, WARM_UP = 60, 8


class Round:
    """The static forwards of one round of ``batch`` sequences of about ``context`` tokens."""

    def __init__(self, batch: int, context: int, drafts: int, device: torch.device) -> None:
        self.batch, self.drafts = batch, drafts
        self.lens = [context + i % PAGE_SIZE for i in range(batch)]  # they meet page borders in different rounds
        longest = context + PAGE_SIZE + ACCEPTED * (ROUNDS + WARM_UP) + drafts + 1
        pages = -(-longest // PAGE_SIZE)
        layout = KvLayout((KvLayer(LayerKind.GQA, LayerOwner.TARGET, KV_HEADS, DIM),), torch.bfloat16)
        kv = KvPool(layout, batch * pages + 1, PAGE_SIZE, device)
        scratch = Scratch(batch * pages, PAGE_SIZE)
        room = Room(kv, scratch, ResidentTables(batch, longest, scratch, device))
        order = torch.randperm(batch * pages, generator=torch.Generator().manual_seed(0)).to(torch.int32)
        within = torch.arange(PAGE_SIZE, dtype=torch.int32)
        # One for all, as each has a workspace. Without a GPU it plans and computes nothing.
        self._attention = FlashInferAttention(
            device, DIM, None if device.type == "cuda" else cast("Any", SimpleNamespace())
        )
        self.slots = [(own[:, None] * PAGE_SIZE + within).view(-1) for own in order.view(batch, pages)]
        self.forwards = [self._forward(room, drafts + 1, longest) for _ in range(2 if drafts else 1)]
        self.chain: ChainSteps | None = None
        if drafts > 1:
            head = cast("Any", SimpleNamespace(hidden_size=DIM))  # planning asks for its width alone
            at = HeadAt(head, 1000, torch.bfloat16, self._attention, room, longest)
            self.chain = ChainSteps.make(at, batch, drafts, True)
        self._first = torch.zeros(batch, dtype=torch.int64, device=device)
        self._hidden = torch.zeros(batch, DIM, dtype=torch.bfloat16, device=device)

    def _forward(self, room: Room, rows: int, longest: int) -> StaticForward:
        made = StaticForward.make(StaticShape(self.batch, rows, False, longest), self._attention, room)
        assert made is not None
        if room.kv.device.type == "cuda":  # the first layer's call plans for the first time
            query = torch.zeros(self.batch * rows, HEADS, DIM, dtype=torch.bfloat16, device=room.kv.device)
            made.derive()
            self._attention.attend(query, room.kv, 0, made.context.plan, DIM**-0.5)
        return made

    def plan(self) -> float:
        """One round's planning, in seconds of the host; the sequences grow."""
        began = time.perf_counter()
        if self.chain is not None:
            asked = [ChainRequest(s, n, self.drafts, 0, 0.0) for s, n in zip(self.slots, self.lens, strict=True)]
            self.chain.fill(asked, self._first, self._hidden)
        tokens = [0] * (self.drafts + 1)
        for forward in self.forwards:
            forward.fill([Segment.linear(tokens, n, s) for s, n in zip(self.slots, self.lens, strict=True)])
        took = time.perf_counter() - began
        self.lens = [n + ACCEPTED for n in self.lens]
        return took


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.planning", description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--drafts", type=int, default=4, help="K, tokens that a round drafts; 0: plain decoding")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 64, 256])
    given = parser.parse_args(arguments)
    console = Console(no_color=True, highlight=False)
    for batch in given.batches:
        round_ = Round(batch, given.context, given.drafts, torch.device(given.device))
        took = [round_.plan() for _ in range(ROUNDS + WARM_UP)][WARM_UP:]
        low, high = (1e3 * float(np.percentile(took, q)) for q in (10, 90))
        median = 1e3 * statistics.median(took)
        console.print(f"B={batch:<4} K={given.drafts}  {median:.3f} ms a round  (p10 {low:.3f}, p90 {high:.3f})")


if __name__ == "__main__":
    main()
