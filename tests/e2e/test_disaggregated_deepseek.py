"""Prefill and decode apart with latent pages and two MTP modules: bits equal the one-process run, bytes equal H4."""

from __future__ import annotations

import pytest
import torch

from paceline.config import NodeConfig
from paceline.kvcache.layout import LayerOwner
from tests.support.exactness import run
from tests.support.needs import needs_kernels
from tests.support.node_pair import pair
from tests.support.tiny_deepseek import tiny_deepseek_runner, write_mtp_folder
from tests.support.tiny_model import tiny_request

pytestmark = needs_kernels

LATENT_BYTES = (48 + 16) * 2  # kv_lora_rank and rope part, bf16


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    heads = write_mtp_folder(tmp_path_factory.mktemp("heads"), 2, torch.bfloat16)
    return {"drafter": "mtp", "drafter_path": str(heads), "num_draft_tokens": 2}


async def test_apart_equals_together(options: dict[str, object]) -> None:
    requests = [tiny_request(index=i, temperature=i % 2, max_tokens=12) for i in range(4)]
    together = run(tiny_deepseek_runner("bf16", **options), requests)
    prefill = tiny_deepseek_runner("bf16", page_size=16, **options)
    decode = tiny_deepseek_runner("bf16", page_size=8, **options)
    config = NodeConfig.model_validate({"model": "tiny", "prefill_chunk_tokens": 5, "max_running": 8} | options)
    async with pair(config, prefill, decode) as nodes:
        for _ in range(2):  # the second time from the prefill node's prefix cache
            apart = await nodes.run(requests, concurrent=3)
            assert [outcome for outcome, _ in apart] == together
            await nodes.all_released()


async def test_wire_bytes_equal_the_formula(options: dict[str, object]) -> None:
    runner = tiny_deepseek_runner("bf16", prefix_cache=False, **options)
    config = NodeConfig.model_validate({"model": "tiny", "prefill_chunk_tokens": 5, "max_running": 8} | options)
    async with pair(config, runner, tiny_deepseek_runner("bf16", **options)) as nodes:
        request = tiny_request(index=1, max_tokens=4)
        answer = await nodes.generate(request)
        assert answer.handed_off is not None
        sent, rows = answer.handed_off.bytes, len(request.prompt_token_ids)
        assert sent.target_kv == rows * runner.kv.layout.token_bytes(LayerOwner.TARGET) == rows * 3 * LATENT_BYTES
        assert sent.draft_kv == rows * 2 * LATENT_BYTES
