"""Prefill and decode nodes of several ranks over real gRPC and gloo: what crosses knows nothing of ranks.

A mutant that fails with one KV head: rows are written past a pool whose rank 0 has all heads. One that fails with
latents: they are scattered to rank 0 alone.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.kvcache.layout import LayerOwner
from paceline.models.config import ModelSpec
from tests.support.exactness import run
from tests.support.needs import needs_kernels
from tests.support.node_pair import pair
from tests.support.thread_ranks import family_spec, ranks_runner, ranks_spec
from tests.support.tiny_deepseek import write_mtp_folder
from tests.support.tiny_model import tiny_config, tiny_request
from tests.support.untrained_heads import write_tiny_head

pytestmark = needs_kernels


def copies_kept(spec: ModelSpec, degree: int) -> int:
    """How often the ranks of a node hold each head or latent: as often it crosses (algorithms.md H4)."""
    return degree if spec.mla else max(1, degree // spec.num_kv_heads)


MODELS: dict[str, tuple[tuple[int, int], str, ModelSpec, str]] = {  # degrees, handoff, spec, kv_dtype
    "llama": ((8, 2), "draft_kv", ranks_spec(2), "auto"),
    "one KV head": ((1, 4), "hidden_states", ranks_spec(1), "auto"),
    "int8": ((2, 4), "draft_kv", ranks_spec(2), "int8"),
    "latents and experts": ((4, 2), "draft_kv", family_spec("deepseek_v3"), "auto"),
}
CASES = [*((name, "direct") for name in MODELS), *((name, "through-0") for name in MODELS if name != "int8")]


@pytest.mark.parametrize(("name", "rank_links"), CASES)
async def test_degrees_may_differ(name: str, rank_links: str, tmp_path: Path) -> None:
    """Each prompt is sent twice, so that the second finds its prefix cached on both sides."""
    degrees, handoff, spec, kv_dtype = MODELS[name]
    drafter = "mtp" if spec.mla else "eagle3"
    if spec.mla:
        write_mtp_folder(tmp_path / "heads", 1, torch.bfloat16, spec=spec)
    else:
        write_tiny_head(tmp_path / "heads", drafter, spec)
    options: dict[str, object] = {
        "drafter": drafter, "drafter_path": str(tmp_path / "heads"), "head_check": False, "handoff": handoff,
        "prefill_chunk_tokens": 16, "kv_dtype": kv_dtype, "rank_links": rank_links,
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
                copies = copies_kept(spec, degrees[1]) if rank_links == "direct" else 1
                assert answer.handed_off.bytes.target_kv == rows * copies * alone.kv.layout.token_bytes(
                    LayerOwner.TARGET
                )
        await nodes.all_released()
