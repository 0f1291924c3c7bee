"""Within a scheme of ``--quantize`` everything holds that holds without: speculation, batches, chunks, the hand-off and
a replay change neither a token nor a bit. The model is tiny."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kv_transfer.layout.compat import check_pairing
from paceline.engine.fingerprint import fingerprint_of
from paceline.errors import PairingRefused
from paceline.request import SequenceRequest
from tests.e2e.test_disaggregated_tiny import CASES, node_config
from tests.support.exactness import Outcome, run
from tests.support.needs import needs_kernels
from tests.support.node_pair import pair
from tests.support.tiny_model import tiny_prefill_runner, tiny_request, tiny_runner
from tests.support.untrained_heads import write_tiny_head

SCHEMES = ["w8a8", "w4a8", "w8a16", "w4a16"]
CHAIN: dict[str, object] = {"drafter": "ngram", "num_draft_tokens": 8}
TREE: dict[str, object] = {"drafter": "mtp", "num_draft_tokens": 3, "tree": "static", "tree_width": 3}
STATEFUL: dict[str, object] = {"drafter": "mtp", "num_draft_tokens": 4, "page_size": 1}
HEADS = ("eagle", "eagle3", "medusa", "draft_model")
BY_STATE = ("ngram", "mtp x3", "eagle", "eagle3 dynamic", "medusa", "draft model")
APART = [  # a drafter of each kind of state, in a scheme by turns; those with rows of their own in both ways
    *((case, SCHEMES[i % 4], "draft_kv") for i, case in enumerate(BY_STATE)),
    *((case, SCHEMES[i % 4], "hidden_states") for i, case in enumerate(("mtp x3", "eagle", "eagle3 dynamic", "mtp"))),
]

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


@pytest.mark.parametrize(("case", "scheme", "handoff"), APART)
async def test_apart_equals_together_equals_plain(case: str, scheme: str, handoff: str, tmp_path: Path) -> None:
    options = CASES[case] | {"quantize": scheme, "handoff": handoff}
    if (name := str(options["drafter"])) in HEADS:
        write_tiny_head(tmp_path / name, name)
        options["drafter_path"] = str(tmp_path / name)
    together = run(tiny_runner("bf16", **options), requests())
    assert bits(together) == bits(run(tiny_runner("bf16", drafter="none", quantize=scheme), requests()))
    prefill, decode = tiny_prefill_runner("bf16", **options), tiny_runner("bf16", **options)
    async with pair(node_config(**options), prefill, decode) as nodes:
        apart = await nodes.run(requests(), concurrent=3)
    assert [outcome for outcome, _answer in apart] == together


@pytest.mark.parametrize("scheme", SCHEMES)
def test_replay_on_another_node_gives_the_same(scheme: str) -> None:
    """What was generated until a node was lost is computed again, as a part of the prompt."""
    request = tiny_request(temperature=1.0)
    whole = run(tiny_runner("bf16", quantize=scheme, **CHAIN), [request])[0]
    replayed = replace(request, output_token_ids=tuple(whole.token_ids[:9]))
    rest = run(tiny_runner("bf16", quantize=scheme, **TREE), [replayed], chunk_tokens=4)[0]
    assert list(rest.token_ids) == list(whole.token_ids[9:])
    assert rest.logit_bits == whole.logit_bits[9:]


def bits(outcomes: list[Outcome]) -> list[object]:
    return [(outcome.token_ids, outcome.logit_bits) for outcome in outcomes]


def test_nodes_with_unlike_schemes_do_not_pair() -> None:
    prefill, decode = tiny_prefill_runner("bf16", quantize="w8a8"), tiny_runner("bf16", quantize="w4a8")
    with pytest.raises(PairingRefused) as refused:
        check_pairing(fingerprint_of(prefill), fingerprint_of(decode))
    assert refused.value.differing == ["quantize", "results"]
    assert prefill.identity.namespace() != decode.identity.namespace()
