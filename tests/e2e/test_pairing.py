"""Nodes that do not fit are refused at pairing, with both fingerprints (design section 7)."""

from __future__ import annotations

import grpc
import pytest

from paceline.config import NodeConfig
from paceline.v1 import node_pb2
from support.pd import pair
from support.tiny import tiny_request, tiny_runner

MISMATCHES: dict[str, tuple[dict[str, object], dict[str, object], str]] = {
    "drafter": ({"drafter": "ngram"}, {"drafter": "none"}, "drafter"),
    "modules": ({"drafter": "mtp"}, {"drafter": "mtp", "mtp_modules": 3}, "layout"),
    "dtype": ({"dtype": "bf16"}, {"dtype": "fp32"}, "dtype"),
    "weights": ({"seed": 1}, {"seed": 2}, "weights"),
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


async def test_page_size_and_draft_length_may_differ() -> None:
    prefill = tiny_runner("bf16", page_size=4, num_draft_tokens=1)
    decode = tiny_runner("bf16", page_size=32, num_draft_tokens=5)
    async with pair(NodeConfig(model="tiny"), prefill, decode) as nodes:
        assert len((await nodes.generate(tiny_request(max_tokens=7))).token_ids) == 7
