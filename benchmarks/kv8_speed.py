"""What ``--kv-dtype int8`` does to the time of a step: contexts and kinds of rows, both caches by turns.

Contexts are rows of noise, written to the pool without a prompt: a step's time does not depend on what they say. Beside
the times stand those of attention alone over all layers, and the floor of those: the bytes of keys and values that the
rows see, each once, over the memory's bandwidth.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from benchmarks.common.console import step
from benchmarks.common.timing import read_bandwidth
from paceline.attention.base import AttentionBackend, ForwardBatch, Segment
from paceline.attention.select import attention_for
from paceline.kvcache.layout import KvLayout, LayerOwner
from paceline.kvcache.pool import KvPool
from paceline.layers import kv8
from paceline.models.base import ForwardContext, TargetModel

PAGE = 16
TREE = (-1, 0, 1, 2, 0, 1, 4, 2)  # parents of the nodes that a round verifies
CHUNK = 256  # rows of a prompt
CACHES = ("auto", "int8")
ROUND_S = 0.25  # of each figure in each round
Pair = tuple[float, float]  # of the cache as it is, and in int8


@dataclass(frozen=True)
class StepTime:
    """One context and one kind of rows: the least of the rounds' medians, for what else runs only slows it down."""

    context: int
    rows: str
    step_ms: Pair
    attention_ms: Pair
    floor_ms: Pair  # of attention
    ratio: float  # of steps, int8 to the cache as it is: the median of the rounds' ratios
    multiply_adds: int  # of attention


@dataclass(frozen=True)
class _Case:
    """What runs over one cache."""

    step: Callable[[], object]
    attend: Callable[[], object]


def segment_of(rows: str, context: int) -> Segment:
    """``decode``, ``tree`` or ``chunk``, behind ``context`` tokens."""
    slots = torch.arange(context + CHUNK, dtype=torch.int32)
    if rows == "tree":
        return Segment.tree([1000] * len(TREE), TREE, context, slots)
    return Segment.linear([1000] * (1 if rows == "decode" else CHUNK), context, slots)


def noisy_pool(model: TargetModel, kv_dtype: str, tokens: int) -> KvPool:
    """A pool of ``tokens`` rows of noise in each layer."""
    kv = KvPool(KvLayout.of(model.kv_layers, model.dtype, kv_dtype), -(-tokens // PAGE), PAGE)
    generator, every = torch.Generator().manual_seed(0), torch.arange(kv.num_pages * PAGE)
    for spec, pages in zip(model.kv_layers, kv.data, strict=True):
        noise = torch.randn(2, len(every), spec.num_kv_heads, spec.head_dim, generator=generator).to(model.dtype)
        if kv.layout.is_int8:
            kv8.write_rows(noise, every, pages)
        else:
            pages[every // PAGE, :, every % PAGE] = noise.transpose(0, 1)
    return kv


def _case(model: TargetModel, kv: KvPool, attention: AttentionBackend, segment: Segment) -> _Case:
    spec, batch = model.spec, ForwardBatch.build([segment])
    query = torch.randn(batch.num_rows, spec.num_heads, spec.head_dim).to(model.dtype)

    def step() -> None:
        hidden = model.forward(ForwardContext.build(ForwardBatch.build([segment]), kv, attention))
        model.logits(hidden[-len(TREE) :])

    def attend() -> None:
        plan = attention.plan(batch)
        for layer in range(len(model.kv_layers)):
            attention.attend(query, kv, layer, plan, spec.head_dim**-0.5)

    return _Case(step, attend)


def _median_s(work: Callable[[], object]) -> float:
    times, ends = list[float](), time.perf_counter() + ROUND_S
    while len(times) < 3 or time.perf_counter() < ends:
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return sorted(times)[len(times) // 2]


@torch.inference_mode()
def measure(model: TargetModel, contexts: Sequence[int], kinds: Sequence[str], rounds: int) -> list[StepTime]:
    """By turns: in each round the caches follow one another at every context."""
    spec, bandwidth = model.spec, read_bandwidth()
    attention = attention_for(model.device, spec.num_heads, spec.num_kv_heads, spec.head_dim)
    pools = [noisy_pool(model, name, max(contexts) + CHUNK) for name in CACHES]
    found = list[StepTime]()
    for context in contexts:
        for kind in kinds:
            step(len(found), len(contexts) * len(kinds), f"{kind} at {context}")
            segment = segment_of(kind, context)
            cases = [_case(model, kv, attention, segment) for kv in pools]
            steps, alone = ([[_median_s(work(case)) for case in cases] for _ in range(rounds)] for work in _WORK)
            seen = segment.num_seen + (len(TREE) if kind == "tree" else 0)
            pairs = sum(segment.positions) + len(segment.positions)
            found.append(
                StepTime(
                    context, kind, _best(steps), _best(alone),
                    _pair([1e3 * seen * kv.layout.token_bytes(LayerOwner.TARGET) / bandwidth for kv in pools]),
                    sorted(coded / plain for plain, coded in steps)[rounds // 2],
                    pairs * 2 * spec.num_heads * spec.head_dim * len(model.kv_layers),
                )
            )  # fmt: skip
    return found


_WORK: tuple[Callable[[_Case], Callable[[], object]], ...] = (lambda case: case.step, lambda case: case.attend)


def _best(rounds: list[list[float]]) -> Pair:
    return _pair([1e3 * min(times) for times in zip(*rounds, strict=True)])


def _pair(both: list[float]) -> Pair:
    return both[0], both[1]


def show(times: Sequence[StepTime]) -> None:
    """Print a line for each."""
    for t in times:
        shares = [floor / alone for floor, alone in zip(t.floor_ms, t.attention_ms, strict=True)]
        print(
            f"{t.rows:6} at {t.context:5}: step {t.step_ms[0]:8.2f} -> {t.step_ms[1]:8.2f} ms ({t.ratio:.2f}), "
            f"attention {t.attention_ms[0]:7.2f} -> {t.attention_ms[1]:7.2f} ms, {shares[0]:.2f} -> {shares[1]:.2f} of "
            f"the floor, {t.multiply_adds / 1e6:,.0f} M multiply-adds"
        )
