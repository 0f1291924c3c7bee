"""Prefill and decode apart, on tiny models: tokens, logit bits and rounds equal the one-process run; bytes equal H4."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.config import NodeConfig
from paceline.kvcache.layout import LayerOwner
from paceline.request import SequenceRequest
from tests.support.asked import Asked
from tests.support.exactness import run
from tests.support.needs import needs_kernels
from tests.support.node_pair import pair
from tests.support.tiny_model import tiny_request, tiny_runner
from tests.support.untrained_heads import write_tiny_head

CASES: dict[str, dict[str, object]] = {
    "none": {"drafter": "none"},
    "ngram": {"drafter": "ngram"},
    "mtp": {"drafter": "mtp", "num_draft_tokens": 3},
    "mtp tree": {"drafter": "mtp", "num_draft_tokens": 3, "tree": "static", "tree_width": 2},
    "mtp x3": {"drafter": "mtp", "mtp_modules": 3, "num_draft_tokens": 3, "tree": "static", "tree_width": 2},
    "mtp sampled": {"drafter": "mtp", "num_draft_tokens": 3, "draft_sampling": "sampled"},
    "eagle": {"drafter": "eagle", "num_draft_tokens": 3},
    "eagle3": {"drafter": "eagle3", "num_draft_tokens": 4},
    "eagle3 dynamic": {"drafter": "eagle3", "num_draft_tokens": 3, "tree": "dynamic", "tree_width": 3},
    "medusa": {"drafter": "medusa", "num_draft_tokens": 3, "tree": "static"},
    "draft model": {"drafter": "draft_model", "num_draft_tokens": 3},
}
IN_FP32 = ("mtp x3", "eagle3 dynamic", "medusa", "draft model")  # one of each kind of state
# Draft KV layers of width 2 heads x 16, and hidden rows of the draft state.
CROSSES = {"none": (0, 0), "ngram": (0, 0), "mtp x3": (3, 2), "medusa": (0, 1), "draft model": (1, 0)}


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Untrained heads of every kind, and a draft model."""
    folder = tmp_path_factory.mktemp("heads")
    for name in ("eagle", "eagle3", "medusa", "draft_model"):
        write_tiny_head(folder / name, name)
    return folder


def options_of(case: str, heads: Path) -> dict[str, object]:
    """The case's options, with the path of its heads."""
    folder = heads / str(CASES[case]["drafter"])
    return CASES[case] | ({"drafter_path": str(folder)} if folder.exists() else {})


def node_config(**options: object) -> NodeConfig:
    return NodeConfig.model_validate({"model": "tiny", "prefill_chunk_tokens": 5, "max_running": 8} | options)


def requests() -> list[SequenceRequest]:
    extras: list[Asked] = [
        {},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.9, "frequency_penalty": 0.4},
        {"max_tokens": 1},
        {"temperature": 1.0, "stop_token_ids": tuple(range(3, 60))},
        {"top_logprobs": 3, "max_tokens": 2},
    ]
    return [tiny_request(index=i, **extra) for i, extra in enumerate(extras)]


@pytest.mark.parametrize(
    ("case", "dtype"),
    [*(pytest.param(case, "bf16", marks=needs_kernels) for case in CASES), *((case, "fp32") for case in IN_FP32)],
)
async def test_apart_equals_together(case: str, dtype: str, heads: Path) -> None:
    options = options_of(case, heads)
    together = run(tiny_runner(dtype, **options), requests())
    prefill = tiny_runner(dtype, page_size=16, **options)
    decode = tiny_runner(dtype, page_size=8, **options)
    async with pair(node_config(**options), prefill, decode) as nodes:
        for _ in range(2):  # the second time from the prefill node's prefix cache
            apart = await nodes.run(requests(), concurrent=3)
            for (outcome, _answer), expected in zip(apart, together, strict=True):
                assert outcome.token_ids == expected.token_ids
                assert outcome.logit_bits == expected.logit_bits or not decode.bit_exact
                assert outcome.accepted_per_round == expected.accepted_per_round
            await nodes.all_released()


@pytest.mark.parametrize("case", CASES)
async def test_wire_bytes_equal_the_formula(case: str, heads: Path) -> None:
    """H4, byte for byte: rows x token bytes of target and draft; hidden rows x width; nothing else."""
    options = options_of(case, heads)
    runner = tiny_runner("bf16", prefix_cache=False, **options)
    async with pair(node_config(**options), runner, tiny_runner("bf16", **options)) as nodes:
        for request in (tiny_request(index=i, max_tokens=4) for i in range(3)):
            answer = await nodes.generate(request)
            assert answer.handed_off is not None
            sent, layout = answer.handed_off.bytes, runner.kv.layout
            rows = len(request.prompt_token_ids)
            modules, hidden_rows = CROSSES.get(case, (1, 1))
            assert modules == len(runner.drafter.kv_layers)
            assert sent.target_kv == rows * layout.token_bytes(LayerOwner.TARGET) == rows * 2 * 2 * 2 * 16 * 2
            assert sent.draft_kv == rows * layout.token_bytes(LayerOwner.DRAFT) == rows * modules * 2 * 2 * 16 * 2
            assert sent.hidden == hidden_rows * runner.handoff.hidden_size * 2
            assert 0 < sent.meta < 2000


async def test_decode_prefills_for_itself() -> None:
    options = CASES["mtp"]
    together = run(tiny_runner("bf16", **options), requests())
    async with pair(node_config(**options), tiny_runner("bf16", **options), tiny_runner("bf16", **options)) as nodes:
        for request, expected in zip(requests(), together, strict=True):
            answer = await nodes.generate(request, local_prefill=True)
            assert tuple(answer.token_ids) == expected.token_ids
        await nodes.all_released()
