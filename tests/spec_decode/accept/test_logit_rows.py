"""The target at the nodes of a real verification: each node has the history of its own path (algorithms.md B4)."""

from __future__ import annotations

import pytest
import torch

from paceline.request import SamplingParams
from paceline.sampling.params import process
from paceline.sampling.sampler import RowContext, sample_rows
from paceline.spec_decode.accept.acceptance import RULES, LogitRows
from paceline.spec_decode.accept.coins import Coins
from paceline.spec_decode.accept.verify import walk
from paceline.spec_decode.trees.tree import DraftTree, build_tree

V = 8
ROOT_POSITION = 5
PROMPT = (1, 2, 3, 4)
OUTPUT = (6, 0)


def rows_of(tree: DraftTree, params: SamplingParams) -> LogitRows:
    logits = torch.randn(tree.num_nodes, V, generator=torch.Generator().manual_seed(3)) * 1.5
    contexts = []
    for node in range(tree.num_nodes):
        path = tuple(tree.token_ids[i] for i in tree.path(node)[1:])
        contexts.append(RowContext(params, ROOT_POSITION + tree.depths[node] + 1, PROMPT, OUTPUT, path))
    return LogitRows(logits, contexts)


TREE = build_tree(0, [(-1, token) for token in range(V)] + [(t, t) for t in range(V)], V, 32, 4)


@pytest.mark.parametrize("seed", range(20))
def test_the_default_rule_commits_what_plain_decoding_samples(seed: int) -> None:
    rows = rows_of(TREE, SamplingParams(seed=seed, top_p=0.95, presence_penalty=0.4))
    verdict = RULES["sample"].function(TREE, rows, Coins(seed), ROOT_POSITION, lambda _: False, 9)
    assert verdict == walk(TREE, sample_rows(rows.logits, rows.contexts), lambda _: False, 9)
    assert len(verdict.path) > 0


def test_penalties_see_the_path_of_the_node() -> None:
    params = SamplingParams(repetition_penalty=1.7, frequency_penalty=0.6, temperature=0.8, top_k=5)
    rows = rows_of(TREE, params)
    leaf = TREE.num_nodes - 1
    expected = process(rows.logits[leaf], params, PROMPT, [*OUTPUT, 7, 7]).exp()
    assert torch.allclose(rows.probs(leaf), expected, atol=1e-14, rtol=0.0)
    assert not torch.allclose(rows.probs(leaf), process(rows.logits[leaf], params, PROMPT, OUTPUT).exp(), atol=1e-3)


@pytest.mark.parametrize("rule", RULES)
def test_greedy_rows_give_the_greedy_tokens_under_every_rule(rule: str) -> None:
    chain = build_tree(0, [(-1, int(rows_of(TREE, SamplingParams()).logits[0].argmax()))], V, 4, 2)
    rows = rows_of(chain, SamplingParams(temperature=0.0))
    verdict = RULES[rule].function(chain, rows, Coins(3), ROOT_POSITION, lambda _: False, 9)
    assert verdict.committed(chain) == sample_rows(rows.logits, rows.contexts)
