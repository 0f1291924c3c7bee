"""A GPU node meets every kernel that serving may launch before it says that it is ready.

Triton compiles a kernel at the first call with new constants, and FlashInfer and cuBLAS load theirs likewise: that
takes a second or more, on the engine's thread. Which kernel a step takes follows from the model, the options, and a few
thresholds in numbers of rows. So forwards of some sizes and rounds of the node's own sequences meet them all, outside
of CUDA graphs too, since what fits no graph runs without.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from paceline.assembly.trial_sequences import TrialSequences
from paceline.engine.model_runner import ModelRunner
from paceline.kvcache.pool import KvPool
from paceline.request import SamplingParams, SpeculationParams
from paceline.sampling.device import warm_sampling
from paceline.spec_decode.accept.device_walk import warm_walk
from paceline.spec_decode.drafters.feature import FeatureDrafter
from paceline.spec_decode.length.adaptive import FixedLength
from paceline.triton_support import runs_triton

log = logging.getLogger(__name__)

# From 1, 17, 33 and 97 rows on products take another tile (layers/exact_products.py), and of widths that are no
# multiple of 16 another kernel for 16 rows.
TILES = (1, 16, 17, 32, 33, 97)
PROMPT_TOKENS, ROUNDS = 3, 2
MAX_TOKENS = 4096  # of a request that never runs so far
GREEDY = SamplingParams(temperature=0.0, seed=0, max_tokens=MAX_TOKENS)
SAMPLED = replace(GREEDY, temperature=1.0, top_p=0.9)


def warm_kernels(runner: ModelRunner, chunk_tokens: int, max_running: int, *, decodes: bool) -> None:
    """Launch what steps of up to ``chunk_tokens`` prompt tokens and ``max_running`` sequences may launch. decodes: also
    what rounds do. Nothing where no kernel has to be compiled; what does not fit the pool is left out."""
    device = runner.model.device
    if device.type != "cuda" and not runs_triton(device):
        return
    budget = runner.limits.budget
    warm_sampling(device, runner.vocab_size)
    warm_pages(runner.kv)
    warm_heads(runner, max_running * (budget.max_nodes if decodes else 1))
    with _eagerly(runner):
        for rows in row_counts(chunk_tokens):
            _prefill(runner, rows)
        if decodes:
            _rounds(runner, max_running)
    if decodes:
        warm_walk(device, budget.max_nodes)


def row_counts(most: int) -> list[int]:
    """Numbers of rows up to ``most``, one at least for each kernel that some number of rows takes: experts divide the
    rows among them, so that their tiles change at larger numbers."""
    doubled = [1 << power for power in range(6, most.bit_length())]
    return sorted({rows for rows in (*TILES, *doubled, most - 1, most) if 0 < rows <= most})


def warm_pages(pool: KvPool) -> None:
    """Rows of pages to a link's buffer and back, by layers of every width, which chooses the kernel."""
    slots, layers = torch.zeros(1, dtype=torch.int32), pool.held.layers
    for kind in set(layers):
        one = range(first := layers.index(kind), first + 1)
        pool.scatter(one, slots, pool.gather(one, slots))


def warm_heads(runner: ModelRunner, most_rows: int) -> None:
    """The LM head over up to ``most_rows`` rows."""
    model = runner.model
    for rows in row_counts(most_rows):
        model.logits(torch.zeros(rows, model.spec.hidden_size, dtype=model.dtype, device=model.device))


def _prefill(runner: ModelRunner, rows: int) -> None:
    """A prompt of so many tokens, which the drafter digests; several where one may not be so long."""
    longest = max(min(rows, runner.max_model_len - 1), 1)
    sizes = [longest] * (rows // longest) + ([rows % longest] if rows % longest else [])
    _tried(runner, [_prompt(runner, i, size) for i, size in enumerate(sizes)], 0)


def _rounds(runner: ModelRunner, max_running: int) -> None:
    """Rounds of several numbers of sequences, greedy and sampled."""
    for batch in row_counts(max_running):
        for params in (GREEDY, SAMPLED):
            _tried(runner, [_prompt(runner, i, PROMPT_TOKENS) for i in range(batch)], ROUNDS, params)


def _tried(runner: ModelRunner, prompts: list[list[int]], rounds: int, params: SamplingParams = GREEDY) -> None:
    """Prefill ``prompts`` together and decode them."""
    slots = rounds * (1 + runner.spec_slots)
    needed = sum(-(-(len(prompt) + slots) // runner.page_size) for prompt in prompts)
    if needed > runner.allocator.num_free:
        log.info("no room to warm %d prompts of %d tokens", len(prompts), sum(map(len, prompts)))
        return
    speculation = SpeculationParams(drafter=runner.drafter.name)
    with TrialSequences(runner) as trial:
        trial.add(prompts, MAX_TOKENS, slots, speculation, params)
        for _ in range(rounds):
            if live := [seq for seq in trial.seqs if seq.finish_reason is None]:
                runner.decode(live)


def _prompt(runner: ModelRunner, index: int, num_tokens: int) -> list[int]:
    """It repeats itself, so that n-grams match."""
    return [(7919 * index + 13 * (p % 3)) % runner.vocab_size for p in range(num_tokens)]


@contextmanager
def _eagerly(runner: ModelRunner) -> Iterator[None]:
    """Without graphs, and nothing is learnt of how drafts fare."""
    drafter = runner.drafter.primary
    stepping = drafter if isinstance(drafter, FeatureDrafter) else None
    graphs, policy, own = runner.graphs, runner.policy, None if stepping is None else stepping.graphs
    runner.graphs, runner.policy = None, FixedLength()
    if stepping is not None:
        stepping.graphs = None
    try:
        yield
    finally:
        runner.graphs, runner.policy = graphs, policy
        if stepping is not None:
            stepping.graphs = own
