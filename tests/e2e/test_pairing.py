"""Nodes that do not fit are refused at pairing, with both fingerprints (algorithms.md H3)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import grpc
import pytest
import torch

from decode_node.node import DecodeNode
from kv_transfer.layout.rows import RowSource, RowTarget
from paceline.config import NodeConfig
from paceline.engine.model_runner import ModelRunner
from paceline.errors import PairingRefused
from paceline.v1 import node_pb2
from prefill_node.node import PrefillNode
from tests.support.node_pair import pair
from tests.support.tiny_model import tiny_request, tiny_runner

Make = Callable[[], ModelRunner]
MISMATCHES: dict[str, tuple[Make, Make, str]] = {
    "drafter": (partial(tiny_runner, drafter="ngram"), partial(tiny_runner, drafter="none"), "drafter"),
    "modules": (partial(tiny_runner, drafter="mtp"), partial(tiny_runner, drafter="mtp", mtp_modules=3), "layout"),
    "dtype": (partial(tiny_runner, "bf16"), partial(tiny_runner, "fp32"), "dtype"),
    "weights": (partial(tiny_runner, "fp32", 1), partial(tiny_runner, "fp32", 2), "weights"),
    "checksum": (partial(tiny_runner, handoff_checksum=True), tiny_runner, "checksum"),
}


@pytest.mark.parametrize("what", MISMATCHES)
async def test_mismatch_is_refused(what: str) -> None:
    mine, theirs, field = MISMATCHES[what]
    async with pair(NodeConfig(model="tiny"), mine(), theirs()) as nodes:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await nodes.prefill_stub.Connect(node_pb2.ConnectRequest(decode_address=nodes.decode_address))
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        details = caught.value.details() or ""
        assert field in details.partition("differ")[0]
        assert "prefill:" in details
        assert "decode:" in details
        # The decode node still serves.
        answer = await nodes.generate(tiny_request(max_tokens=3), local_prefill=True)
        assert len(answer.token_ids) == 3


async def test_dtype_may_differ_where_both_allow_it(monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, decode = tiny_runner("fp32", page_size=4), tiny_runner("bf16", page_size=8)
    sent, landed = [], []
    gather, scatter = RowSource.gather, RowTarget.scatter

    def gathered(self: RowSource, layers: range, slots: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        sent.append(prefill.kv.gather(layers, slots))
        return gather(self, layers, slots, out)

    def scattered(self: RowTarget, layers: range, slots: torch.Tensor, data: torch.Tensor) -> None:
        landed.append(data.clone())
        scatter(self, layers, slots, data)

    monkeypatch.setattr(RowSource, "gather", gathered)
    monkeypatch.setattr(RowTarget, "scatter", scattered)
    async with pair(NodeConfig(model="tiny", handoff_dtype_cast=True), prefill, decode) as nodes:
        answer = await nodes.generate(tiny_request(max_tokens=9))
        assert len(answer.token_ids) == 9
        assert answer.accepted_per_round
        await nodes.all_released()
    assert sum(rows.numel() for rows in landed) > 0
    assert torch.equal(torch.cat(landed), torch.cat(sent).to(torch.bfloat16))


async def test_a_prefill_node_that_may_not_cast_refuses_too() -> None:
    prefill = PrefillNode(NodeConfig(model="tiny"), "prefill-0", tiny_runner("fp32"))
    decode = DecodeNode(NodeConfig(model="tiny", handoff_dtype_cast=True), "decode-0", tiny_runner("bf16"))
    await prefill.start()
    address = await decode.start()
    try:
        with pytest.raises(PairingRefused, match="dtype, layout, results differ"):
            await prefill.connect(address)
    finally:
        await prefill.stop(0.0)
        await decode.stop(0.0)


async def test_page_size_and_draft_length_may_differ() -> None:
    prefill = tiny_runner("bf16", page_size=4, num_draft_tokens=1)
    decode = tiny_runner("bf16", page_size=32, num_draft_tokens=5)
    async with pair(NodeConfig(model="tiny"), prefill, decode) as nodes:
        assert len((await nodes.generate(tiny_request(max_tokens=7))).token_ids) == 7
