"""The signature on the real model: 20 prompts x 64 tokens at temperature 0 and 1, one process.

bf16: logit bits and tokens. fp32: tokens (and, with our kernels, bits as well). The disaggregated half is
tests/e2e/test_disaggregated.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.exactness import Outcome, run
from support.prompts import prompt_requests

from paceline.config import NodeConfig
from paceline.engine.build import assemble, build_runner
from paceline.engine.model_runner import ModelRunner
from paceline.layers.build import set_threads
from paceline.models.base import TargetModel

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(900)]

NUM_TOKENS = 64
VARIANTS: dict[str, tuple[dict[str, object], dict[str, int]]] = {
    "plain, batch of 8": ({"drafter": "none"}, {"batch": 8}),
    "ngram K=1": ({"drafter": "ngram", "num_draft_tokens": 1}, {"batch": 8}),
    "ngram K=4, alone": ({"drafter": "ngram", "num_draft_tokens": 4}, {"batch": 1}),
    "ngram K=8, tree, pages of 64": (
        {"drafter": "ngram", "num_draft_tokens": 8, "tree_width": 3, "page_size": 64},
        {"batch": 8},
    ),
    "mtp K=4, chunks of 7": ({"drafter": "mtp", "num_draft_tokens": 4}, {"batch": 40, "chunk_tokens": 7}),
    "mtp K=8, tree": ({"drafter": "mtp", "num_draft_tokens": 8, "tree_width": 2}, {"batch": 40}),
    "mtp of 3 modules, no prefix cache, chunks of 64": (
        {"drafter": "mtp", "mtp_modules": 3, "num_draft_tokens": 3, "prefix_cache": False},
        {"batch": 40, "chunk_tokens": 64},
    ),
    "chunks of 1": ({"drafter": "none", "page_size": 64}, {"batch": 8, "chunk_tokens": 1}),
}
FP32_VARIANTS = ["ngram K=8, tree, pages of 64", "mtp K=4, chunks of 7", "plain, batch of 8"]


class Engines:
    """Runners over one loaded target."""

    def __init__(self, folder: Path, dtype: str) -> None:
        self.config = NodeConfig(model=str(folder), dtype=dtype, drafter="none", threads=2, kv_cache_tokens=16384)  # type: ignore[arg-type]
        self.first = build_runner(self.config)
        self.requests = prompt_requests(folder, NUM_TOKENS)

    def variant(self, **options: object) -> ModelRunner:
        model: TargetModel = self.first.model
        config = NodeConfig.model_validate(self.config.model_dump() | options)
        return assemble(config, model, self.first.identity)


@pytest.fixture(scope="module", params=["bf16", "fp32"])
def engines(request: pytest.FixtureRequest, smollm2_folder: Path) -> Iterator[Engines]:
    yield Engines(smollm2_folder, request.param)
    set_threads(1)
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def plain(engines: Engines) -> list[Outcome]:
    """Plain one-process decoding, alone, no cache: what every variant must equal."""
    return run(engines.variant(prefix_cache=False), engines.requests, batch=1)


@pytest.mark.parametrize("variant", VARIANTS)
def test_tokens_and_bits(variant: str, engines: Engines, plain: list[Outcome]) -> None:
    if engines.config.dtype == "fp32" and variant not in FP32_VARIANTS:
        pytest.skip("fp32 runs the three most different variants; bf16 runs all")
    options, how = VARIANTS[variant]
    runner = engines.variant(**options)
    assert runner.bit_exact
    got = run(runner, engines.requests, **how)
    assert [g.token_ids for g in got] == [p.token_ids for p in plain]
    assert [g.logit_bits for g in got] == [p.logit_bits for p in plain]


def test_cached_prefixes_change_nothing(engines: Engines, plain: list[Outcome]) -> None:
    """The second pass takes its prompts from the prefix cache."""
    runner = engines.variant(drafter="mtp", num_draft_tokens=2)
    requests, expected = engines.requests[:10], plain[:10]
    for _ in range(2):
        got = run(runner, requests, batch=5)
        assert [(g.token_ids, g.logit_bits) for g in got] == [(p.token_ids, p.logit_bits) for p in expected]
    assert runner.prefix is not None
    assert runner.prefix.hit_tokens > 0


@pytest.mark.filterwarnings("ignore")
def test_fp32_greedy_equals_transformers(smollm2_folder: Path, engines: Engines, plain: list[Outcome]) -> None:
    """The outside oracle: transformers' own generate on the same weights."""
    if engines.config.dtype != "fp32":
        pytest.skip("compared in fp32")
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(2)
    reference = AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32)
    for request, ours in zip(engines.requests, plain, strict=True):
        if request.params.temperature > 0:
            continue
        prompt = torch.tensor([request.prompt_token_ids])
        with torch.inference_mode():
            theirs = reference.generate(
                prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=NUM_TOKENS
            )[0, prompt.shape[1] :].tolist()
        assert list(ours.token_ids) == theirs, request.request_id
