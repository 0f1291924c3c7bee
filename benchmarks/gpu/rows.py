"""The table of the GPU benchmark: its rows, what each has to reach, and which fit into the time there is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.gpu.bench import Bench, Figure
from benchmarks.gpu.speed import over_transformers, smollm2, synthetic_speedup
from benchmarks.gpu.steps import (
    attention_alone,
    decode_step,
    draft_step,
    exact_over_fast,
    page_copies,
    prefill,
    round_overhead,
    verify_ratio,
)
from paceline.errors import ConfigError

REACH_SHAPE = "llama-8b"  # what the reaches are of
SWEEP_BATCHES, SWEEP_CONTEXTS = (1, 4, 16, 64, 256), (128, 1024, 4096, 32768)
OTHER_SHAPE = "qwen3-0.6b"
TABLE, SWEEP = "table", "sweep"


@dataclass(frozen=True)
class Reach:
    """The bound of a row."""

    bound: float
    at_least: bool = True

    def holds(self, value: float) -> bool:
        """Whether ``value`` reaches it."""
        return value >= self.bound if self.at_least else value <= self.bound

    def __str__(self) -> str:
        return f"{'>=' if self.at_least else '<='} {self.bound:g}"


@dataclass(frozen=True)
class Row:
    """One measurement."""

    key: str
    title: str
    unit: str  # what the value is
    reach: Reach | None
    estimate_s: float  # on one H200; the measured pace corrects it
    measure: Callable[[Bench], Figure]
    group: str = TABLE


def _at_least(bound: float) -> Reach:
    return Reach(bound)


def _at_most(bound: float) -> Reach:
    return Reach(bound, at_least=False)


def rows(target: str) -> list[Row]:
    """Every row, those of the table first; the reaches are of the 8B shape and hold for no other."""

    def reach(found: Reach) -> Reach | None:
        return found if target == REACH_SHAPE else None

    of_floor, ratio = "of the floor", "x"
    table = [
        Row("decode_b1", "decode step, batch 1, 2K context", of_floor, reach(_at_least(0.80)), 20,
            lambda b: decode_step(b, target, 1, 2048)),
        Row("decode_b64", "decode step, batch 64, 4K context", of_floor, reach(_at_least(0.70)), 15,
            lambda b: decode_step(b, target, 64, 4096)),
        Row("prefill_4k", "prefill, 4K tokens", of_floor, reach(_at_least(0.60)), 10,
            lambda b: prefill(b, target, 4096)),
        Row("prefill_16k", "prefill, 16K tokens", of_floor, reach(_at_least(0.60)), 15,
            lambda b: prefill(b, target, 16384)),
        Row("verify_b1", "verify 8 tokens / 1, batch 1", ratio, reach(_at_most(1.10)), 15,
            lambda b: verify_ratio(b, target, 1, 2048, 8)),
        Row("verify_b32", "verify 4 tokens / 1, batch 32", ratio, reach(_at_most(1.15)), 15,
            lambda b: verify_ratio(b, target, 32, 2048, 4)),
        Row("draft_step", "one EAGLE-3 draft step / target step, batch 1", ratio, reach(_at_most(0.06)), 25,
            lambda b: draft_step(b, target, 2048)),
        Row("round_overhead", "whole round, K=4, batch 1, beyond its kernels", "overhead", reach(_at_most(0.05)), 15,
            lambda b: round_overhead(b, target, 2048)),
        Row("speedup_b1", "tokens/s, 3 tokens a round, over plain, batch 1", ratio, reach(_at_least(2.3)), 15,
            lambda b: synthetic_speedup(b, target, 1, 1024, 384)),
        Row("speedup_b32", "tokens/s, 3 tokens a round, over plain, batch 32", ratio, reach(_at_least(1.5)), 20,
            lambda b: synthetic_speedup(b, target, 32, 1024, 128)),
        Row("attention_b1", "attention of a step alone, batch 1, 4K context", of_floor, None, 10,
            lambda b: attention_alone(b, target, 1, 4096)),
        Row("attention_b64", "attention of a step alone, batch 64, 4K context", of_floor, None, 10,
            lambda b: attention_alone(b, target, 64, 4096)),
        Row("pages", "page gather + scatter, 4K tokens", "of copy bandwidth", reach(_at_least(0.60)), 5,
            lambda b: page_copies(b, target, 4096)),
        Row("transformers_b1", "plain over transformers' generate, batch 1", ratio, reach(_at_least(3.0)), 25,
            lambda b: over_transformers(b, target, 1, 512, 64)),
        Row("transformers_b32", "plain over transformers' generate, batch 32", ratio, reach(_at_least(4.0)), 25,
            lambda b: over_transformers(b, target, 32, 512, 64)),
    ]  # fmt: skip
    return [*table, *_exact_rows(target), *_real_rows(), *_other_rows(target), *_sweep_rows(target)]


def _exact_rows(target: str) -> list[Row]:
    """What exact bits cost."""
    points: list[tuple[str, str, Callable[[Bench], Figure]]] = [
        ("decode_b1", "decode step, batch 1, 2K context", partial(decode_step, shape=target, batch=1, context=2048)),
        ("decode_b64", "decode step, batch 64, 4K context", partial(decode_step, shape=target, batch=64, context=4096)),
        ("prefill_4k", "prefill, 4K tokens", partial(prefill, shape=target, tokens=4096)),
    ]
    return [
        Row(f"exact_{key}", f"exact over fast bits: {title}", "x", None, 60, partial(exact_over_fast, measure=measure))
        for key, title, measure in points
    ]


def _real_rows() -> list[Row]:
    return [
        Row(f"smollm2_b{batch}", f"SmolLM2-135M, its EAGLE-3 heads over plain, batch {batch}", "x", None, 15,
            partial(smollm2, batch=batch, max_tokens=128))
        for batch in (1, 8, 32)
    ]  # fmt: skip


def _other_rows(target: str) -> list[Row]:
    """The small shape: floors are so low there that whatever the host does shows."""
    if target != REACH_SHAPE:
        return []
    shape = OTHER_SHAPE
    return [
        Row("qwen_decode_b1", f"{shape}: decode step, batch 1, 2K context", "of the floor", None, 10,
            lambda b: decode_step(b, shape, 1, 2048)),
        Row("qwen_verify_b1", f"{shape}: verify 8 tokens / 1, batch 1", "x", None, 10,
            lambda b: verify_ratio(b, shape, 1, 2048, 8)),
        Row("qwen_round", f"{shape}: whole round, K=4, batch 1, beyond its kernels", "overhead", None, 10,
            lambda b: round_overhead(b, shape, 2048)),
        Row("qwen_speedup_b1", f"{shape}: 3 tokens a round, over plain, batch 1", "x", None, 10,
            lambda b: synthetic_speedup(b, shape, 1, 1024, 384)),
    ]  # fmt: skip


def _sweep_rows(target: str) -> list[Row]:
    """Decode steps over batch and context, from the smallest to the largest KV."""
    points = sorted(((b, c) for b in SWEEP_BATCHES for c in SWEEP_CONTEXTS), key=lambda p: p[0] * p[1])
    return [
        Row(f"step_b{batch}_c{context}", f"decode step, batch {batch}, context {context}", "of the floor", None,
            6 + batch * context / 50_000, partial(decode_step, shape=target, batch=batch, context=context), SWEEP)
        for batch, context in points
    ]  # fmt: skip


def select(every: Sequence[Row], asked: str) -> list[Row]:
    """The rows of ``--rows``: keys or groups (table, sweep) separated by commas; empty: all. Raises ConfigError."""
    names = [name for part in asked.split(",") if (name := part.strip())]
    known = {row.key for row in every} | {TABLE, SWEEP}
    if unknown := [name for name in names if name not in known]:
        raise ConfigError("rows", f"{', '.join(unknown)}: none of {', '.join(row.key for row in every)}, table, sweep")
    return [row for row in every if not names or row.key in names or row.group in names]


def fit(waiting: Sequence[Row], seconds: float, pace: float = 1.0) -> tuple[list[Row], list[Row]]:
    """The rows that fit into ``seconds`` and the rows left out, both in order. The sweep goes first, then the
    table, each from its largest point on. pace: measured seconds over estimated ones."""
    kept = list(waiting)
    for row in sorted(waiting, key=lambda row: (row.group == SWEEP, row.estimate_s), reverse=True):
        if pace * sum(each.estimate_s for each in kept) <= seconds:
            break
        kept.remove(row)
    return kept, [row for row in waiting if row not in kept]
