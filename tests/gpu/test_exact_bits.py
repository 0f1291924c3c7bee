"""Exact bits on a GPU: the logits of an engine have the same bits by any drafter, batch and chunk. The bodies run on a
CPU too, which is always exact."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pytest

from tests.support.device_runner import DEVICES, NARROW, WIDE, device_runner, mixed_requests, with_heads
from tests.support.device_runner import write_heads as write_device_heads
from tests.support.exactness import Outcome, run
from tests.support.needs import needs_kernels

DTYPES = ("bf16", "fp32")
CASES: dict[str, tuple[dict[str, object], int, int]] = {  # options, batch, prompt tokens a step
    "batch of 8": ({"drafter": "none"}, 8, 10_000),
    "chunks of 5": ({"drafter": "none"}, 3, 5),
    "ngram": ({"drafter": "ngram", "num_draft_tokens": 8}, 1, 10_000),
    "mtp tree": ({"drafter": "mtp", "tree": "static", "tree_width": 3}, 4, 16),
    "eagle3 dynamic": ({"drafter": "eagle3", "tree": "dynamic", "tree_width": 3}, 8, 16),
}
ON_CPU = ("batch of 8", "mtp tree")  # tests/engine has the others


@pytest.fixture(scope="module", autouse=True)
def models_are_given_back() -> Iterator[None]:
    yield
    plain.cache_clear()


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: write_device_heads(tmp_path_factory.mktemp(kind), kind) for kind in (NARROW, WIDE)}


@lru_cache
def plain(device: str, dtype: str, geometry: str) -> list[Outcome]:
    return run(device_runner(device, geometry, dtype, drafter="none", bits="exact"), mixed_requests(8, 16))


@needs_kernels
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_tokens_and_logits(device: str, dtype: str, case: str, heads: dict[str, Path]) -> None:
    if device == "cpu" and (dtype != "bf16" or case not in ON_CPU):
        pytest.skip("tests/engine has this on a CPU")
    options, batch, chunk = CASES[case]
    for geometry in (NARROW, WIDE):
        if geometry == WIDE and (options["drafter"] == "mtp" or device == "cpu"):
            continue
        runner = device_runner(device, geometry, dtype, bits="exact", **with_heads(options, heads[geometry]))
        assert runner.bit_exact
        done = run(runner, mixed_requests(8, 16), batch=batch, chunk_tokens=chunk)
        expected = plain(device, dtype, geometry)
        assert [one.token_ids for one in done] == [one.token_ids for one in expected]
        assert [one.logit_bits for one in done] == [one.logit_bits for one in expected]
