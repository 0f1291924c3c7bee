"""The signature on the real model: 20 prompts x 64 tokens at temperature 0 and 1, one process.

Batches, chunks, pages and caches; which drafter drafts is varied in test_exactness_matrix.py. bf16: logit bits and
tokens. fp32: tokens (and, with our kernels, bits as well). Apart: tests/e2e/test_disaggregated_real.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from paceline.config import NodeConfig
from paceline.engine.build import assemble, build_runner
from paceline.engine.model_runner import ModelRunner
from paceline.layers.build import set_threads
from support.exactness import run
from support.prompts import prompt_requests

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(900)]

NUM_TOKENS = 64
Options = dict[str, object]
How = dict[str, int]
BF16: dict[str, tuple[Options, How]] = {
    "plain, batch of 8": ({"drafter": "none"}, {"batch": 8}),
    "ngram K=8, tree, pages of 64": (
        {"drafter": "ngram", "num_draft_tokens": 8, "tree": "static", "tree_width": 3, "page_size": 64},
        {"batch": 8},
    ),
    "mtp K=4, chunks of 7": ({"drafter": "mtp", "num_draft_tokens": 4}, {"batch": 40, "chunk_tokens": 7}),
    "chunks of 1": ({"drafter": "none", "page_size": 64}, {"batch": 40, "chunk_tokens": 1}),
}
FP32 = ("ngram K=8, tree, pages of 64",)
ALONE = 4  # requests that fp32 also runs one at a time; bf16 runs all so
WITH_TRANSFORMERS = 16  # requests of which the greedy ones, every second, are compared with transformers' own text


class Engines:
    """Runners over one loaded target, and its plain answers: no drafts, no prefix cache."""

    def __init__(self, folder: Path, dtype: str, batch: int) -> None:
        options = {"model": str(folder), "dtype": dtype, "drafter": "none", "threads": 2, "kv_cache_tokens": 16384}
        self.config = NodeConfig.model_validate(options)
        self.first = build_runner(self.config)
        self.requests = prompt_requests(folder, NUM_TOKENS)
        self.plain = run(self.variant(prefix_cache=False), self.requests, batch=batch)

    def variant(self, **options: object) -> ModelRunner:
        """A runner with other options around the same weights."""
        config = NodeConfig.model_validate(self.config.model_dump() | options)
        return assemble(config, self.first.model, self.first.identity)

    def answers(self, options: Options, how: How) -> list[tuple[object, object]]:
        """Tokens and logit bits of a variant."""
        runner = self.variant(**options)
        assert runner.bit_exact
        return [(got.token_ids, got.logit_bits) for got in run(runner, self.requests, **how)]

    @property
    def right(self) -> list[tuple[object, object]]:
        """The same of the plain answers."""
        return [(plain.token_ids, plain.logit_bits) for plain in self.plain]


@pytest.fixture(scope="module")
def bf16(smollm2_folder: Path) -> Iterator[Engines]:
    """Plain answers one request at a time."""
    yield Engines(smollm2_folder, "bf16", 1)
    set_threads(1)
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def fp32(smollm2_folder: Path) -> Iterator[Engines]:
    """Plain answers in batches of 8; ``test_fp32_alone`` takes the rest of the way."""
    yield Engines(smollm2_folder, "fp32", 8)
    set_threads(1)
    torch.set_num_threads(1)


@pytest.mark.parametrize("variant", BF16)
def test_bf16_tokens_and_bits(variant: str, bf16: Engines) -> None:
    assert bf16.answers(*BF16[variant]) == bf16.right


@pytest.mark.parametrize("variant", FP32)
def test_fp32_tokens(variant: str, fp32: Engines) -> None:
    """With our own kernels the bits are equal, too."""
    assert fp32.answers(*BF16[variant]) == fp32.right


def test_fp32_alone(fp32: Engines) -> None:
    got = run(fp32.variant(prefix_cache=False), fp32.requests[:ALONE], batch=1)
    assert [g.token_ids for g in got] == [p.token_ids for p in fp32.plain[:ALONE]]


def test_cached_prefixes_change_nothing(bf16: Engines) -> None:
    """The second pass takes its prompts from the prefix cache."""
    runner = bf16.variant(drafter="mtp", num_draft_tokens=2)
    requests, expected = bf16.requests[:10], bf16.plain[:10]
    for _ in range(2):
        got = run(runner, requests, batch=5)
        assert [(g.token_ids, g.logit_bits) for g in got] == [(p.token_ids, p.logit_bits) for p in expected]
    assert runner.prefix is not None
    assert runner.prefix.hit_tokens > 0


@pytest.mark.filterwarnings("ignore")
def test_fp32_greedy_equals_transformers(smollm2_folder: Path, fp32: Engines) -> None:
    """The outside oracle: transformers' own generate on the same weights."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(2)
    reference = AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32)
    for request, ours in list(zip(fp32.requests, fp32.plain, strict=True))[:WITH_TRANSFORMERS]:
        if request.params.temperature > 0:
            continue
        prompt = torch.tensor([request.prompt_token_ids])
        with torch.inference_mode():
            theirs = reference.generate(
                prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=NUM_TOKENS
            )[0, prompt.shape[1] :].tolist()
        assert list(ours.token_ids) == theirs, request.request_id
