"""A model of any number of ranks gives the bits of one rank, however its rows are batched.

Mutants that fail: branches added in the order of the ranks, branches or rows of experts rounded to bf16, a sum of an
all-reduce, experts added in the order of the ranks, a follower that leaves a command out, a follower that is one step
behind with the slots it copies, a KV head that two ranks hold taken twice, columns rounded after they were cut, sinks
of all heads on every rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.assembly.selfcheck import logits_in_chunks
from paceline.attention.base import ForwardBatch, Segment
from paceline.engine.model_runner import ModelRunner
from paceline.kvcache.table import PageTable
from paceline.layers.build import load_kernels
from paceline.layers.quantized import LinearWeight
from paceline.models.base import ForwardContext
from paceline.models.config import ModelSpec
from paceline.models.hub import resolve_model
from paceline.models.quantization.round_to_nearest import SCHEMES
from paceline.models.registry import DTYPES, open_checkpoint
from paceline.ranks.degrees import degrees
from paceline.ranks.follower import Follower
from tests.support.exactness import digest, run
from tests.support.gguf_files import write_gguf
from tests.support.needs import needs_kernels
from tests.support.quantized_weights import KINDS
from tests.support.ranks_matrix import DEGREES, FORMATS, KNOWING, SPECS, WHOLE, OneRank, drafters, requests
from tests.support.thread_ranks import family_spec, ranks_runner, ranks_spec, ranks_tensors

pytestmark = needs_kernels

VOCAB = 519
ROWS = 41
FAMILIES = ("qwen3_moe", "glm4_moe", "glm4_moe, MLPs on rank 0", "gpt_oss", "gemma3", "deepseek_v3")


def wide_spec() -> ModelSpec:
    """Whose slabs hold whole groups of 128."""
    return ranks_spec(head_dim=128, intermediate_size=1024)


def all_of_llama(kv_heads: int) -> ModelSpec:
    """With biases, norms on heads and a window."""
    return ranks_spec(
        kv_heads, attention_bias=True, attention_out_bias=True, mlp_bias=True, qk_norm=True, windows=(0, 16),
        tie_word_embeddings=False,
    )  # fmt: skip


# Number format, --quantize or a kind or "int8 KV", degrees.
MODELS: dict[str, tuple[ModelSpec, str, str, tuple[int, ...]]] = {
    "heads-8-fp32": (all_of_llama(8), "fp32", "none", (1, 2, 4, 8)),
    "heads-8-fp32 collective": (all_of_llama(8), "fp32", "none", (1, 2, 8)),
    "heads-2-bf16 collective": (all_of_llama(2), "bf16", "none", (1, 4)),
    "deepseek-bf16 collective": (family_spec("deepseek_v3"), "bf16", "none", (1, 4)),
    "glm4-moe-alone collective": (family_spec("glm4_moe, MLPs on rank 0"), "bf16", "none", (1, 2)),
    "heads-2-bf16": (all_of_llama(2), "bf16", "none", (1, 2, 4, 8)),
    "int8-kv-bf16": (all_of_llama(2), "bf16", "int8 KV", (1, 2, 8)),
    "deepseek-fp32": (family_spec("deepseek_v3"), "fp32", "none", (1, 2, 4)),
    "deepseek-bf16": (family_spec("deepseek_v3"), "bf16", "none", (1, 4)),
    "deepseek-w8a16": (family_spec("deepseek_v3"), "bf16", "w8a16", (1, 2)),
    "deepseek-fp32 dealt": (family_spec("deepseek_v3"), "fp32", "none", (1, 2)),
    "deepseek-bf16 dealt collective": (family_spec("deepseek_v3"), "bf16", "none", (1, 4)),
    "deepseek-w8a16 dealt": (family_spec("deepseek_v3"), "bf16", "w8a16", (1, 2)),
    "qwen3-moe-bf16": (family_spec("qwen3_moe"), "bf16", "none", (1, 2, 8)),
    "glm4-moe-fp32": (family_spec("glm4_moe"), "fp32", "none", (1, 4)),
    "glm4-moe-alone": (family_spec("glm4_moe, MLPs on rank 0"), "bf16", "none", (1, 4)),
    "gpt-oss-bf16": (family_spec("gpt_oss"), "bf16", "none", (1, 2, 4)),
    "gemma3-fp32": (family_spec("gemma3"), "fp32", "none", (1, 4)),
    "llama-w8a8": (wide_spec(), "bf16", "w8a8", (1, 2, 8)),
    "llama-w4a8": (wide_spec(), "bf16", "w4a8", (1, 2)),
    "llama-w4a16": (wide_spec(), "fp32", "w4a16", (1, 2)),
    "llama-groups": (wide_spec(), "bf16", "w8a8 groups of 128", (1, 2, 4)),
    "llama-files": (wide_spec(), "bf16", "of files", (1, 2)),
}


def kind_of(name: str) -> str:
    """A kind for the attention and for the MLP of each of two layers."""
    attention, mlp = ("float8", "float4") if ".0." in name else ("w4a16 groups of 128", "float4 over a number")
    return attention if "self_attn" in name else mlp


def every_model() -> dict[str, tuple[ModelSpec, str, str, tuple[int, ...]]]:
    """Every number format and degree, each in bf16 with collective sums too; what is quantised has every degree."""
    found = {name: (*model[:3], degrees(model[0])) for name, model in MODELS.items() if model[2] != "none"}
    shapes = {f"heads-{count}": all_of_llama(count) for count in (8, 4, 2, 1)}
    shapes |= {family: family_spec(family) for family in FAMILIES}
    for (name, spec), dtype in itertools.product(shapes.items(), FORMATS):
        for kind in ("cut", "dealt") if spec.mla else ("cut",):
            for sums in ("sockets", "collective") if dtype == "bf16" else ("sockets",):
                found[f"{name}-{dtype} {kind} {sums}"] = (spec, dtype, "none", degrees(spec))
    return found


EVERY_MODEL = every_model()


@pytest.fixture(scope="module")
def runners(request: pytest.FixtureRequest) -> Iterator[dict[int, ModelRunner]]:
    """Runners of one rank and of several."""
    spec, dtype, kind, fitting = (MODELS | EVERY_MODEL)[request.param]
    floats = ranks_tensors(spec, DTYPES[dtype])
    weights: dict[str, LinearWeight] = dict(floats)
    options: dict[str, object] = {"drafter": "none", "kv_cache_tokens": 1024}
    options |= {"quantize": kind if kind in SCHEMES else "none"}
    options["rank_sums"] = "collective" if "collective" in request.param else "sockets"
    if kind == "int8 KV":
        options["kv_dtype"] = "int8"
    elif kind not in (*SCHEMES, "none"):
        names = [name for name in floats if "_proj.w" in name]
        weights |= {name: KINDS[kind_of(name) if kind == "of files" else kind](floats[name]) for name in names}
    made = {}
    for degree in fitting:
        options["attention_dp"] = degree if "dealt" in request.param else 1
        made[degree] = ranks_runner(degree, spec, dtype, Follower, weights, **options)
    yield made
    for runner in made.values():
        runner.close()


@pytest.mark.cases("runners", list(MODELS), list(EVERY_MODEL), indirect=True, scope="module")
@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=st.lists(st.sets(st.integers(1, ROWS - 1), max_size=4), min_size=1, max_size=3), seed=st.integers(0, 999))
def test_logits_and_rows(
    runners: dict[int, ModelRunner], cuts: list[set[int]], seed: int, same_rows: Callable[..., None]
) -> None:
    """Texts that are run side by side, each in chunks of its own."""
    texts = [[(7919 * i + seed + 31 * number) % VOCAB for i in range(ROWS)] for number in range(len(cuts))]
    seen = {degree: logits_and_rows(runner, texts, cuts) for degree, runner in runners.items()}
    for logits, rows in seen.values():
        same_rows(*(list(map(digest, side)) for side in (logits, seen[1][0])))
        for one, other in zip(rows, seen[1][1], strict=True):
            assert torch.equal(one, other)


def test_a_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of five types, whose rows are interleaved."""
    load_kernels()
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    write_gguf(tmp_path / "tiny.gguf", "llama")
    folder = resolve_model(str(tmp_path / "tiny.gguf"))
    spec, weights, seen = ModelSpec.from_folder(folder), open_checkpoint(folder, torch.bfloat16), []
    for degree in (1, 2, 4):
        runner = ranks_runner(degree, spec, "bf16", Follower, weights, drafter="none", max_model_len=128)
        seen.append(
            logits_in_chunks(runner.model, runner.kv, runner.allocator, runner.attention, [*range(30)], (23, 7))
        )
        runner.close()
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0], seen[2])


def logits_and_rows(
    runner: ModelRunner, texts: list[list[int]], cuts: list[set[int]]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logits of all rows, a batch after the other, and what the pool gives of the first text. cuts: where the chunks of
    each text begin, but the first."""
    assert runner.bit_exact
    part = runner.allocator.parts - 1  # where sequences are dealt, rank 0 attends none of these rows
    tables = [PageTable(runner.allocator, runner.page_size, part=part) for _ in texts]
    bounds = [[0, *sorted(cut), ROWS] for cut in cuts]
    logits = []
    try:
        for table in tables:
            table.ensure(ROWS)
        for step in range(max(map(len, bounds)) - 1):
            batch = [
                Segment.linear(text[slice(*bound[step : step + 2])], bound[step], table.slots)
                for text, bound, table in zip(texts, bounds, tables, strict=True)
                if step < len(bound) - 1
            ]
            built = ForwardBatch.build(batch, runner.model.device)
            hidden = runner.model.forward(ForwardContext.build(built, runner.kv, runner.attention))
            logits.append(runner.model.logits(hidden))
        return torch.cat(logits), rows_of(runner, tables[0])
    finally:
        for table in tables:
            table.release()


def rows_of(runner: ModelRunner, table: PageTable) -> list[torch.Tensor]:
    """What the pool gives, after rows were moved, stored and read again."""
    kv, layers = runner.kv, range(2)
    table.ensure(3 * ROWS)
    slots = table.slots.to(torch.int64)
    first, second, third = slots[:ROWS], slots[ROWS : 2 * ROWS], slots[2 * ROWS : 3 * ROWS]
    before = kv.gather(layers, first)
    kv.copy_slots(layers, first, first.flip(0))
    flipped = kv.gather(layers, first)
    kv.scatter(layers, second, before)
    kv.scatter(range(1, 2), third, before[before.numel() // 2 :])
    starts, lengths = torch.tensor([0, 5], dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
    kv.keep_paths(layers, second[:5].int(), starts, lengths, torch.tensor([[2, 4]], dtype=torch.int32))
    return [before, flipped, kv.gather(layers, second), kv.gather(range(1, 2), third)]


FEW_DRAFTERS = [
    ("2 KV heads", "bf16", "eagle3", "dynamic", 4, 1),
    ("2 KV heads", "bf16", KNOWING, "dynamic", 4, 1),
    ("latents and experts", "bf16", "mtp", "chain", 4, 1),
    ("latents and experts", "bf16", "mtp", "dynamic", 4, 1),
    ("latents and experts", "bf16", KNOWING, "dynamic", 4, 4),
]
EVERY_DRAFTER = [
    (model, dtype, drafter, tree, degree, pools)
    for model, dtype, degree in itertools.product(WHOLE, FORMATS, DEGREES[1:])
    for drafter, tree in (
        *((name, "dynamic") for name in drafters(model)),
        (KNOWING, "dynamic"),
        ("none", "chain"),
        ("mtp", "chain"),
    )
    for pools in ((1, degree) if SPECS[model].mla else (1,))
]


@pytest.mark.cases(("model", "dtype", "drafter", "tree", "degree", "pools"), FEW_DRAFTERS, EVERY_DRAFTER)
def test_drafts_are_the_same(
    model: str,
    dtype: str,
    drafter: str,
    tree: str,
    degree: int,
    pools: int,
    one_rank: OneRank,
    same_outcomes: Callable[..., bool],
) -> None:
    """Rounds, and logits behind every token: trees are verified and compacted on all ranks, heads run on rank 0. The
    second turn finds its prompts cached."""
    runner = one_rank.runner(degree, model, dtype, drafter, tree, attention_dp=pools)
    for batch, chunk_tokens in ((3, 23), (2, 100)):
        outcomes = run(runner, requests(tree), batch=batch, chunk_tokens=chunk_tokens)
        assert same_outcomes(outcomes, one_rank.outcomes(model, dtype, drafter, tree))
    runner.close()
