"""With the KV cache in int8 everything holds that holds without: speculation, batches, chunks, prefix hits and the
hand-off change neither a token nor a bit. The model is tiny."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from kv_transfer.layout.compat import check_pairing
from paceline.assembly.build import build_runner
from paceline.config import NodeConfig, ServeConfig
from paceline.engine.fingerprint import fingerprint_of
from paceline.engine.model_runner import ModelRunner
from paceline.errors import ConfigError, PairingRefused
from paceline.kvcache.layout import KvLayer, KvLayout, LayerKind, LayerOwner
from paceline.request import SequenceRequest
from tests.e2e.test_disaggregated_tiny import node_config
from tests.support.exactness import Outcome, run
from tests.support.needs import needs_kernels
from tests.support.node_pair import pair
from tests.support.tiny_deepseek import write_folder
from tests.support.tiny_model import tiny_prefill_runner, tiny_request, tiny_runner
from tests.support.untrained_heads import write_tiny_head

INT8: dict[str, object] = {"kv_dtype": "int8"}
CHAIN: dict[str, object] = {"drafter": "ngram", "num_draft_tokens": 8}
TREE: dict[str, object] = {"drafter": "mtp", "num_draft_tokens": 3, "tree": "static", "tree_width": 3}
STATEFUL: dict[str, object] = {"drafter": "mtp", "num_draft_tokens": 4, "page_size": 1}
DRAFT_MODEL: dict[str, object] = {"drafter": "draft_model", "num_draft_tokens": 5}
EAGLE_ROWS: dict[str, object] = STATEFUL | {"handoff": "hidden_states"}

pytestmark = needs_kernels


def requests() -> list[SequenceRequest]:
    return [tiny_request(index=0), tiny_request(index=1, temperature=1.0), tiny_request(index=2, frequency_penalty=1.0)]


def bits(outcomes: list[Outcome]) -> list[object]:
    return [(outcome.token_ids, outcome.logit_bits) for outcome in outcomes]


def plainly(dtype: str) -> list[object]:
    """Plain decoding over int8 rows: without drafts, batches, chunks and cached prefixes."""
    return bits(run(tiny_runner(dtype, drafter="none", prefix_cache=False, **INT8), requests()))


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_speculation_batches_chunks_and_hits_change_no_bit(dtype: str) -> None:
    plain = plainly(dtype)
    assert plain != bits(run(tiny_runner(dtype, drafter="none"), requests()))  # it was rounded
    for options, how in (
        (CHAIN, {"batch": 3}),
        (TREE, {"chunk_tokens": 5}),
        (STATEFUL, {"batch": 2, "chunk_tokens": 1}),
    ):
        runner = tiny_runner(dtype, **options, **INT8)
        assert runner.bit_exact
        assert bits(run(runner, requests(), **how)) == plain
        assert bits(run(runner, requests(), **how)) == plain  # the prompts are cached now


@pytest.mark.parametrize(
    "options",
    [CHAIN, TREE, STATEFUL, EAGLE_ROWS, DRAFT_MODEL],
    ids=["chain", "tree", "draft_kv", "hidden", "draft_model"],
)
async def test_apart_equals_plain(options: dict[str, object], tmp_path: Path) -> None:
    options = options | INT8
    if options == DRAFT_MODEL | INT8:
        write_tiny_head(tmp_path / "draft", "draft_model")
        options["drafter_path"] = str(tmp_path / "draft")
    prefill, decode = tiny_prefill_runner("bf16", **options), tiny_runner("bf16", **options)
    async with pair(node_config(**options), prefill, decode) as nodes:
        apart = await nodes.run(requests(), concurrent=3)
    assert bits([outcome for outcome, _answer in apart]) == plainly("bf16")
    for request, (_outcome, answer) in zip(requests(), apart, strict=True):
        assert answer.handed_off is not None
        per_token = layers_of(decode) * 2 * 2 * (16 + 4)  # K and V of 2 heads: 16 codes and a scale
        assert answer.handed_off.bytes.target_kv == len(request.prompt_token_ids) * per_token


def layers_of(runner: ModelRunner) -> int:
    return runner.model.spec.num_layers


def test_replay_on_another_node_gives_the_same() -> None:
    """What was generated until a node was lost is computed again, as a part of the prompt."""
    request = tiny_request(temperature=1.0)
    whole = run(tiny_runner("bf16", **CHAIN, **INT8), [request])[0]
    replayed = replace(request, output_token_ids=tuple(whole.token_ids[:9]))
    rest = run(tiny_runner("bf16", **TREE, **INT8), [replayed], chunk_tokens=4)[0]
    assert list(rest.token_ids) == list(whole.token_ids[9:])
    assert rest.logit_bits == whole.logit_bits[9:]


def test_bytes_of_a_token_are_those_of_the_formula() -> None:
    layer = KvLayer(LayerKind.GQA, LayerOwner.TARGET, 3, 64)
    layout = KvLayout.of([layer] * 30, torch.bfloat16, "int8")
    assert layout.token_bytes(LayerOwner.TARGET) == 30 * 2 * 3 * (64 + 4)
    assert layout.hidden_dtype is torch.bfloat16


def test_nodes_with_unlike_kv_do_not_pair() -> None:
    prefill, decode = tiny_prefill_runner("bf16", **INT8), tiny_runner("bf16")
    with pytest.raises(PairingRefused) as refused:
        check_pairing(fingerprint_of(prefill), fingerprint_of(decode), dtype_cast=True)
    assert "kv_dtype" in refused.value.differing
    assert prefill.identity.namespace() != decode.identity.namespace()


def test_codes_are_not_cast() -> None:
    prefill, decode = tiny_prefill_runner("fp32", **INT8), tiny_runner("bf16", **INT8)
    with pytest.raises(PairingRefused):
        check_pairing(fingerprint_of(prefill), fingerprint_of(decode), dtype_cast=True)


def test_latents_are_refused() -> None:
    with pytest.raises(ConfigError, match="MLA"):
        KvLayout.of([KvLayer(LayerKind.MLA, LayerOwner.TARGET, 1, 576)], torch.bfloat16, "int8")


def test_latents_are_refused_before_weights_are_read(tmp_path: Path) -> None:
    """Mutant: the refusal comes with the KV cache, once all weights are there."""
    (write_folder(tmp_path) / "model.safetensors").unlink()
    config = NodeConfig.model_validate({"model": str(tmp_path), "drafter": "none"} | INT8)
    with pytest.raises(ConfigError, match=r"kv_dtype.*MLA"):
        build_runner(config)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"device": "cuda"}, "device"),
        ({"handoff_dtype_cast": True}, "handoff_dtype_cast"),
    ],
)
def test_what_has_no_int8_is_refused_by_name(options: dict[str, object], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        ServeConfig.model_validate(INT8 | options)


def test_it_is_no_option_of_a_role() -> None:
    with pytest.raises(ValidationError, match=r"prefill\.kv_dtype"):
        ServeConfig.model_validate({"prefill": INT8})
