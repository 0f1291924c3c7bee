"""Prefill and decode nodes of several ranks over real gRPC and gloo: what crosses knows nothing of ranks.

A mutant that fails with one KV head: rows are written past a pool whose rank 0 has all heads.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.kvcache.layout import LayerOwner
from tests.support.exactness import run
from tests.support.needs import needs_kernels
from tests.support.node_pair import pair
from tests.support.thread_ranks import ranks_runner, ranks_spec
from tests.support.tiny_model import tiny_config, tiny_request
from tests.support.untrained_heads import write_tiny_head

pytestmark = needs_kernels


@pytest.mark.parametrize(("degrees", "handoff", "kv_heads"), [((8, 2), "draft_kv", 2), ((1, 4), "hidden_states", 1)])
async def test_degrees_may_differ(degrees: tuple[int, int], handoff: str, kv_heads: int, tmp_path: Path) -> None:
    """Each prompt is sent twice, so that the second finds its prefix cached on both sides."""
    spec = ranks_spec(kv_heads)
    write_tiny_head(tmp_path / "heads", "eagle3", spec)
    options: dict[str, object] = {
        "drafter": "eagle3", "drafter_path": str(tmp_path / "heads"), "head_check": False, "handoff": handoff,
        "prefill_chunk_tokens": 16,
    }  # fmt: skip
    requests = [tiny_request(list(range(3 + i, 60 + i)), index=i, temperature=float(i % 2)) for i in range(3)]
    alone = ranks_runner(1, spec, "bf16", **options)
    together = run(alone, requests)
    runners = [
        ranks_runner(degree, spec, "bf16", **options | {"page_size": size, "decodes": size == 16})
        for degree, size in zip(degrees, (8, 16), strict=True)
    ]
    async with pair(tiny_config("bf16", options), *runners) as nodes:
        for turn in range(2):
            apart = await nodes.run(requests, concurrent=2)
            assert [outcome.token_ids for outcome, _ in apart] == [outcome.token_ids for outcome in together]
            assert [outcome.logit_bits for outcome, _ in apart] == [outcome.logit_bits for outcome in together]
            for request, (_, answer) in zip(requests, apart, strict=True):
                assert answer.handed_off is not None
                cached = 48 if turn else 0  # whole pages on both sides
                rows = len(request.prompt_token_ids) - cached
                assert answer.handed_off.bytes.target_kv == rows * alone.kv.layout.token_bytes(LayerOwner.TARGET)
        await nodes.all_released()
