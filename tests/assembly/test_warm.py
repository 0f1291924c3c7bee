"""No kernel is first met by a request: what a served mix launches was launched by the warm-up, key by key."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.assembly.warm import row_counts, warm_kernels
from paceline.engine.colocated import ColocatedEngine
from paceline.engine.model_runner import ModelRunner
from paceline.request import SamplingParams, SequenceRequest, SpeculationParams
from tests.support.device_runner import device_runner, with_heads, write_heads
from tests.support.interpreter import INTERPRETED, run_again_interpreted
from tests.support.needs import needs_triton
from tests.support.tiny_deepseek import tiny_deepseek_runner

CHUNK, RUNNING = 20, 2
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the process with the interpreter")


@needs_triton
def test_in_tritons_interpreter() -> None:
    run_again_interpreted(__file__)


def test_row_counts() -> None:
    assert row_counts(1) == [1]
    assert row_counts(20) == [1, 17, 20]
    assert row_counts(300) == [1, 17, 33, 64, 128, 256, 300]


def asked(index: int, prompt: int, width: int | None = None, **params: object) -> SequenceRequest:
    tokens = tuple((5 * index + 7 * p) % 190 for p in range(prompt))
    sampling = SamplingParams(**({"temperature": 0.0, "seed": index, "max_tokens": 5} | params))  # type: ignore[arg-type]
    return SequenceRequest(f"r{index}", tokens, sampling, speculation=SpeculationParams(tree_width=width))


def mix() -> list[SequenceRequest]:
    """Prompts of odd and even lengths, over several chunks too; every kind of sampling; a narrower tree."""
    return [
        asked(0, 1),
        asked(1, 6, stop_token_ids=tuple(range(150, 190))),
        asked(2, 13, temperature=0.8, top_k=5),
        asked(3, 16, temperature=1.0, top_p=0.7, min_p=0.02, width=2),
        asked(4, 27, temperature=0.7, repetition_penalty=1.3, logit_bias={3: 2.0}),
        asked(5, 19, frequency_penalty=0.4, min_tokens=3, stop_token_ids=(4,)),
    ]


def as_on_a_device(runner: ModelRunner) -> ModelRunner:
    runner.samples_on_device = True
    return runner


@interpreted
@pytest.mark.parametrize("bits", ["fast", "exact"])
def test_no_request_meets_a_new_kernel(bits: str, tmp_path: Path) -> None:
    """EAGLE-3 with dynamic trees."""
    from tests.support.launches import recorded_launches

    options: dict[str, object] = {"drafter": "eagle3", "tree": "dynamic", "tree_width": 3, "num_draft_tokens": 3}
    options |= {"attention": "triton", "bits": bits, "max_running": RUNNING, "kv_cache_tokens": 1024}
    heads = write_heads(tmp_path, "narrow")
    runner = as_on_a_device(device_runner("cpu", "narrow", "fp32", **with_heads(options, heads)))
    check(runner, mix())


def check(runner: ModelRunner, requests: list[SequenceRequest]) -> None:
    from tests.support.launches import recorded_launches

    with recorded_launches() as warmed:
        warm_kernels(runner, CHUNK, RUNNING, decodes=True)
    assert runner.allocator.check_integrity() == []
    with recorded_launches() as served:
        done = ColocatedEngine(runner, chunk_tokens=CHUNK, max_running=RUNNING).generate(requests)
        slots = torch.arange(7, dtype=torch.int32)
        for layers in (range(1), range(1, 3)):
            runner.kv.scatter(layers, slots[1:4], runner.kv.gather(layers, slots[3:6]))
    assert len(done) == len(requests)
    assert len(served) > 10
    assert not sorted(served - warmed)
