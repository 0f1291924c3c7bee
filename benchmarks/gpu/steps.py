"""Rows of the GPU benchmark that time steps: decode, prefill, verify, draft, a whole round, pages."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import torch

from benchmarks.gpu.bench import (
    HEADROOM,
    Bench,
    Figure,
    Unavailable,
    plant,
    prompt,
    request,
    step_facts,
    why,
)
from benchmarks.gpu.clock import Sample
from benchmarks.gpu.floors import (
    Work,
    decode_work,
    eagle3_step_work,
    kv_token_bytes,
    page_copy_work,
    prefill_work,
    share,
)
from paceline.attention.base import ForwardBatch, Segment
from paceline.engine.model_runner import PrefillChunk
from paceline.kvcache.layout import KvLayer, KvLayout, LayerKind, LayerOwner
from paceline.kvcache.pool import KvPool
from paceline.spec_decode.base import DraftBudget, Drafter, ExtendItem, TreeKind
from paceline.spec_decode.drafters.none import NoDrafter
from paceline.spec_decode.sequence import Sequence
from paceline.spec_decode.trees.tree import DraftTree

ROUND_DRAFT_TOKENS = 4
SLOPE = (1, 5)  # depths whose difference is four draft steps
PREFILL_REPEATS = 5


class NeverRight(Drafter):
    """Chains of one wrong token, made in no time: what verifying that many rows costs, and nothing else."""

    name = "never-right"

    def __init__(self, num_rows: int, wrong: int) -> None:
        """num_rows: of each sequence in a verification, the root counted."""
        self._tokens = (wrong,) * (num_rows - 1)
        self._parents, self._depths = tuple(range(-1, num_rows - 1)), tuple(range(num_rows))

    def extend(self, items: Seq[ExtendItem]) -> None:
        """Keeps nothing."""

    def propose(self, seqs: Seq[Sequence], budgets: Seq[DraftBudget]) -> list[DraftTree]:
        """See Drafter."""
        return [DraftTree((seq.token_ids[-1], *self._tokens), self._parents, self._depths) for seq in seqs]


def decode_step(bench: Bench, shape: str, batch: int, context: int) -> Figure:
    """A plain step of the engine, sampling included, over the floor of weights and KV."""
    batch, context = bench.batch(shape, batch), bench.tokens(shape, context)
    runner = bench.runner(shape, batch, context + HEADROOM, 0)
    seqs = plant(runner, batch, context)
    sample = bench.clock.wall(lambda: runner.decode(seqs))
    busy = bench.clock.busy(lambda: runner.decode(seqs))
    floor = decode_work(bench.spec(shape), bench.dtype.itemsize, batch, context).floor_s(bench.ceilings)
    facts = step_facts(runner, batch, context, busy) | {"floor_s": floor, "tokens_per_s": batch / sample.median}
    measured = f"{1e3 * sample.median:.3f} ms, floor {1e3 * floor:.3f} ms, {batch / sample.median:.0f} tokens/s"
    hints = why(runner, sample.median, busy, floor)
    return Figure(share(floor, sample.median), measured, {"step": sample}, facts, hints)


def prefill(bench: Bench, shape: str, tokens: int) -> Figure:
    """A whole prompt in one forward, first token sampled, over the measured matrix rate."""
    tokens = bench.tokens(shape, tokens)
    runner = bench.runner(shape, 1, tokens + HEADROOM, 0)
    asked = request(0, prompt(0, tokens, runner.vocab_size), 2)

    def whole() -> None:
        seq = runner.new_sequence(asked)
        seq.table.ensure(tokens + 1)
        runner.prefill([PrefillChunk(seq, 0, tokens)])
        seq.table.release()

    sample = bench.clock.wall(whole, warm_up=1, repeats=PREFILL_REPEATS)
    busy = bench.clock.busy(whole, calls=1)
    work = prefill_work(bench.spec(shape), bench.dtype.itemsize, tokens)
    floor, rate = work.floor_s(bench.ceilings), work.flops / sample.median
    measured = f"{1e3 * sample.median:.1f} ms, {rate / 1e12:.1f} TFLOP/s, {tokens / sample.median:.0f} tokens/s"
    facts = step_facts(runner, 1, tokens, busy) | {"floor_s": floor, "flops": work.flops, "flops_per_s": rate}
    return Figure(
        share(floor, sample.median), measured, {"prefill": sample}, facts, why(runner, sample.median, busy, floor)
    )


def exact_over_fast(bench: Bench, measure: Callable[[Bench], Figure]) -> Figure:
    """What a row of a share of a floor takes with exact bits, over what it takes with fast ones."""
    found: dict[str, Figure] = {}
    for bits in ("fast", "exact"):
        one = bench.with_bits(bits)
        found[bits] = measure(one)
        one.unload()
    fast, exact = found["fast"], found["exact"]
    facts = {f"{bits} {name}": value for bits, figure in found.items() for name, value in figure.facts.items()}
    samples = {f"{bits} {name}": sample for bits, figure in found.items() for name, sample in figure.samples.items()}
    measured = f"exact: {exact.measured}; fast: {fast.measured}"
    return Figure(fast.value / exact.value, measured, samples, facts, exact.hints)


def verify_ratio(bench: Bench, shape: str, batch: int, context: int, num_rows: int) -> Figure:
    """A round that verifies ``num_rows`` rows of each sequence, over a plain one."""
    batch, context = bench.batch(shape, batch), bench.tokens(shape, context)
    runner = bench.runner(shape, batch, context + HEADROOM, num_rows - 1)
    seqs = plant(runner, batch, context)
    one, several = NoDrafter(), NeverRight(num_rows, runner.vocab_size - 1)
    samples, busy = {}, {}
    for name, drafter in (("1 token", one), (f"{num_rows} tokens", several)):
        runner.drafter = drafter
        samples[name] = bench.clock.wall(lambda: runner.decode(seqs))
        busy[name] = bench.clock.busy(lambda: runner.decode(seqs))
    plain, wide = (sample.median for sample in samples.values())
    facts = step_facts(runner, batch, context, None)
    plain_busy, wide_busy = busy.values()
    hints: tuple[str, ...] = ()
    if plain_busy and wide_busy:
        facts |= {"kernel_s": wide_busy, "kernel_ratio": wide_busy / plain_busy}
        hints = why(runner, wide, wide_busy, None)
        hints += (f"kernels alone: {wide_busy / plain_busy:.2f} x",)
    measured = f"{1e3 * wide:.3f} ms over {1e3 * plain:.3f} ms"
    return Figure(wide / plain, measured, samples, facts, hints)


def draft_step(bench: Bench, shape: str, context: int) -> Figure:
    """One step of the EAGLE-3 head, from the slope over the depth of the chain, over a plain target step."""
    context = bench.tokens(shape, context)
    step = _plain_step(bench, shape, context)
    runner = bench.runner(shape, 1, context + HEADROOM, SLOPE[1], "eagle3")
    seqs = plant(runner, 1, context)
    samples, busy = {"target step": step}, []
    for depth in SLOPE:
        budget = DraftBudget(depth, 1, TreeKind.CHAIN)

        def draft(budget: DraftBudget = budget) -> None:
            runner.drafter.propose(seqs, [budget])

        samples[f"depth {depth}"] = bench.clock.wall(draft)
        busy.append(bench.clock.busy(draft))
    low, high = (samples[f"depth {depth}"].median for depth in SLOPE)
    steps = SLOPE[1] - SLOPE[0]
    one = (high - low) / steps
    floor = eagle3_step_work(bench.head_config(shape), bench.dtype.itemsize, 1, context).floor_s(bench.ceilings)
    kernel = (busy[1] - (busy[0] or 0.0)) / steps if busy[1] is not None else None
    facts = step_facts(runner, 1, context, kernel) | {"floor_s": floor, "share_of_floor": share(floor, one)}
    measured = f"{1e6 * one:.0f} us (floor {1e6 * floor:.0f}) over {1e3 * step.median:.3f} ms"
    hints = (
        *why(runner, one, kernel, floor),
        f"the floor of both would give {floor / _step_floor(bench, shape, context):.3f}",
    )
    return Figure(one / step.median, measured, samples, facts, hints)


def _plain_step(bench: Bench, shape: str, context: int) -> Sample:
    runner = bench.runner(shape, 1, context + HEADROOM, 0)
    seqs = plant(runner, 1, context)
    return bench.clock.wall(lambda: runner.decode(seqs))


def _step_floor(bench: Bench, shape: str, context: int) -> float:
    return decode_work(bench.spec(shape), bench.dtype.itemsize, 1, context).floor_s(bench.ceilings)


def round_overhead(bench: Bench, shape: str, context: int) -> Figure:
    """What a whole round takes beyond its kernels: drafting, verification, sampling, the walk, the head's digest."""
    context = bench.tokens(shape, context)
    runner = bench.runner(shape, 1, context + HEADROOM, ROUND_DRAFT_TOKENS, "eagle3")
    seqs = plant(runner, 1, context)
    sample = bench.clock.wall(lambda: runner.decode(seqs))
    busy = bench.clock.busy(lambda: runner.decode(seqs))
    if busy is None:
        raise Unavailable(f"a round takes {1e3 * sample.median:.3f} ms, but the profiler sees no kernels here")
    facts = step_facts(runner, 1, context, busy) | {"num_draft_tokens": ROUND_DRAFT_TOKENS}
    measured = f"{1e3 * sample.median:.3f} ms, kernels {1e3 * busy:.3f} ms"
    return Figure(
        sample.median / busy - 1.0, measured, {"round": sample}, facts, why(runner, sample.median, busy, None)
    )


def attention_alone(bench: Bench, shape: str, batch: int, context: int) -> Figure:
    """Attention of a plain step over all layers, without the rest of the model, over the floor of the KV."""
    batch, context = bench.batch(shape, batch), bench.tokens(shape, context)
    spec, runner = bench.spec(shape), bench.runner(shape, batch, context + HEADROOM, 0)
    seqs = plant(runner, batch, context)
    rows = ForwardBatch.build([Segment.linear([0], context - 1, seq.table.slots) for seq in seqs], bench.clock.device)
    query = torch.randn(batch, spec.num_heads, spec.head_dim, dtype=bench.dtype, device=bench.clock.device)
    attention, plan = runner.attention, runner.attention.plan(rows)

    def layers() -> None:
        for layer in range(spec.num_layers):
            attention.attend(query, runner.kv, layer, plan, spec.head_dim**-0.5)

    sample = bench.clock.wall(layers)
    busy = bench.clock.busy(layers)
    moved = batch * context * kv_token_bytes(spec, bench.dtype.itemsize)
    floor, measured_s = Work(moved, 0.0).floor_s(bench.ceilings), busy or sample.median
    facts = step_facts(runner, batch, context, busy) | {"floor_s": floor, "bytes_per_s": moved / measured_s}
    measured = f"{1e3 * measured_s:.3f} ms by {attention.name}, floor {1e3 * floor:.3f} ms"
    return Figure(share(floor, measured_s), measured, {"layers": sample}, facts)


def page_copies(bench: Bench, shape: str, tokens: int) -> Figure:
    """Gather of scattered pages to contiguous staging and back, all layers, over the copy bandwidth."""
    spec, page_size = bench.spec(shape), 16
    tokens = max(bench.tokens(shape, tokens) // page_size, 1) * page_size
    layer = KvLayer(LayerKind.GQA, LayerOwner.TARGET, spec.num_kv_heads, spec.head_dim)
    layout = KvLayout((layer,) * spec.num_layers, bench.dtype)
    bench.check_memory(shape, 4 * tokens)
    num_pages = 2 * tokens // page_size
    pool = KvPool(layout, num_pages, page_size, bench.clock.device)
    for data in pool.data:
        data.normal_()
    order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(bench.options.seed))
    pages = order[: tokens // page_size].to(torch.int32)
    slots = (pages[:, None] * page_size + torch.arange(page_size, dtype=torch.int32)).view(-1)
    layers = range(spec.num_layers)
    rows = pool.gather(layers, slots)
    gather = bench.clock.wall(lambda: pool.gather(layers, slots))
    scatter = bench.clock.wall(lambda: pool.scatter(layers, slots, rows))
    both, work = gather.median + scatter.median, page_copy_work(tokens, layout.token_bytes(LayerOwner.TARGET))
    rate = work.num_bytes / both
    same = torch.equal(pool.gather(layers, slots), rows)
    measured = f"{1e3 * gather.median:.3f} + {1e3 * scatter.median:.3f} ms, {rate / 1e9:.0f} GB/s"
    return Figure(
        work.floor_s(bench.ceilings) / both,
        measured,
        {"gather": gather, "scatter": scatter},
        {"tokens": tokens, "bytes": work.num_bytes / 4, "bytes_per_s": rate},
        wrong="" if same else "what was scattered was not what was gathered",
    )
