"""The codes that a checkpoint holds give the same bits whoever drafts and wherever: drafters with and without heads in
one batch, chunks, prefill and decode apart in both hand-off modes, and a replay.

The kinds of weights are those that ``--quantize`` does not make; test_exactness_quantized has the others. What drafts
is in codes too, by the scheme of its target.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from paceline.assembly.build import build_runner
from paceline.config import NodeConfig
from paceline.request import SequenceRequest, SpeculationParams
from tests.models.quantization import test_checkpoints as checkpoints
from tests.support.exactness import Outcome, run
from tests.support.needs import needs_kernels
from tests.support.node_pair import pair
from tests.support.proposed import proposed_by
from tests.support.quantised_files import Draw, compressed, packed, quantise_folder
from tests.support.tiny_deepseek import write_folder
from tests.support.tiny_model import tiny_request, tiny_spec
from tests.support.untrained_heads import write_tiny_head, write_tiny_model

pytestmark = needs_kernels

SPEC = replace(tiny_spec(208), tie_word_embeddings=False)  # GPTQ and AWQ pack outputs by eight
OWN = "in the target"
LOOKUPS = ("ngram", "suffix", "trie", "lookahead", "none")
CHUNK, LOST_AFTER = 5, 4
Scheme = tuple[dict[str, Any], Callable[[str], Draw | None]]
Bits = list[tuple[tuple[int, ...], tuple[str, ...]]]


def of_case(name: str) -> Scheme:
    """Codes for every matrix but embeddings, the target's LM head, and what DeepSeek leaves out."""
    config, draw = checkpoints.CASES[name]
    kept = ("embed_tokens", "shared_head.head", "mlp.gate", *(("eh_proj",) if config is checkpoints.BLOCKS else ()))
    return config, lambda layer: None if layer == "lm_head" or layer.endswith(kept) else draw(layer)


def unlike() -> Scheme:
    """Rows of 8 bits in k, v, down and the LM head; groups of 4 in the others, some of which are multiplied with k and
    v."""
    eights = ("k_proj", "v_proj", "down_proj", "lm_head")
    config = compressed("mixed-precision", checkpoints.INT4 | {"symmetric": False}, ignore=[])
    targets = [f"re:.*{name}$" for name in eights]
    config["config_groups"]["group_1"] = {"targets": targets, "weights": checkpoints.ROWS, "input_activations": None}
    rows, groups = packed(8, -1, zeros=False), packed(4, 32, zeros=True)
    return config, lambda layer: None if "embed" in layer else rows if layer.endswith(eights) else groups


@dataclass(frozen=True)
class Case:
    """Codes of a target and of what drafts for it."""

    scheme: Scheme
    drafter: str
    options: Mapping[str, object] = field(default_factory=dict)
    head: str = ""  # where the drafter has another name
    handoffs: tuple[str, ...] = ("draft_kv", "hidden_states")


DYNAMIC = {"tree": "dynamic", "tree_width": 3}
CASES: dict[str, Case] = {
    "fp8 blocks, experts, latents": Case(of_case("fp8 blocks"), "mtp", {"num_draft_tokens": 2}, head=OWN),
    "fp8 rows": Case(of_case("fp8 rows"), "auto", DYNAMIC | {"num_draft_tokens": 4}, head="eagle3"),
    "gptq": Case(of_case("gptq 4 sym"), "mtp", DYNAMIC),
    "unlike, and the LM head": Case(unlike(), "eagle", {"num_draft_tokens": 3, "dtype": "fp32"}),
    "nvfp4": Case(of_case("ct nvfp4"), "draft_model", handoffs=("draft_kv",)),
    "mxfp4": Case(of_case("ct mxfp4"), "medusa", {"tree": "static"}, handoffs=("draft_kv",)),
}
HEADS = {  # the codes of each kind; GPTQ's have biases of zeros beside them
    "eagle": "fp8 blocks", "eagle3": "ct w4a16", "medusa": "ct nvfp4", "mtp": "gptq 4 asym", "draft_model": "awq",
}  # fmt: skip


def written(root: Path, case: Case) -> tuple[NodeConfig, NodeConfig]:
    """The case's target and head below ``root``: the configuration of a node without drafts, and of one with them."""
    target, head = root / "target", root / "head"
    drafting: dict[str, object] = {"drafter": case.drafter, "drafters": ",".join(LOOKUPS)}
    if case.head == OWN:
        write_folder(target)
    else:
        write_tiny_model(target, SPEC)
        write_tiny_head(head, case.head or case.drafter, SPEC)
        quantise_folder(head, *case.scheme)
        drafting["drafter_path"] = str(head)
    quantise_folder(target, *case.scheme)
    common = {"model": str(target), "dtype": "bf16", "kv_cache_tokens": 2048, "page_size": 4, "head_check": False}
    common |= {"prefill_chunk_tokens": CHUNK} | dict(case.options)
    plain = {"drafter": "none", "prefix_cache": False}
    return NodeConfig.model_validate(common | plain), NodeConfig.model_validate(common | drafting)


def requests(case: Case) -> list[SequenceRequest]:
    """Two by the heads, of temperature 0 and 1, one by each drafter without, and one by what the deployment takes."""
    name = case.head if case.drafter == "auto" else case.drafter
    names = (name, name, *LOOKUPS, None)
    asked = [tiny_request(index=i, max_tokens=10, temperature=float(i % 2)) for i in range(len(names))]
    return [replace(one, speculation=SpeculationParams(drafter=n)) for one, n in zip(asked, names, strict=True)]


def bits(outcomes: list[Outcome]) -> Bits:
    return [(one.token_ids, one.logit_bits) for one in outcomes]


def by_name(proposed: list[tuple[str, tuple[int, ...]]]) -> list[tuple[str, tuple[int, ...]]]:
    """What was proposed to the requests that name the heads: what ``auto`` takes depends on measured seconds."""
    return sorted(one for one in proposed if one[0] in ("r0", "r1"))


@pytest.mark.parametrize("name", CASES)
async def test_whoever_drafts_together_and_apart(name: str, tmp_path: Path) -> None:
    """Text and bits of plain decoding, and on the decode node the drafts of one process.

    Mutants: products of one kind of codes whose rows have other bits among more than four, in a case of its own each
    (float8 by blocks or rows, whole numbers of 4 bits with and without minimums, of 8 in groups and rows, the LM head,
    float4 by numbers and powers of two); draft KV, proposals, or hidden rows that cross as zeros or not at all; a
    replay of another token.
    """
    asked, (undrafted, drafting) = requests(CASES[name]), written(tmp_path, CASES[name])
    plain, alone = bits(run(build_runner(undrafted), asked)), build_runner(drafting)
    assert alone.bit_exact
    proposed = proposed_by(alone)
    assert bits(run(alone, asked, batch=4, chunk_tokens=CHUNK)) == plain
    for handoff in CASES[name].handoffs:
        config = drafting.model_copy(update={"handoff": handoff})
        decode = build_runner(config)
        apart = proposed_by(decode)
        async with pair(config, build_runner(config, decodes=False), decode) as nodes:
            assert bits([outcome for outcome, _ in await nodes.run(asked, concurrent=4)]) == plain
            await nodes.all_released()
        assert by_name(apart) == by_name(proposed) != []
    rest = [(tokens[LOST_AFTER:], seen[LOST_AFTER:]) for tokens, seen in plain]
    lost = [replace(one, output_token_ids=plain[i][0][:LOST_AFTER]) for i, one in enumerate(asked)]
    assert bits(run(alone, lost, batch=3, chunk_tokens=CHUNK + 2)) == rest


@pytest.mark.parametrize("drafter", HEADS)
def test_heads_in_codes_propose_what_the_codes_mean(drafter: str, tmp_path: Path) -> None:
    """Text alone would not tell: a head that is read wrongly is accepted less. Mutants: heads read without their
    scales, or with one for a whole tensor; EAGLE's fc in bf16 beside rows in fp32; Medusa's codes taken for floats;
    biases of zeros refused.
    """
    write_tiny_model(tmp_path / "target", SPEC)
    proposed = []
    for name in ("codes", "floats"):
        head = tmp_path / name
        write_tiny_head(head, drafter, SPEC)
        quantise_folder(head, *of_case(HEADS[drafter]), meant=name == "floats")
        options = {"model": str(tmp_path / "target"), "dtype": "fp32", "kv_cache_tokens": 1024, "head_check": False}
        drafting = {"drafter": drafter, "drafter_path": str(head), "num_draft_tokens": 3, "tree": "static"}
        runner = build_runner(NodeConfig.model_validate(options | drafting))
        proposed.append(proposed_by(runner))
        run(runner, [tiny_request(index=i, max_tokens=8, temperature=float(i)) for i in range(2)])
    assert proposed[0] == proposed[1] != []
