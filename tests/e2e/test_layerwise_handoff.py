"""Rows that leave layer by layer while later layers compute, and draft rows before the prompt's end: the same texts,
logit bits, rounds and bytes as ever. Thresholds are so small here that every layer of every chunk is a message."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from paceline.config import NodeConfig
from paceline.engine.model_runner import ModelRunner
from paceline.kvcache.layout import LayerOwner
from paceline.layers.build import load_kernels
from paceline.request import SequenceRequest
from paceline.results import TraceEvent
from paceline.v1 import trace_pb2
from paceline.wire import trace_from_proto
from tests.support.asked import Asked
from tests.support.exactness import run
from tests.support.needs import NO_KERNELS
from tests.support.node_pair import Pair, pair
from tests.support.tiny_deepseek import tiny_deepseek_runner, write_mtp_folder
from tests.support.tiny_model import tiny_prefill_runner, tiny_request, tiny_runner
from tests.support.untrained_heads import write_tiny_head

CASES: dict[str, dict[str, object]] = {
    "eagle3": {"drafter": "eagle3", "num_draft_tokens": 4},
    "mtp x3": {"drafter": "mtp", "mtp_modules": 3, "num_draft_tokens": 3},
    "draft model": {"drafter": "draft_model", "num_draft_tokens": 3},
    "medusa": {"drafter": "medusa", "num_draft_tokens": 3},
    "eagle3, hidden rows": {"drafter": "eagle3", "num_draft_tokens": 4, "handoff": "hidden_states"},
    "deepseek": {"drafter": "mtp", "num_draft_tokens": 2},
}


@pytest.fixture(autouse=True)
def every_layer_is_a_message() -> Iterator[None]:
    layer_bytes = 5 * 2 * 2 * 16 * 2  # of a chunk; 5 * (48 + 16) * 2 with latents
    with (
        patch("prefill_node.groups.MIN_BYTES", 1),
        patch("prefill_node.engine.sends.MIN_BYTES", 1),
        patch("prefill_node.groups.MESSAGE_BYTES", layer_bytes),
    ):
        yield


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("heads")
    for name in ("eagle3", "medusa", "draft_model"):
        write_tiny_head(folder / name, name)
    write_mtp_folder(folder / "deepseek", 2, torch.bfloat16)
    return folder


def options_of(case: str, heads: Path) -> dict[str, object]:
    folder = heads / ("deepseek" if case == "deepseek" else str(CASES[case]["drafter"]))
    return CASES[case] | ({"drafter_path": str(folder)} if folder.exists() else {})


def make_runner(case: str, options: dict[str, object], page_size: int, decodes: bool) -> ModelRunner:
    if case == "deepseek":
        return tiny_deepseek_runner("bf16", page_size=page_size, **options)
    return (tiny_runner if decodes else tiny_prefill_runner)("bf16", page_size=page_size, **options)


def requests() -> list[SequenceRequest]:
    extras: list[Asked] = [
        {},
        {"temperature": 1.0},
        {"max_tokens": 1},
        {"stop_token_ids": tuple(range(199))},
    ]
    return [tiny_request(index=i, **extra) for i, extra in enumerate(extras)]


def node_config(options: dict[str, object]) -> NodeConfig:
    return NodeConfig.model_validate({"model": "tiny", "prefill_chunk_tokens": 5, "max_running": 8} | options)


async def chunks_sent(nodes: Pair, request: SequenceRequest, byte_class: str) -> list[TraceEvent]:
    """The latest attempt's, in order."""
    message = await nodes.prefill_stub.Trace(trace_pb2.TraceRequest(request_id=request.request_id))
    events = trace_from_proto(request.request_id, message).events
    found = [e for e in events if e.name == "chunk sent" and e.attributes["byte_class"] == byte_class]
    return [event for event in found if event.attempt == max(e.attempt for e in found)]


@pytest.mark.parametrize("case", CASES)
async def test_apart_equals_together(case: str, heads: Path) -> None:
    if case == "deepseek" and load_kernels() is None:
        pytest.skip(NO_KERNELS)
    options = options_of(case, heads)
    together = run(make_runner(case, options, 16, True), requests())
    prefill, decode = make_runner(case, options, 16, False), make_runner(case, options, 8, True)
    async with pair(node_config(options), prefill, decode) as nodes:
        for _ in range(2):  # the second time from the prefill node's prefix cache
            apart = await nodes.run(requests(), concurrent=3)
            assert [outcome for outcome, _ in apart] == together
            await nodes.all_released()


@pytest.mark.parametrize("case", CASES)
async def test_messages_are_single_layers_and_their_bytes_the_formula(case: str, heads: Path) -> None:
    """H4: the cut changes no byte count but that of the descriptors."""
    if case == "deepseek" and load_kernels() is None:
        pytest.skip(NO_KERNELS)
    options = options_of(case, heads) | {"prefix_cache": False}
    prefill, decode = make_runner(case, options, 16, False), make_runner(case, options, 8, True)
    async with pair(node_config(options), prefill, decode) as nodes:
        request = tiny_request(index=1, max_tokens=4)
        answer = await nodes.generate(request)
        assert answer.handed_off is not None
        layout, rows = prefill.kv.layout, len(request.prompt_token_ids)
        assert answer.handed_off.bytes.target_kv == rows * layout.token_bytes(LayerOwner.TARGET)
        assert answer.handed_off.bytes.draft_kv == rows * layout.token_bytes(LayerOwner.DRAFT)
        target = await chunks_sent(nodes, request, "target_kv")
        full = [e for e in target if e.attributes["num_tokens"] == 5]
        assert len(full) == rows // 5 * len(layout.layer_range(LayerOwner.TARGET))
        assert {e.attributes["num_layers"] for e in full} == {1}
        if len(layout.layer_range(LayerOwner.DRAFT)):
            draft = await chunks_sent(nodes, request, "draft_kv")
            assert len(draft) >= rows // 5
            assert sum(float(e.attributes["num_tokens"]) for e in draft) == rows


async def test_a_first_token_that_ends_the_request_leaves_its_draft_rows_unused(heads: Path) -> None:
    """They were on their way before it was known."""
    options = options_of("eagle3", heads) | {"prefix_cache": False}
    prefill, decode = make_runner("eagle3", options, 16, False), make_runner("eagle3", options, 8, True)
    request = tiny_request(index=2, max_tokens=1)
    async with pair(node_config(options), prefill, decode) as nodes:
        answer = await nodes.generate(request)
        assert answer.handed_off is not None
        whole = len(request.prompt_token_ids) * prefill.kv.layout.token_bytes(LayerOwner.DRAFT)
        assert 0 < answer.handed_off.bytes.draft_kv < whole
        assert answer.token_ids == list(run(make_runner("eagle3", options, 16, True), [request])[0].token_ids)
        await nodes.all_released()
