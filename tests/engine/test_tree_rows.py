"""The target at the nodes of a real verification: each node has the history of its own path (algorithms.md B4)."""

from __future__ import annotations

import pytest
import torch

from paceline.engine.tree_rows import TreeRows, row_context
from paceline.kvcache.allocator import PageAllocator
from paceline.kvcache.table import PageTable
from paceline.request import SamplingParams, SequenceRequest
from paceline.sampling.params import process
from paceline.sampling.sampler import sample_rows
from paceline.spec_decode.accept.acceptance import RULES, Verification
from paceline.spec_decode.accept.coins import Coins
from paceline.spec_decode.accept.verify import Verdict, walk
from paceline.spec_decode.sequence import Sequence
from paceline.spec_decode.trees.tree import DraftTree, build_tree

V = 8
PROMPT = (1, 2, 3, 4)
OUTPUT = (6, 0)
ROOT_POSITION = len(PROMPT) + len(OUTPUT) - 1


def rows_of(tree: DraftTree, params: SamplingParams) -> TreeRows:
    logits = torch.randn(tree.num_nodes, V, generator=torch.Generator().manual_seed(3)) * 1.5
    seq = Sequence.start(SequenceRequest("r", PROMPT, params, OUTPUT), PageTable(PageAllocator(1), 1))
    seq.num_computed = ROOT_POSITION
    return TreeRows(seq, tree, logits, None)


def plain_samples(rows: TreeRows) -> list[int]:
    """What plain decoding would sample after each node, had it come by its path."""
    contexts = []
    for node, depth in enumerate(rows.tree.depths):
        path = tuple(rows.tree.token_ids[i] for i in rows.tree.path(node)[1:])
        contexts.append(row_context(rows.seq, path, ROOT_POSITION + depth + 1))
    return sample_rows(rows.logits, contexts)


def judged(rule: str, rows: TreeRows, seed: int) -> Verdict:
    return RULES[rule].function(Verification(rows.tree, rows, Coins(seed), ROOT_POSITION, lambda _: False, 9))


TREE = build_tree(0, [(-1, token) for token in range(V)] + [(t, t) for t in range(V)], V, 32, 4)


@pytest.mark.parametrize("seed", range(20))
def test_the_default_rule_commits_what_plain_decoding_samples(seed: int) -> None:
    rows = rows_of(TREE, SamplingParams(seed=seed, top_p=0.95, presence_penalty=0.4))
    verdict = judged("sample", rows, seed)
    assert verdict == walk(TREE, plain_samples(rows), lambda _: False, 9)
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
    assert judged(rule, rows, 3).committed(chain) == plain_samples(rows)
