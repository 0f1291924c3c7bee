"""What the rows of the GPU benchmark share: one loaded target, runners around it, sequences that are half-way."""

from __future__ import annotations

import gc
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from benchmarks.gpu.clock import Clock, Sample
from benchmarks.gpu.floors import Ceilings, kv_token_bytes
from benchmarks.gpu.shapes import DRAFT_VOCAB, SHAPES, eagle3_config, load_shape, write_random_eagle3
from benchmarks.speculation.synthetic import Rates
from paceline.assembly.build import assemble
from paceline.attention.base import AttentionBackend
from paceline.config import NodeConfig
from paceline.engine.model_runner import ModelRunner, PrefillChunk, RunnerIdentity
from paceline.kvcache.table import PageTable
from paceline.layers.bits import layer_bits
from paceline.layers.build import kernel_set
from paceline.models.config import ModelSpec
from paceline.models.llama import LlamaModel
from paceline.models.registry import DTYPES
from paceline.request import SamplingParams, SequenceRequest
from paceline.spec_decode.drafters.select import SelectingDrafter
from paceline.spec_decode.heads.formats.config import Eagle3Config
from paceline.spec_decode.sequence import Sequence
from paceline.triton_support import runs_triton

HEADROOM = 512  # tokens that a planted sequence may still grow by
LAST_ROWS = 16  # of a planted prompt that are computed, so that the drafter has its state
MEMORY_SHARE = 0.9  # of the free memory that one row may plan with
TINY = "tiny"
TINY_DIVISOR, TINY_BATCH = 64, 3  # what sizes shrink to for the shape that tests use


class Unavailable(Exception):
    """This row cannot be measured here; the text says why."""


@dataclass(frozen=True)
class Options:
    """What was asked for; part of the results."""

    device: str
    dtype: str
    target: str  # of SHAPES
    smollm2: str  # folder of the real model; empty: its rows are left out
    seed: int
    rates: Rates
    transformers: bool = True
    attention: str = "auto"
    bits: str = "fast"


@dataclass(frozen=True)
class Figure:
    """What one row came to."""

    value: float  # what the reach is of
    measured: str  # for the table
    samples: dict[str, Sample] = field(default_factory=dict)
    facts: dict[str, float | str] = field(default_factory=dict)
    hints: tuple[str, ...] = ()
    synthetic: bool = False  # drafts were drawn from a table of rates
    wrong: str = ""  # why it does not count, whatever the value: the text differed, drafts were not exchanged


class Bench:
    """Options, clock and ceilings of a run, and the target that is loaded now."""

    def __init__(self, options: Options, clock: Clock, ceilings: Ceilings, scratch: Path) -> None:
        """scratch: a folder for heads; 1 GB for the 8B shape."""
        self.options, self.clock, self.ceilings, self.scratch = options, clock, ceilings, scratch
        self.dtype = DTYPES[options.dtype]
        self._loaded: tuple[str, LlamaModel] | None = None
        self._watched: list[tuple[AttentionBackend, str]] = []  # and the one that was asked for
        self._sampled_by_kernels: list[bool] = []  # of each runner

    # -- sizes

    def tokens(self, shape: str, wanted: int) -> int:
        """A context or prompt length of the table, at the size of ``shape``."""
        return max(wanted // TINY_DIVISOR, 2 * LAST_ROWS) if shape == TINY else wanted

    def batch(self, shape: str, wanted: int) -> int:
        """A batch size of the table, at the size of ``shape``."""
        return min(wanted, TINY_BATCH) if shape == TINY else wanted

    def check_memory(self, shape: str, tokens: int) -> None:
        """Raise Unavailable when the KV of ``tokens`` does not fit beside what is loaded."""
        if not self.clock.on_gpu:
            return
        self.free()
        needed = tokens * kv_token_bytes(SHAPES[shape], self.dtype.itemsize)
        free, _ = torch.cuda.mem_get_info(self.clock.device)
        if needed > MEMORY_SHARE * free:
            raise Unavailable(f"needs {needed / 1e9:.0f} GB of KV, {free / 1e9:.0f} GB are free")

    # -- models

    def spec(self, shape: str) -> ModelSpec:
        """Return the target of a shape."""
        return SHAPES[shape]

    def target(self, shape: str) -> LlamaModel:
        """The random target of a shape; the one loaded before goes."""
        if self._loaded is None or self._loaded[0] != shape:
            self.unload()
            with layer_bits(self.options.bits, self.clock.device):
                self._loaded = shape, load_shape(shape, self.dtype, self.clock.device, self.options.seed)
        return self._loaded[1]

    def with_bits(self, bits: str) -> Bench:
        """The same with other ``bits`` and no target loaded; this one's goes."""
        self.unload()
        other = Bench(replace(self.options, bits=bits), self.clock, self.ceilings, self.scratch)
        other._watched, other._sampled_by_kernels = self._watched, self._sampled_by_kernels
        return other

    def unload(self) -> None:
        """Let the target go."""
        self._loaded = None
        self.free()

    def free(self) -> None:
        """Give back the memory of what nobody holds any more."""
        gc.collect()
        if self.clock.on_gpu:
            torch.cuda.empty_cache()

    def head_config(self, shape: str) -> Eagle3Config:
        """Return the configuration of a shape's EAGLE-3 head."""
        return eagle3_config(SHAPES[shape], DRAFT_VOCAB[shape])

    def head_folder(self, shape: str) -> Path:
        """Its random weights, written at the first use."""
        folder = self.scratch / f"eagle3-{shape}"
        if not (folder / "config.json").is_file():
            write_random_eagle3(folder, SHAPES[shape], DRAFT_VOCAB[shape], self.options.seed)
        return folder

    # -- runners

    def runner(self, shape: str, batch: int, tokens: int, num_draft_tokens: int, drafter: str = "none") -> ModelRunner:
        """A runner with a pool for ``batch`` sequences of ``tokens``. Raises Unavailable when it does not fit.

        num_draft_tokens: K; slots for it are there even without a drafter.
        """
        page = NodeConfig().page_size
        each = -(-(tokens + 2 * (1 + num_draft_tokens)) // page) * page
        model = self.target(shape)
        self.check_memory(shape, batch * each)
        config = NodeConfig.model_validate(
            {
                "model": shape,
                "dtype": self.options.dtype,
                "device": self.options.device,
                "attention": self.options.attention if self.options.bits == "fast" else "auto",
                "bits": self.options.bits,
                "drafter": drafter,
                "drafter_path": str(self.head_folder(shape)) if drafter == "eagle3" else "",
                "num_draft_tokens": num_draft_tokens,
                "kv_cache_tokens": max(batch * each, 256),
                "max_model_len": tokens,
                "max_running": batch,
                "prefix_cache": False,
            }
        )
        identity = RunnerIdentity(f"{shape} shape, random weights", f"seed-{self.options.seed}", kernel_set())
        return self.watched(assemble(config, model, identity))

    def watched(self, runner: ModelRunner) -> ModelRunner:
        """The same; `fell_back` looks at what its attention does."""
        wanted = "triton" if self.options.bits == "exact" else self.options.attention
        drafter = runner.drafter.primary if isinstance(runner.drafter, SelectingDrafter) else runner.drafter
        both = (runner.attention, getattr(drafter, "attention", runner.attention))
        self._watched += [(attention, wanted) for attention in both]
        self._sampled_by_kernels.append(runner.samples_on_device and runs_triton(self.clock.device))
        return runner

    def fell_back(self) -> list[str]:
        """Forwards on a GPU since the last call that another attention computed than the one that was asked for, and
        sampling that was not the kernels'. Their figures would say nothing of either."""
        found: set[str] = set()
        if self.clock.on_gpu and not all(self._sampled_by_kernels):
            found.add("sampling is not the kernels'")
        self._sampled_by_kernels.clear()
        for attention, wanted in self._watched:
            found |= attention.left
            if self.clock.on_gpu and attention.name != wanted:
                found.add(f"{attention.name} in place of {wanted}")
        self._watched.clear()
        return sorted(found)


def request(index: int, prompt: Seq[int], max_tokens: int) -> SequenceRequest:
    """A greedy request that does not end before its limit."""
    params = SamplingParams(temperature=0.0, seed=index, max_tokens=max_tokens, ignore_eos=True)
    return SequenceRequest(f"request-{index}", tuple(prompt), params)


def prompt(index: int, num_tokens: int, vocab_size: int) -> list[int]:
    """Ids that differ from sequence to sequence."""
    return [(104729 * index + 7919 * p * p + 13 * p) % vocab_size for p in range(num_tokens)]


def plant(runner: ModelRunner, batch: int, context: int) -> list[Sequence]:
    """Sequences about to decode after ``context`` tokens, without the time of their prefill: keys and values are random
    numbers, but for the last rows, which are computed (and so leave the drafter its state)."""
    for layer in runner.kv.data:
        layer.normal_()
    seqs, chunks = [], []
    for index in range(batch):
        asked = request(index, prompt(index, context, runner.vocab_size), HEADROOM)
        seq = Sequence.start(asked, PageTable(runner.allocator, runner.page_size))
        seq.table.ensure(context + HEADROOM + runner.spec_slots)
        seq.num_computed = seq.draft_rows = context - LAST_ROWS
        seqs.append(seq)
        chunks.append(PrefillChunk(seq, seq.num_computed, seq.num_prefill))
    runner.prefill(chunks)
    return seqs


def why(runner: ModelRunner, wall_s: float, busy_s: float | None, floor_s: float | None) -> tuple[str, ...]:
    """Where the time may be: what to look at when a reach is missed."""
    found = []
    if runner.model.device.type == "cuda" and runner.attention.name == "torch":
        found.append("attention is the torch reference: is flashinfer importable?")
    if runner.model.device.type == "cuda" and num_graphs(runner) == 0:
        found.append("no CUDA graph was captured: every kernel is launched by the host")
    if busy_s is not None:
        if wall_s > 1.05 * busy_s:
            idle = 100 * (1 - busy_s / wall_s)
            found.append(f"the device waits for the host in {idle:.0f} % of the step")
        if floor_s is not None and busy_s > 1.1 * floor_s:
            found.append(f"kernels alone take {busy_s / floor_s:.2f} x the floor")
    return tuple(found)


def num_graphs(runner: ModelRunner) -> int:
    """CUDA graphs of the target that were captured."""
    return 0 if runner.graphs is None else len(runner.graphs.buckets)


def step_facts(runner: ModelRunner, batch: int, context: int, busy_s: float | None) -> dict[str, float | str]:
    """What every row about steps says."""
    return {
        "batch": batch,
        "context": context,
        "kernel_s": "not measured" if busy_s is None else busy_s,
        "attention": runner.attention.name,
        "bit_exact": str(runner.bit_exact),
        "target_graphs": num_graphs(runner),
    }
