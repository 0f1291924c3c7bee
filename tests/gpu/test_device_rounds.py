"""A whole round on a GPU, sampling, walk and compaction, against the same on the CPU."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq

import pytest
import torch

from paceline.engine.device_round import DeviceJudge
from paceline.engine.rounds import Drafted
from paceline.kvcache.allocator import PageAllocator
from paceline.kvcache.pool import KvPool
from paceline.kvcache.table import PageTable
from paceline.request import SequenceRequest
from paceline.spec_decode.sequence import Sequence
from paceline.spec_decode.trees.tree import DraftTree, build_tree
from tests.support.device_pages import assert_same, random_pool
from tests.support.device_sampling import random_params

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")
VOCAB = 6  # few tokens, so that walks go deep


def sequences(rng: random.Random, count: int, pool: KvPool) -> list[Sequence]:
    allocator = PageAllocator(pool.num_pages)
    seqs = []
    for i in range(count):
        prompt = tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(1, 9)))
        params = random_params(rng, VOCAB)
        seq = Sequence.start(
            SequenceRequest(f"r{i}", prompt, params, tuple(range(rng.randrange(3)))),
            PageTable(allocator, pool.page_size),
        )
        seq.num_computed = len(seq.token_ids) - 1
        seq.table.ensure(seq.num_computed + 20)
        seqs.append(seq)
    return seqs


def random_trees(rng: random.Random, seqs: Seq[Sequence], chains: bool) -> list[DraftTree]:
    trees = []
    for seq in seqs:
        pairs = [
            (i - 1 if chains else rng.randrange(-1, i), rng.randrange(VOCAB)) for i in range(rng.choice([0, 5, 25]))
        ]
        trees.append(build_tree(seq.token_ids[-1], pairs, VOCAB, max_nodes=20, max_depth=8))
    return trees


@pytest.mark.parametrize("chains", [True, False])
def test_rounds(chains: bool) -> None:
    rng = random.Random(7)
    longest = 0
    for _ in range(20):
        truth, there, _ = random_pool("mixed", 4, torch.bfloat16, CUDA, num_slots=1024)
        seqs = sequences(rng, 12, truth)
        trees = random_trees(rng, seqs, chains)
        logits = 0.5 * torch.randn(sum(tree.num_nodes for tree in trees), VOCAB)
        drafted = Drafted(seqs, trees, [rng.choice([1, 3, 50]) for _ in seqs])
        on_host, on_device = DeviceJudge(truth), DeviceJudge(there)
        expected = on_host.judge(drafted, logits, want_argmax=True)
        assert on_device.judge(drafted, logits.to(CUDA), want_argmax=True) == expected
        assert_same(truth, there)
        longest = max(longest, *(len(verdict.path) for verdict in expected.verdicts))
        rows = logits[: len(seqs)]
        assert on_device.first_tokens(seqs, rows.to(CUDA)) == on_host.first_tokens(seqs, rows)
    assert longest >= 2
