"""One process: plain decode against transformers and against the bandwidth floor; verification of several tokens."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.common.console import step
from benchmarks.common.timing import REPEATS, median_s, read_bandwidth
from paceline.assembly.build import build_runner
from paceline.config import NodeConfig
from paceline.engine.colocated import ColocatedEngine
from paceline.engine.model_runner import ModelRunner, PrefillChunk
from paceline.kvcache.layout import LayerOwner
from paceline.models.quantization.round_to_nearest import GROUP_SIZE, head_scheme
from paceline.option_values import QuantizeName
from paceline.request import SamplingParams, SequenceRequest
from paceline.spec_decode.base import DraftBudget, Drafter, ExtendItem
from paceline.spec_decode.sequence import Sequence
from paceline.spec_decode.trees.tree import DraftTree, build_tree

PROMPT_TOKENS, OUTPUT_TOKENS = 128, 128


@dataclass(frozen=True)
class Row:
    """One line of the table: a figure, and the bound it is held to, if any."""

    name: str
    value: str
    bound: str = ""
    holds: bool | None = None


class FixedLength(Drafter):
    """Proposes ``length`` tokens that are never right: the cost of verifying that many."""

    name = "fixed"

    def __init__(self, length: int, vocab_size: int) -> None:
        self.length, self.vocab_size = length, vocab_size

    def extend(self, items: list[ExtendItem]) -> None:  # type: ignore[override]
        """Keeps nothing."""

    def propose(self, seqs: list[Sequence], budgets: list[DraftBudget]) -> list[DraftTree]:  # type: ignore[override]
        """A chain of the same rare token."""
        pairs = [(i - 1, self.vocab_size - 1) for i in range(self.length)]
        return [build_tree(seq.token_ids[-1], pairs, self.vocab_size, 1 + self.length, self.length) for seq in seqs]


def prompt(num_tokens: int, vocab_size: int = 49152) -> tuple[int, ...]:
    """Ordinary ids, none special."""
    return tuple(1000 + (i * 7919) % (vocab_size - 2000) for i in range(num_tokens))


def greedy(num_prompt: int, num_output: int, name: str = "bench") -> SequenceRequest:
    """A greedy request without end of sequence."""
    params = SamplingParams(temperature=0.0, seed=1, max_tokens=num_output, ignore_eos=True)
    return SequenceRequest(name, prompt(num_prompt), params)


def decode_step_s(runner: ModelRunner, steps: int = 40) -> float:
    """Median seconds of one decode step at batch 1, in a context of about PROMPT_TOKENS."""
    seq = runner.new_sequence(greedy(PROMPT_TOKENS, 4 * steps))
    seq.table.ensure(PROMPT_TOKENS + 4 * steps + runner.spec_slots + 16)
    runner.prefill([PrefillChunk(seq, seq.num_computed, seq.num_prefill)])
    times = []
    for _ in range(steps):
        began = time.perf_counter()
        runner.decode([seq])
        times.append(time.perf_counter() - began)
    seq.table.release()
    return statistics.median(times[5:])


def weight_bytes(runner: ModelRunner) -> int:
    """Bytes of weights that a decode step reads: every matrix once (the embedding is read as the head)."""
    spec, head = runner.model.spec, head_scheme(runner.identity.quantize)
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    layer = spec.hidden_size * (2 * q + 2 * kv + 3 * spec.intermediate_size)
    in_layers = spec.num_layers * layer * bytes_of_weight(runner, runner.identity.quantize)
    return round(in_layers + spec.vocab_size * spec.hidden_size * bytes_of_weight(runner, head))


def bytes_of_weight(runner: ModelRunner, scheme: str) -> float:
    """Bytes of one weight in memory, by a scheme of --quantize. Scales of whole rows are not worth counting."""
    if scheme == "none":
        return runner.dtype.itemsize
    return 1.0 if scheme.startswith("w8") else 0.5 + 4.0 / GROUP_SIZE  # a scale and a minimum of two bytes a group


def transformers_tokens_per_s(folder: Path, threads: int) -> float:
    """transformers' own generate in bf16, batch 1, decode tokens per second (prefill taken off)."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    ids = torch.tensor([prompt(PROMPT_TOKENS)])
    mask = torch.ones_like(ids)

    def generate(num: int) -> None:
        with torch.inference_mode():
            model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=num, min_new_tokens=num)

    whole = median_s(lambda: generate(OUTPUT_TOKENS), what=f"transformers, {OUTPUT_TOKENS} tokens")
    return (OUTPUT_TOKENS - 1) / (whole - median_s(lambda: generate(1)))


def run(folder: Path, threads: int, quantize: QuantizeName = "none") -> list[Row]:
    """The engine's table. quantize: what the weights are rounded to."""
    parts = 5
    step(0, parts, "loading the model")
    config = NodeConfig(
        model=str(folder),
        drafter="none",
        threads=threads,
        num_draft_tokens=8,
        kv_cache_tokens=8192,
        quantize=quantize,
    )
    runner = build_runner(config)
    step(1, parts, "read bandwidth, and decode steps")
    bandwidth = read_bandwidth()
    one = decode_step_s(runner)
    read = weight_bytes(runner) + PROMPT_TOKENS * runner.kv.layout.token_bytes(LayerOwner.TARGET)
    floor = read / bandwidth
    rows = [
        Row("threads", str(threads)),
        Row("read bandwidth", f"{bandwidth / 1e9:.1f} GB/s"),
        Row(f"decode step, {_weights(quantize)}, batch 1", f"{one * 1e3:.2f} ms = {1 / one:.1f} tokens/s"),
        Row("floor: weights and KV over bandwidth", f"{floor * 1e3:.2f} ms = {1 / floor:.1f} tokens/s"),
        Row("floor / measured", f"{floor / one:.2f}", ">= 0.6", floor / one >= 0.6),
    ]
    step(2, parts, "plain decode")
    ours = decode_tokens_per_s(runner)
    step(3, parts, "transformers generate")
    theirs = transformers_tokens_per_s(folder, threads)
    rows += [
        Row("plain decode, 128 + 128 tokens", f"{ours:.1f} tokens/s"),
        Row("transformers generate, bf16", f"{theirs:.1f} tokens/s"),
        Row("ours / transformers", f"{ours / theirs:.2f}", ">= 2", ours / theirs >= 2),
    ]
    step(4, parts, "verification of several tokens")
    for tokens in (2, 4, 8):
        runner.drafter = FixedLength(tokens - 1, runner.vocab_size)
        ratio = decode_step_s(runner) / one
        bound = (">= 0", None) if tokens != 4 else ("<= 1.25", ratio <= 1.25)
        rows.append(
            Row(f"verify {tokens} tokens / 1", f"{ratio:.2f}", bound[0] if bound[1] is not None else "", bound[1])
        )
    return rows


def _weights(quantize: str) -> str:
    return "bf16" if quantize == "none" else quantize


def decode_tokens_per_s(runner: ModelRunner) -> float:
    """Our engine on the same task as transformers', prefill taken off the same way."""
    runner.prefix = None
    engine = ColocatedEngine(runner)
    whole = median_s(lambda: engine.generate([greedy(PROMPT_TOKENS, OUTPUT_TOKENS)]), REPEATS)
    first = median_s(lambda: engine.generate([greedy(PROMPT_TOKENS, 1)]), REPEATS)
    return (OUTPUT_TOKENS - 1) / (whole - first)
