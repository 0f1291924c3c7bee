"""Prefill and decode apart, on tiny models: tokens, logit bits and rounds equal the one-process run; bytes equal H4."""

from __future__ import annotations

import pytest

from paceline.config import NodeConfig
from paceline.kvcache.layout import LayerOwner
from paceline.request import SequenceRequest
from support.exactness import run
from support.pd import pair
from support.tiny import tiny_request, tiny_runner

CASES: dict[str, dict[str, object]] = {
    "none": {"drafter": "none"},
    "ngram": {"drafter": "ngram"},
    "mtp": {"drafter": "mtp", "num_draft_tokens": 3},
    "mtp tree": {"drafter": "mtp", "num_draft_tokens": 3, "tree": "static", "tree_width": 2},
    "mtp x3": {"drafter": "mtp", "mtp_modules": 3, "num_draft_tokens": 3, "tree": "static", "tree_width": 2},
}


def node_config(**options: object) -> NodeConfig:
    return NodeConfig.model_validate({"model": "tiny", "prefill_chunk_tokens": 5, "max_running": 8} | options)


def requests() -> list[SequenceRequest]:
    extras: list[dict[str, object]] = [
        {},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.9, "frequency_penalty": 0.4},
        {"max_tokens": 1},
        {"temperature": 1.0, "stop_token_ids": tuple(range(3, 60))},
        {"top_logprobs": 3, "max_tokens": 2},
    ]
    return [tiny_request(index=i, **extra) for i, extra in enumerate(extras)]


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("case", CASES)
async def test_apart_equals_together(dtype: str, case: str) -> None:
    options = CASES[case]
    together = run(tiny_runner(dtype, **options), requests())
    prefill = tiny_runner(dtype, page_size=16, **options)
    decode = tiny_runner(dtype, page_size=8, **options)
    async with pair(node_config(**options), prefill, decode) as nodes:
        for _ in range(2):  # the second time from the prefill node's prefix cache
            apart = await nodes.run(requests(), concurrent=3)
            for (outcome, _answer), expected in zip(apart, together, strict=True):
                assert outcome.token_ids == expected.token_ids
                assert outcome.logit_bits == expected.logit_bits
                assert outcome.accepted_per_round == expected.accepted_per_round
            await nodes.all_released()


@pytest.mark.parametrize("case", CASES)
async def test_wire_bytes_equal_the_formula(case: str) -> None:
    """H4, byte for byte: rows x token bytes of target and draft; hidden rows x width; nothing else."""
    options = CASES[case]
    runner = tiny_runner("bf16", prefix_cache=False, **options)
    async with pair(node_config(**options), runner, tiny_runner("bf16", **options)) as nodes:
        for request in (tiny_request(index=i, max_tokens=4) for i in range(3)):
            answer = await nodes.generate(request)
            assert answer.handed_off is not None
            sent, layout = answer.handed_off.bytes, runner.kv.layout
            rows = len(request.prompt_token_ids)
            modules = len(runner.drafter.kv_layers)
            hidden_rows = 0 if modules == 0 else max(1, modules - 1)
            assert sent.target_kv == rows * layout.token_bytes(LayerOwner.TARGET) == rows * 2 * 2 * 2 * 16 * 2
            assert sent.draft_kv == rows * layout.token_bytes(LayerOwner.DRAFT) == rows * modules * 2 * 2 * 16 * 2
            assert sent.hidden == hidden_rows * runner.hidden_size * 2
            assert 0 < sent.meta < 2000


async def test_decode_prefills_for_itself() -> None:
    options = CASES["mtp"]
    together = run(tiny_runner("bf16", **options), requests())
    async with pair(node_config(**options), tiny_runner("bf16", **options), tiny_runner("bf16", **options)) as nodes:
        for request, expected in zip(requests(), together, strict=True):
            answer = await nodes.generate(request, local_prefill=True)
            assert tuple(answer.token_ids) == expected.token_ids
        await nodes.all_released()
