"""No kernel is first met by a request: what a served mix launches was launched by the warm-up, key by key."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch

from paceline.assembly import build
from paceline.assembly.selfcheck import ProbedBits
from paceline.assembly.trial_sequences import TrialSequences
from paceline.assembly.warm import row_counts, warm_kernels
from paceline.engine.colocated import ColocatedEngine
from paceline.engine.model_runner import ModelRunner
from paceline.kvcache import pool
from paceline.kvcache.device_pages import DevicePages
from paceline.kvcache.layout import KvLayout
from paceline.kvcache.unit_table import UnitTable
from paceline.layers.bits import layer_bits
from paceline.models import moe
from paceline.request import SamplingParams, SequenceRequest, SpeculationParams
from paceline.sampling.device import draft_topk
from paceline.spec_decode.drafters import candidates
from paceline.triton_support import has_triton
from tests.support.device_runner import device_runner, with_heads, write_heads
from tests.support.interpreter import INTERPRETED, Again
from tests.support.launches import Key, recorded_launches
from tests.support.needs import needs_triton
from tests.support.recording import plain_torch
from tests.support.tiny_deepseek import tiny_deepseek_runner, write_mtp_folder
from tests.support.tiny_model import tiny_prefill_runner

CPU, CHUNK, RUNNING = torch.device("cpu"), 70, 5
DEPTH = 13  # the stride of a walk's results is a multiple of 16 at full depth alone
ONE_FOR_ALL_ROWS = ("_rope_write_kernel", "_latent_write", "_attend_kernel", "_finish_kernel", "_compact_kernel")
Make = Callable[[Path, dict[str, object]], ModelRunner]
if has_triton():
    from paceline.layers import exact_products
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the process with the interpreter")


@needs_triton
def test_in_tritons_interpreter(run_again_interpreted: Again) -> None:
    assert run_again_interpreted(__file__) > 0


def test_row_counts() -> None:
    assert row_counts(1) == [1]
    assert row_counts(20) == [1, 16, 17, 19, 20]
    assert row_counts(300) == [1, 16, 17, 32, 33, 64, 97, 128, 256, 299, 300]


def asked(index: int, prompt: int, depth: int | None = None, **params: object) -> SequenceRequest:
    tokens = tuple((5 * index + 7 * p) % 190 for p in range(prompt))
    sampling = SamplingParams(**({"temperature": 0.0, "seed": index, "max_tokens": 5} | params))  # type: ignore[arg-type]
    return SequenceRequest(f"r{index}", tokens, sampling, speculation=SpeculationParams(depth))


def mix() -> list[SequenceRequest]:
    """Prompts of odd and even lengths, over several chunks too; every kind of sampling; a smaller tree."""
    return [
        asked(0, 1),
        asked(1, 6, stop_token_ids=tuple(range(150, 190))),
        asked(2, 13, temperature=0.8, top_k=5),
        asked(3, 16, temperature=1.0, top_p=0.7, min_p=0.02, depth=6),
        asked(4, 27, temperature=0.7, repetition_penalty=1.3, logit_bias={3: 2.0}),
        asked(5, 49, frequency_penalty=0.4, min_tokens=3, stop_token_ids=(4,)),
        asked(6, 100, max_tokens=30),
    ]


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Drafts and pages by the kernels. The self-check would take minutes."""

    def pages(flats: Sequence[torch.Tensor], layout: KvLayout, page_size: int) -> DevicePages:
        return DevicePages(UnitTable.of(flats, layout, page_size))

    with (
        mock.patch.object(build, "probe_bits", return_value=ProbedBits(True, "")),
        mock.patch.object(candidates, "perturbed_topk", draft_topk),
        mock.patch.object(pool, "make_device_pages", pages),
        mock.patch.object(exact_products, "LEAF", 16),
        mock.patch.object(exact_products, "WANTED_PROGRAMS", 8),  # leaves are programs of their own for few rows alone
    ):
        yield


def llama(folder: Path, options: dict[str, object]) -> ModelRunner:
    """EAGLE-3, dynamic trees."""
    options = options | {
        "drafter": "eagle3",
        "tree": "dynamic",
        "tree_width": 3,
        "num_draft_tokens": DEPTH,
        "tree_nodes": 40,
    }
    return device_runner("cpu", "narrow", "bf16", **with_heads(options, write_heads(folder, "narrow")))


def deepseek(folder: Path, options: dict[str, object]) -> ModelRunner:
    """MLA and experts, chains of its own MTP module."""
    options = options | {"drafter": "mtp", "drafter_path": str(write_mtp_folder(folder / "mtp", 1, torch.bfloat16))}
    with mock.patch.object(
        moe, "SeparateExperts", lambda take, prefix, count, _: moe.GroupedExperts(take, prefix, count)
    ):
        return tiny_deepseek_runner("bf16", **options)


@interpreted
@pytest.mark.parametrize("make", [llama, deepseek])
@pytest.mark.parametrize("bits", ["fast", "exact"])
def test_no_request_meets_a_new_kernel(make: Make, bits: str, tmp_path: Path) -> None:
    """Mutants: a greedy batch alone is warmed; prompts of one length are; trees of one size are; a kernel looks
    at where a batch's positions begin, at the number of a layer, at how deep a tree is."""
    options: dict[str, object] = {"attention": "triton", "bits": bits, "max_running": RUNNING, "kv_cache_tokens": 2048}
    with plain_torch(), layer_bits(bits, CPU), as_on_a_gpu():
        runner = make(tmp_path, options)
        runner.samples_on_device = True
        with recorded_launches() as warmed:
            warm_kernels(runner, CHUNK, RUNNING, decodes=True)
        assert runner.allocator.check_integrity() == []
        with recorded_launches() as served:
            for running in (1, 3):
                done = ColocatedEngine(runner, chunk_tokens=CHUNK, max_running=running).generate(mix())
            slots = torch.arange(7, dtype=torch.int32)
            for layers in (range(1), range(1, 3)):
                runner.kv.scatter(layers, slots[1:4], runner.kv.gather(layers, slots[3:6]))
    assert [len(each.token_ids) for each in done] == [5] * (len(done) - 1) + [30]
    named = Counter(str(key[0]) for key in warmed | served)
    assert max(named[f"'{name}'"] for name in ONE_FOR_ALL_ROWS) == 1
    assert named["'_walk_kernel'"] <= 3  # by the size of a tree alone
    assert {"'_topk_kernel'", "'_walk_kernel'", "'_move_kernel'", "'_cut_kernel'"} <= set(named)
    assert ("'_product'" in named) == (bits == "exact" or make is deepseek)  # whose experts take them for few rows
    assert ("'_compact_kernel'" in named) == (make is llama)
    new = {key[0]: key for key in served - warmed}
    assert not new, "\n".join(f"{key}\nnearest: {nearest(key, warmed)}" for key in new.values())


@interpreted
def test_a_prefill_node_warms_no_round() -> None:
    options: dict[str, object] = {"attention": "triton", "drafter": "ngram", "kv_cache_tokens": 2048}
    with plain_torch(), as_on_a_gpu():
        runner = tiny_prefill_runner("bf16", **options)
        runner.samples_on_device = True
        with recorded_launches() as warmed:
            warm_kernels(runner, CHUNK, RUNNING, decodes=False)
        with recorded_launches() as served, TrialSequences(runner) as trial:
            for request in mix():
                trial.add([request.prompt_token_ids], 5, 0, SpeculationParams(), request.params)
    assert served
    assert not served - warmed
    assert "'_walk_kernel'" not in {key[0] for key in warmed}


def nearest(key: Key, warmed: set[Key]) -> list[tuple[object, object]]:
    """What a warmed key of the same kernel has in its place."""
    alike = [other for other in warmed if other[0] == key[0]]
    differs = [[(a, b) for a, b in zip(key, other, strict=True) if a != b] for other in alike]
    return sorted(differs, key=len)[0] if differs else []
