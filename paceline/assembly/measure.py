"""What a node's rounds cost, measured on its own model before it serves (algorithms.md I1, I2).

Draft lengths by goodput and the drafter ``auto`` weigh tokens against seconds; until rounds have shown the seconds
they would go by an assumed step.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace

import torch

from paceline.assembly.trial_sequences import TrialSequences
from paceline.attention.base import Segment
from paceline.engine.model_runner import ModelRunner
from paceline.request import SpeculationParams
from paceline.sampling.topk import argmax_lowest
from paceline.spec_decode.base import ExtendItem
from paceline.spec_decode.length.cost import CostTable, MeasureGrid
from paceline.spec_decode.sequence import Sequence
from paceline.speculation import is_weightless

log = logging.getLogger(__name__)

DIGESTED = 2  # rows that a round leaves to the drafter, about
PROMPT_TOKENS = 16  # before the rows measured; longer contexts move the table's scale when they come
MAX_TOKENS = 4096  # of a request that never runs: no bound of its length reaches the measurement


def measure_costs(runner: ModelRunner, max_batch: int, grid: MeasureGrid = MeasureGrid()) -> None:
    """Put measured seconds into the table of ``runner.policy``: target steps, and drafting where there are weights.

    Takes at most ``grid.limit_s`` and one step more. Batches go up to ``max_batch`` and to what the pool holds now.
    """
    costs = runner.policy.costs
    if costs is None:
        return
    has_weights = not is_weightless(runner.drafter.name)
    most = runner.limits.budget.max_nodes
    rows = tuple(n for n in grid.rows_per_seq if n < max(2 * most, 3))  # of a tree, and once past it
    slots = max(rows[-1], runner.spec_slots)
    pages = -(-(PROMPT_TOKENS + slots) // runner.page_size)
    fits = min(max_batch, runner.allocator.fits(pages))
    batches = tuple(b for b in grid.batches if b <= fits)
    if not batches:
        log.warning("the KV pool is too small to measure step costs in: they stay assumed until rounds show them")
        return
    log.info("measuring step costs, at most %g s", grid.limit_s)
    # Target steps and drafts share the time.
    grid = replace(grid, batches=batches, rows_per_seq=rows, limit_s=grid.limit_s / (2 if has_weights else 1))
    with TrialSequences(runner) as trial:
        bench = Bench(runner, trial, slots)
        costs.target = CostTable.measure(bench.target_s, grid).target
        depths = tuple(d for d in grid.rows_per_seq if d <= runner.limits.budget.num_draft_tokens)
        if has_weights and depths:
            costs.measure_draft(runner.drafter.name, bench.draft_s, replace(grid, rows_per_seq=depths))
    b = batches[-1]
    log.info(
        "a plain step takes %.2f ms, one of %d sequences %.2f ms, one verifying %d tokens %.2f ms",
        1e3 * costs.estimate(1, 1), b, 1e3 * costs.estimate(b, b), most, 1e3 * costs.estimate(1, most),
    )  # fmt: skip


class Bench:
    """Runs one step or one draft and takes its time, over as many trial sequences as are asked for."""

    def __init__(self, runner: ModelRunner, trial: TrialSequences, num_slots: int) -> None:
        self.runner, self.trial, self.num_slots = runner, trial, num_slots

    def target_s(self, batch: int, rows: int) -> float:
        """Seconds of a target step of ``rows`` rows over ``batch`` sequences, up to the best token of each row."""
        segments = [
            Segment.linear([seq.token_ids[-1]] * (rows // batch), seq.num_computed, seq.table.slots)
            for seq in self._first(batch)
        ]
        began = time.perf_counter()
        hidden, _ = self.runner.forward(segments)
        argmax_lowest(self.runner.model.logits(hidden)).tolist()  # on the host: waits for the device
        return time.perf_counter() - began

    def draft_s(self, batch: int, depth: int) -> float:
        """Seconds of drafting the deployment's trees, cut to ``depth``, for ``batch`` sequences: the rows of the round
        before are digested, which waits until there is to be a draft, and trees grown."""
        runner, seqs = self.runner, self._first(batch)
        budget = replace(runner.limits.budget, num_draft_tokens=depth, min_confidence=0.0)
        rows = torch.zeros(DIGESTED, runner.drafter.row_width, dtype=runner.model.dtype, device=runner.model.device)
        items = [ExtendItem(seq, seq.num_prefill - DIGESTED, seq.num_prefill, rows, final=True) for seq in seqs]
        began = time.perf_counter()
        if runner.drafter.needs_extend:
            runner.drafter.extend(items)
        runner.drafter.propose(seqs, [budget] * batch)
        return time.perf_counter() - began

    def _first(self, batch: int) -> list[Sequence]:
        vocab, seqs = self.runner.vocab_size, self.trial.seqs
        missing = range(len(seqs), batch)
        if missing:
            prompts = [[(7919 * i + 13 * p) % vocab for p in range(PROMPT_TOKENS)] for i in missing]
            speculation = SpeculationParams(drafter=self.runner.drafter.name)
            self.trial.add(prompts, MAX_TOKENS, self.num_slots, speculation)
        return seqs[:batch]
