"""A model of any number of ranks gives the bits of one rank, however its rows are batched.

Mutants that fail: branches added in the order of the ranks, branches or rows of experts rounded to bf16, a sum of an
all-reduce, experts added in the order of the ranks, a follower that leaves a command out, a KV head that two ranks hold
taken twice, columns rounded after they were cut, sinks of all heads on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.assembly.selfcheck import logits_in_chunks
from paceline.engine.model_runner import ModelRunner
from paceline.kvcache.table import PageTable
from paceline.layers.build import load_kernels
from paceline.layers.quantized import LinearWeight
from paceline.models.config import ModelSpec
from paceline.models.hub import resolve_model
from paceline.models.quantization.round_to_nearest import SCHEMES
from paceline.models.registry import DTYPES, open_checkpoint
from paceline.ranks.follower import Follower
from tests.support.exactness import run
from tests.support.gguf_files import write_gguf
from tests.support.needs import needs_kernels
from tests.support.quantized_weights import KINDS
from tests.support.thread_ranks import family_spec, ranks_runner, ranks_spec, ranks_tensors
from tests.support.tiny_deepseek import write_mtp_folder
from tests.support.tiny_model import tiny_request
from tests.support.untrained_heads import write_tiny_head

pytestmark = needs_kernels

VOCAB = 519
ROWS = 41


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
    "llama-float8": (wide_spec(), "bf16", "float8", (1, 2)),
}


@pytest.fixture(scope="module", params=MODELS)
def runners(request: pytest.FixtureRequest) -> Iterator[dict[int, ModelRunner]]:
    """Runners of one rank and of several."""
    spec, dtype, kind, degrees = MODELS[request.param]
    floats = ranks_tensors(spec, DTYPES[dtype])
    weights: dict[str, LinearWeight] = dict(floats)
    options: dict[str, object] = {"drafter": "none", "kv_cache_tokens": 1024}
    options |= {"quantize": kind if kind in SCHEMES else "none"}
    options["rank_sums"] = "collective" if "collective" in request.param else "sockets"
    if kind == "int8 KV":
        options["kv_dtype"] = "int8"
    elif kind not in (*SCHEMES, "none"):
        weights |= {name: KINDS[kind](tensor) for name, tensor in floats.items() if "_proj.w" in name}
    made = {}
    for degree in degrees:
        options["attention_dp"] = degree if "dealt" in request.param else 1
        made[degree] = ranks_runner(degree, spec, dtype, Follower, weights, **options)
    yield made
    for runner in made.values():
        runner.close()


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=st.sets(st.integers(1, ROWS - 1), max_size=4), seed=st.integers(0, 999))
def test_logits_and_rows(runners: dict[int, ModelRunner], cuts: set[int], seed: int) -> None:
    ids = [(7919 * i + seed) % VOCAB for i in range(ROWS)]
    ends = [*sorted(cuts), ROWS]
    chunks = tuple(end - start for start, end in zip([0, *ends], ends, strict=False))
    seen = {}
    for degree, runner in runners.items():
        assert runner.bit_exact
        last = runner.allocator.parts - 1  # where sequences are dealt, rank 0 attends none of these rows
        logits = logits_in_chunks(runner.model, runner.kv, runner.allocator, runner.attention, ids, chunks, last)
        seen[degree] = logits, rows_of(runner)
    for logits, rows in seen.values():
        assert torch.equal(logits, seen[1][0])
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


def rows_of(runner: ModelRunner) -> list[torch.Tensor]:
    """What the pool gives, after rows were moved, stored and read again."""
    kv, layers = runner.kv, range(2)
    table = PageTable(runner.allocator, kv.page_size, part=runner.allocator.parts - 1)
    try:
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
    finally:
        table.release()


@pytest.mark.parametrize(
    ("family", "drafter", "tree", "pools"),
    [
        ("llama", "eagle3", "dynamic", 1),
        ("deepseek_v3", "mtp", "chain", 1),
        ("deepseek_v3", "mtp", "dynamic", 1),
        ("deepseek_v3", "mtp", "dynamic", 4),
    ],
)
def test_drafts_are_the_same(family: str, drafter: str, tree: str, pools: int, tmp_path: Path) -> None:
    """Rounds, and logits behind every token: trees are verified and compacted on all ranks, heads run on rank 0."""
    spec = family_spec(family)
    if drafter == "mtp":
        write_mtp_folder(tmp_path / "heads", 1, torch.bfloat16, spec=spec)
    else:
        write_tiny_head(tmp_path / "heads", drafter, spec)
    options: dict[str, object] = {"drafter": drafter, "drafter_path": str(tmp_path / "heads")}
    options |= {"head_check": False, "tree": tree}
    requests = [tiny_request(index=i, max_tokens=12, temperature=float(i % 2)) for i in range(4)]
    outcomes = []
    for degree in (1, 4):
        runner = ranks_runner(degree, spec, "bf16", **options, attention_dp=pools if degree > 1 else 1)
        outcomes.append(run(runner, requests, batch=3, chunk_tokens=7))
        runner.close()
    assert outcomes[1] == outcomes[0]
    assert any(sum(outcome.accepted_per_round) for outcome in outcomes[0]) or drafter == "mtp"
