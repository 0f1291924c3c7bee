"""The signature on the real model in bf16: 12 prompts x 20 tokens at temperature 0 or 1, one process. Bits and tokens.

Batches, chunks and caches; which drafter drafts, and trees, are varied in test_exactness_matrix.py. fp32:
test_exactness_real_fp32.py. Apart: tests/e2e/test_disaggregated_matrix.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.exactness import run
from tests.support.needs import needs_kernels
from tests.support.real_engines import NUM_PROMPTS, Engines

pytestmark = [needs_kernels, pytest.mark.real_model, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def bf16(smollm2_folder: Path) -> Engines:
    """Plain answers one request at a time."""
    return Engines(smollm2_folder, "bf16", 1)


def test_together_and_in_chunks(bf16: Engines) -> None:
    runner = bf16.variant(drafter="mtp", num_draft_tokens=4)
    assert runner.bit_exact
    got = run(runner, bf16.requests, batch=NUM_PROMPTS, chunk_tokens=7)
    assert [(g.token_ids, g.logit_bits) for g in got] == [(p.token_ids, p.logit_bits) for p in bf16.plain]


def test_cached_prefixes_change_nothing(bf16: Engines) -> None:
    """The second pass takes its prompts from the prefix cache."""
    runner = bf16.variant(drafter="mtp", num_draft_tokens=2)
    requests, expected = bf16.requests[:6], bf16.plain[:6]
    for _ in range(2):
        got = run(runner, requests, batch=3)
        assert [(g.token_ids, g.logit_bits) for g in got] == [(p.token_ids, p.logit_bits) for p in expected]
    assert runner.prefix is not None
    assert runner.prefix.hit_tokens > 0
