"""The walk of a batch on a GPU against ``verify.walk``."""

from __future__ import annotations

import pytest
import torch

from paceline.spec_decode.accept.device_trees import upload_trees
from paceline.spec_decode.accept.device_walk import walk_device, walk_torch
from tests.support.device_walk import check_walks, likely_samples, random_tree

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")


@pytest.fixture(params=["triton", "torch"], autouse=True)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "triton":
        pytest.importorskip("triton")
    else:
        monkeypatch.setattr("tests.support.device_walk.walk_device", walk_torch)


def test_walks_of_random_trees() -> None:
    for seed in range(60):
        check_walks(CUDA, 1 + seed, seed)


def test_the_host_does_not_wait() -> None:
    import random

    rng = random.Random(4)
    trees = [random_tree(rng) for _ in range(20)]
    sampled = torch.tensor([token for tree in trees for token in likely_samples(rng, tree)], device=CUDA)
    walk_device(upload_trees(trees, [()] * 20, [9] * 20, CUDA), sampled)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        walked = walk_device(upload_trees(trees, [()] * 20, [9] * 20, CUDA), sampled)
        again = walk_torch(upload_trees(trees, [()] * 20, [9] * 20, CUDA), sampled)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(walked[:, :3], again[:, :3])
