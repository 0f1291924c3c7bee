"""CUDA graphs of whole engines against the same engines without them: equal tokens, no waiting host."""

from __future__ import annotations

import random
import warnings
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from paceline.assembly.build import assemble
from paceline.attention.base import Segment
from paceline.config import NodeConfig
from paceline.engine.colocated import ColocatedEngine
from paceline.engine.model_runner import ModelRunner, PrefillChunk, RunnerIdentity
from paceline.models.deepseek_v3 import DeepseekV3Model
from paceline.models.llama import LlamaModel
from paceline.models.loader import WeightBag
from paceline.spec_decode.drafters.feature import FeatureDrafter
from tests.support.tiny_deepseek import target_tensors, tiny_deepseek_spec, write_mtp_folder
from tests.support.tiny_model import primary_of, tiny_request, tiny_spec, tiny_weights
from tests.support.untrained_heads import write_tiny_head

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # of FlashInfer and of captures
]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def runner_of(dtype: str = "fp32", deepseek: bool = False, device: str = "cuda", **options: Any) -> ModelRunner:
    """A tiny engine; heads of 64 in bf16, as FlashInfer wants them."""
    torch_dtype, at = DTYPES[dtype], torch.device(device)
    model: LlamaModel | DeepseekV3Model
    if deepseek:
        spec = tiny_deepseek_spec()
        model = DeepseekV3Model(spec, WeightBag(target_tensors(spec, torch_dtype, 0)), torch_dtype, at)
    else:
        spec = spec_of(dtype)
        model = LlamaModel(spec, tiny_weights(spec, torch_dtype), torch_dtype, at)
    values = {"model": "tiny", "dtype": dtype, "device": device, "max_running": 4, "max_model_len": 128}
    values |= {"kv_cache_tokens": 2048, "num_draft_tokens": 3}
    config = NodeConfig.model_validate(values | options)
    return assemble(config, model, RunnerIdentity("tiny", "0", "test"))


def spec_of(dtype: str) -> Any:
    """The tiny Llama."""
    return replace(tiny_spec(), head_dim=64) if dtype == "bf16" else tiny_spec()


def tokens_of(runner: ModelRunner, count: int = 6) -> list[tuple[int, ...]]:
    """Greedy and sampled requests, four at a time, that end one after another."""
    asked = [tiny_request(index=i, max_tokens=10 + 4 * i, temperature=0.8 * (i % 2)) for i in range(count)]
    done = ColocatedEngine(runner, max_running=4).generate(asked)
    assert runner.allocator.check_integrity() == []
    return [tuple(d.token_ids) for d in done]


def drafting(name: str, dtype: str, folder: Path) -> dict[str, Any]:
    """Options of a drafter; heads are written where it has any."""
    if name in ("eagle", "eagle3"):
        write_tiny_head(folder, name, spec_of(dtype))
        return {"drafter": name, "drafter_path": str(folder)}
    return {"drafter": name}


@pytest.mark.parametrize("tree", ["chain", "static", "dynamic"])
@pytest.mark.parametrize("name", ["none", "ngram", "eagle", "eagle3", "mtp"])
def test_fp32_tokens(name: str, tree: str, tmp_path: Path) -> None:
    """With graphs, without, and drafting nothing: one text."""
    options = drafting(name, "fp32", tmp_path) | {"tree": tree}
    graphed = runner_of(**options)
    assert graphed.graphs is not None
    assert graphed.graphs.buckets
    found = tokens_of(graphed)
    assert found == tokens_of(runner_of(cuda_graphs=False, **options))
    assert found == tokens_of(runner_of(cuda_graphs=False, drafter="none"))


def test_fp32_tokens_are_those_of_the_cpu() -> None:
    assert tokens_of(runner_of(drafter="none")) == tokens_of(runner_of(drafter="none", device="cpu"))


@pytest.mark.parametrize("name", ["eagle3", "mtp"])
def test_draft_loop(name: str, tmp_path: Path) -> None:
    """The loop in one graph drafts what the level-by-level loop drafts."""
    options = drafting(name, "fp32", tmp_path)
    rounds = {}
    for graphs in (True, False):
        runner = runner_of(cuda_graphs=graphs, **options)
        drafter = primary_of(runner)
        assert isinstance(drafter, FeatureDrafter)
        assert bool(drafter.graphs and drafter.graphs._chains) == graphs
        asked = [tiny_request(index=i, max_tokens=20, temperature=0.8 * (i % 2)) for i in range(4)]
        done = ColocatedEngine(runner, max_running=4).generate(asked)
        rounds[graphs] = [(tuple(d.token_ids), tuple(d.stats.accepted_per_round)) for d in done]
    assert rounds[True] == rounds[False]


@pytest.mark.parametrize("depth", [1, 3])
def test_a_chain_round_waits_once(depth: int, tmp_path: Path) -> None:
    """The host waits for the verdict alone, by an event, and for the drafts where it reads them first."""
    runner = runner_of(**drafting("eagle3", "fp32", tmp_path), num_draft_tokens=depth)
    drafter, waits = primary_of(runner), list[int]()
    for unread in (True, False):
        seqs = [runner.new_sequence(tiny_request(index=i, max_tokens=40, temperature=0.8 * (i % 2))) for i in range(3)]
        for seq in seqs:
            seq.table.ensure(seq.num_prefill + 48)
        runner.prefill([PrefillChunk(seq, 0, seq.num_prefill) for seq in seqs])
        with nullcontext() if unread else mock.patch.object(drafter, "propose_unread", return_value=None):
            runner.decode(seqs)
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("warn")
            try:
                with warnings.catch_warnings(record=True) as seen:
                    warnings.simplefilter("always")
                    runner.decode(seqs)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        waits.append(sum("synchronizing CUDA operation" in str(w.message) for w in seen))
        for seq in seqs:
            runner.release(seq)
    assert waits == [0, 1]  # warnings know no events


def test_deepseek(tmp_path: Path) -> None:
    """MLA, experts and their MTP module; the experts are grouped, so that nothing is read back."""
    folder = write_mtp_folder(tmp_path / "heads", 1, torch.float32)
    options: dict[str, Any] = {"deepseek": True, "drafter": "mtp", "drafter_path": str(folder)}
    graphed = runner_of(**options)
    assert graphed.graphs is not None
    assert graphed.graphs.buckets
    assert tokens_of(graphed) == tokens_of(runner_of(cuda_graphs=False, **options))


@pytest.mark.parametrize("tree", [False, True])
def test_forward_by_flashinfer(tree: bool) -> None:
    """bf16: hidden rows of graph and eager forwards agree to rounding, and the host does not wait in between."""
    pytest.importorskip("flashinfer")
    options: dict[str, Any] = {"drafter": "none"}
    if tree:
        options |= {"drafter": "ngram", "tree": "static"}
    runner = runner_of("bf16", **options)
    assert runner.attention.name == "flashinfer"
    assert runner.graphs is not None
    rng = random.Random(5)
    for _ in range(4):
        segments = []
        for _ in range(rng.randint(1, 4)):
            seq = runner.new_sequence(tiny_request(index=rng.randrange(50)))
            seq.table.ensure(60)
            start = rng.randint(4, 30)
            prompt = [rng.randrange(3, 190) for _ in range(start)]
            runner.forward([Segment.linear(prompt, 0, seq.table.slots)])  # too long for a graph: eager
            rows = runner.limits.budget.max_nodes - rng.randint(0, 2)
            if tree:
                parents = [-1, *(rng.randrange(i) for i in range(1, rows))]
                segments.append(Segment.tree([7] * rows, parents, start, seq.table.slots))
            else:
                segments.append(Segment.linear([7], start, seq.table.slots))
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = runner.graphs.forward(segments)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert found is not None
        kept, runner.graphs = runner.graphs, None
        expected, _ = runner.forward(segments)
        runner.graphs = kept
        torch.testing.assert_close(found[0], expected, rtol=5e-2, atol=5e-2)


def test_memory_bound() -> None:
    """Nothing fits: nothing is captured past the first try, and the text is the same."""
    runner = runner_of(drafter="none", graph_memory_mib=0)
    assert runner.graphs is not None
    assert len(runner.graphs.buckets) <= 2
    assert tokens_of(runner) == tokens_of(runner_of(drafter="none", cuda_graphs=False))
