"""Chains whose tokens the host has not read: the walk's verdict and the trees are those of chains that it has."""

from __future__ import annotations

import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.kvcache.allocator import PageAllocator
from paceline.kvcache.table import PageTable
from paceline.spec_decode.accept.device_trees import upload_trees
from paceline.spec_decode.accept.device_walk import read_verdicts, walk_device
from paceline.spec_decode.accept.verify import walk
from paceline.spec_decode.sequence import Sequence
from paceline.spec_decode.trees.tree import build_tree
from paceline.spec_decode.unread import UnreadChains
from tests.support.tiny_model import tiny_request

torch.set_num_threads(1)
CPU = torch.device("cpu")
VOCAB = 6  # few tokens, so that walks go deep
OUTSIDE = (-1, -3, VOCAB, 2**31 + 1, 2**32 + 1, -(2**32) + 1)  # two would be in the vocabulary, cut to 32 bits


def sequence(index: int) -> Sequence:
    return Sequence.start(tiny_request([1, 2, index % VOCAB], index=index), PageTable(PageAllocator(1), 4))


@given(seed=st.integers(0, 2**32), depths=st.lists(st.integers(0, 5), min_size=1, max_size=6))
@settings(max_examples=80, deadline=None, derandomize=True)
def test_a_round_of_unread_chains(seed: int, depths: list[int]) -> None:
    """Drafts outside the vocabulary end a chain, stop tokens that were drafted do not, and a row that could not be
    sampled (-1) ends the walk even where -1 was drafted."""
    rng = random.Random(seed)
    seqs = [sequence(i) for i in range(len(depths))]
    drafted = [[rng.choice(OUTSIDE) if rng.random() < 0.15 else rng.randrange(VOCAB) for _ in range(d)] for d in depths]
    stops, most = [(rng.randrange(VOCAB),) for _ in depths], [rng.choice([1, 3, 50]) for _ in depths]
    sampled = [
        [token % VOCAB if rng.random() < 0.9 else -1 for token in (*tokens, rng.randrange(VOCAB))] for tokens in drafted
    ]
    flat = [token for tokens in drafted for token in tokens]
    chains = UnreadChains(torch.tensor(flat, dtype=torch.int64), tuple(depths), "someone", VOCAB)
    blank = chains.blank_trees(seqs)
    there = upload_trees(blank, stops, most, CPU)
    chains.put_into_walk(there.token_ids)
    found = read_verdicts(walk_device(there, torch.tensor([token for tokens in sampled for token in tokens])))
    trees = [
        build_tree(seq.token_ids[-1], [(i - 1, t) for i, t in enumerate(tokens)], VOCAB, len(tokens) + 1, len(tokens))
        for seq, tokens in zip(seqs, drafted, strict=True)
    ]
    read = chains.read_trees(seqs, chains.for_walk.tolist())
    assert read == trees
    assert {tree.drafter for tree in read} == {"someone"}
    expected = [
        walk(tree, tokens, stop.__contains__, limit)
        for tree, tokens, stop, limit in zip(trees, sampled, stops, most, strict=True)
    ]
    assert found == expected
    batch = torch.tensor([token for tree in blank for token in tree.token_ids])
    late = chains.for_target()
    late.put(batch)
    for part, tree, tokens in zip(torch.split(batch, [d + 1 for d in depths]), blank, drafted, strict=True):
        assert part.tolist() == [tree.token_ids[0], *(min(max(token, 0), VOCAB - 1) for token in tokens)]
