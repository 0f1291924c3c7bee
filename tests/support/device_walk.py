"""Random batches of trees, and the check of the device walk against ``verify.walk``, for any device."""

from __future__ import annotations

import random

import torch

from paceline.spec_decode.accept.device_trees import upload_trees
from paceline.spec_decode.accept.device_walk import read_verdicts, walk_device
from paceline.spec_decode.accept.verify import Verdict, walk
from paceline.spec_decode.trees.tree import DraftTree, build_tree

VOCAB = 6  # few tokens, so that walks go deep
MORE_STOPS = 100  # ids that never come, among which a stop token lies anywhere


def random_tree(rng: random.Random) -> DraftTree:
    """Roots alone, chains, bushes."""
    count = rng.choice([0, 0, 1, 4, 12, 30])
    chain = rng.random() < 0.4
    nodes = [(i - 1 if chain else rng.randrange(-1, i), rng.randrange(VOCAB)) for i in range(count)]
    return build_tree(rng.randrange(VOCAB), nodes, VOCAB, max_nodes=rng.choice([8, 20, 40]), max_depth=12)


def likely_samples(rng: random.Random, tree: DraftTree) -> list[int]:
    """A token after each node; mostly one of its children's."""
    tokens = []
    for node in range(tree.num_nodes):
        children = [i for i in range(tree.num_nodes) if tree.parents[i] == node]
        use = children and rng.random() < 0.85
        tokens.append(tree.token_ids[rng.choice(children)] if use else rng.randrange(-1, VOCAB))
    return tokens


def check_walks(device: torch.device, num_trees: int, seed: int) -> list[Verdict]:
    """One batch; returns what it gave."""
    rng = random.Random(seed)
    trees = [random_tree(rng) for _ in range(num_trees)]
    sampled = [likely_samples(rng, tree) for tree in trees]
    stops = [tuple(rng.sample(range(VOCAB + MORE_STOPS), rng.choice([0, 0, 1, 40]))) for _ in trees]
    most = [rng.choice([1, 2, 3, 50]) for _ in trees]
    flat = torch.tensor([token for tokens in sampled for token in tokens], device=device)
    walked = walk_device(upload_trees(trees, stops, most, device), flat)
    assert walked.dtype == torch.int32
    found = read_verdicts(walked)
    expected = [
        walk(tree, tokens, stop.__contains__, limit)
        for tree, tokens, stop, limit in zip(trees, sampled, stops, most, strict=True)
    ]
    assert found == expected
    return found
