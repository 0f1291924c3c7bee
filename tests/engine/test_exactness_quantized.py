"""Within a scheme of ``--quantize`` everything holds that holds without: speculation, batches, chunks and the hand-off
change neither a token nor a bit. The model is tiny."""

from __future__ import annotations

import pytest

from kv_transfer.layout.compat import check_pairing
from paceline.engine.fingerprint import fingerprint_of
from paceline.errors import PairingRefused
from paceline.request import SequenceRequest
from tests.e2e.test_disaggregated_tiny import node_config
from tests.support.exactness import run
from tests.support.needs import needs_kernels
from tests.support.node_pair import pair
from tests.support.tiny_model import tiny_prefill_runner, tiny_request, tiny_runner

SCHEMES = ["w8a8", "w4a8", "w8a16", "w4a16"]
CHAIN: dict[str, object] = {"drafter": "ngram", "num_draft_tokens": 8}
TREE: dict[str, object] = {"drafter": "mtp", "num_draft_tokens": 3, "tree": "static", "tree_width": 3}
STATEFUL: dict[str, object] = {"drafter": "mtp", "num_draft_tokens": 4, "page_size": 1}

pytestmark = needs_kernels


def requests() -> list[SequenceRequest]:
    return [tiny_request(index=0), tiny_request(index=1, temperature=1.0), tiny_request(index=2, frequency_penalty=1.0)]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_speculation_batches_and_chunks_change_no_bit(scheme: str) -> None:
    plain = run(tiny_runner("bf16", drafter="none", quantize=scheme, prefix_cache=False), requests())
    dense = run(tiny_runner("bf16", drafter="none"), requests())
    assert [o.logit_bits for o in plain] != [o.logit_bits for o in dense]  # it was rounded
    for options, how in ((CHAIN, {"batch": 3}), (TREE, {"chunk_tokens": 5}), (STATEFUL, {"batch": 2})):
        runner = tiny_runner("bf16", quantize=scheme, **options)
        assert runner.bit_exact
        got = run(runner, requests(), **how)
        assert [(o.token_ids, o.logit_bits) for o in got] == [(o.token_ids, o.logit_bits) for o in plain]


async def test_apart_equals_together() -> None:
    options = STATEFUL | {"quantize": "w4a8"}
    together = run(tiny_runner("bf16", **options), requests())
    prefill, decode = tiny_prefill_runner("bf16", **options), tiny_runner("bf16", **options)
    async with pair(node_config(**options), prefill, decode) as nodes:
        apart = await nodes.run(requests(), concurrent=3)
    assert [outcome for outcome, _answer in apart] == together


def test_nodes_with_unlike_schemes_do_not_pair() -> None:
    prefill, decode = tiny_prefill_runner("bf16", quantize="w8a8"), tiny_runner("bf16", quantize="w4a8")
    with pytest.raises(PairingRefused) as refused:
        check_pairing(fingerprint_of(prefill), fingerprint_of(decode))
    assert refused.value.differing == ["quantize", "results"]
    assert prefill.identity.namespace() != decode.identity.namespace()
