"""The real model in fp32: 12 prompts x 20 tokens at temperature 0 or 1, one process, and transformers as the oracle.

Trees and drafters in fp32: test_exactness_matrix.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.exactness import run
from tests.support.needs import needs_kernels
from tests.support.prompts import EOS
from tests.support.real_engines import NUM_TOKENS, Engines

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(900)]

ALONE = 4  # requests that fp32 also runs one at a time; bf16 runs all so


@pytest.fixture(scope="module")
def fp32(smollm2_folder: Path) -> Engines:
    """Plain answers in batches of 8; ``test_fp32_alone`` takes the rest of the way."""
    return Engines(smollm2_folder, "fp32", 8)


@needs_kernels
def test_fp32_alone(fp32: Engines) -> None:
    """With our own kernels the bits are equal, too."""
    got = run(fp32.variant(prefix_cache=False), fp32.requests[:ALONE], batch=1)
    assert [(g.token_ids, g.logit_bits) for g in got] == [(p.token_ids, p.logit_bits) for p in fp32.plain[:ALONE]]


@pytest.mark.filterwarnings("ignore")
def test_fp32_greedy_equals_transformers(smollm2_folder: Path, fp32: Engines) -> None:
    """The outside oracle, on the same weights: after every beginning of our text, its best token is our next one, so it
    would have written the same text by itself. Two models of this size would fill a worker: ours goes."""
    from transformers import AutoModelForCausalLM

    greedy = [pair for pair in zip(fp32.requests, fp32.plain, strict=True) if pair[0].params.temperature == 0.0]
    fp32.unload()
    reference = AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32)
    assert len(greedy) == 6
    for request, ours in greedy:
        text = torch.tensor([[*request.prompt_token_ids, *ours.token_ids]])
        with torch.inference_mode():
            logits = reference(text).logits[0, len(request.prompt_token_ids) - 1 : -1]
        assert logits.argmax(dim=1).tolist() == list(ours.token_ids), request.request_id
        assert len(ours.token_ids) == NUM_TOKENS or ours.token_ids[-1] == EOS
