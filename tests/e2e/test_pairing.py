"""Nodes that do not fit are refused at pairing, with both fingerprints (algorithms.md H3)."""

from __future__ import annotations

import grpc
import pytest
import torch

from decode_node.node import DecodeNode
from kv_transfer.layout.rows import RowSource, RowTarget
from paceline.config import NodeConfig
from paceline.errors import PairingRefused
from paceline.v1 import node_pb2
from prefill_node.node import PrefillNode
from support.node_pair import pair
from support.tiny_model import tiny_request, tiny_runner

MISMATCHES: dict[str, tuple[dict[str, object], dict[str, object], str]] = {
    "drafter": ({"drafter": "ngram"}, {"drafter": "none"}, "drafter"),
    "modules": ({"drafter": "mtp"}, {"drafter": "mtp", "mtp_modules": 3}, "layout"),
    "dtype": ({"dtype": "bf16"}, {"dtype": "fp32"}, "dtype"),
    "weights": ({"seed": 1}, {"seed": 2}, "weights"),
    "checksum": ({"handoff_checksum": True}, {}, "checksum"),
}


@pytest.mark.parametrize("what", MISMATCHES)
async def test_mismatch_is_refused(what: str) -> None:
    mine, theirs, field = MISMATCHES[what]
    prefill, decode = tiny_runner(**mine), tiny_runner(**theirs)  # type: ignore[arg-type]
    async with pair(NodeConfig(model="tiny"), prefill, decode) as nodes:
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
        with pytest.raises(PairingRefused, match="dtype, layout differ"):
            await prefill.connect(address)
    finally:
        await prefill.stop(0.0)
        await decode.stop(0.0)


async def test_page_size_and_draft_length_may_differ() -> None:
    prefill = tiny_runner("bf16", page_size=4, num_draft_tokens=1)
    decode = tiny_runner("bf16", page_size=32, num_draft_tokens=5)
    async with pair(NodeConfig(model="tiny"), prefill, decode) as nodes:
        assert len((await nodes.generate(tiny_request(max_tokens=7))).token_ids) == 7
