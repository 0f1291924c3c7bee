"""Prefill and decode apart on the real model: 20 prompts x 20 tokens, temperature 0 or 1.

Tokens, logit bits and rounds equal the one-process run. Every drafter and fp32: test_disaggregated_matrix.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.assembly.build import assemble, build_runner
from paceline.config import NodeConfig
from tests.support.exactness import run
from tests.support.needs import needs_kernels
from tests.support.node_pair import pair
from tests.support.prompts import one_temperature_each, prompt_requests

pytestmark = [needs_kernels, pytest.mark.real_model, pytest.mark.timeout(600)]


async def test_apart_equals_together(smollm2_folder: Path) -> None:
    config = NodeConfig.model_validate(
        {
            "model": str(smollm2_folder),
            "dtype": "bf16",
            "drafter": "mtp",
            "num_draft_tokens": 4,
            "kv_cache_tokens": 8192,
            "prefill_chunk_tokens": 48,
            "max_running": 16,
        }
    )
    first = build_runner(config)
    requests = one_temperature_each(prompt_requests(smollm2_folder, 20))
    together = run(first, requests, batch=20)
    decode_config = config.model_copy(update={"page_size": 64})
    prefill, decode = (assemble(c, first.model, first.identity) for c in (config, decode_config))
    async with pair(config, prefill, decode) as nodes:
        apart = await nodes.run(requests, concurrent=16)
        await nodes.all_released()
    for (outcome, _), expected in zip(apart, together, strict=True):
        assert outcome.token_ids == expected.token_ids
        assert outcome.logit_bits == expected.logit_bits
        assert outcome.accepted_per_round == expected.accepted_per_round
