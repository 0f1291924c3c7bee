"""Chains of several sequences from one captured draft loop: what goes into it, and the trees that come out."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

import torch

from paceline.spec_decode.base import DraftBudget
from paceline.spec_decode.drafters.head_graphs import ChainRequest, HeadGraphs
from paceline.spec_decode.sequence import Sequence
from paceline.spec_decode.tree import DraftTree, build_tree


def draft_chains(graphs: HeadGraphs, seqs: Seq[Sequence], depths: Seq[int]) -> list[list[int]] | None:
    """Draft tokens of every sequence, ``depths`` of them; none without draft state. The host waits for them.

    None where no graph holds the batch.
    """
    drawn = [(i, seq.draft) for i, seq in enumerate(seqs) if seq.draft is not None and depths[i]]
    rows: list[list[int]] = [[] for _ in seqs]
    if not drawn:
        return rows
    device = drawn[0][1].hidden.device
    first = torch.cat([state.proposal_ids[0, :1].to(device, non_blocking=True) for _, state in drawn])
    hidden = torch.cat([state.hidden[:1] for _, state in drawn])
    found = graphs.chain([_request(seqs[i], depths[i]) for i, _ in drawn], first, hidden)
    if found is None:
        return None
    for (i, _), tokens in zip(drawn, found.tolist(), strict=True):
        rows[i] = tokens[: depths[i]]
    return rows


def _request(seq: Sequence, depth: int) -> ChainRequest:
    params = seq.request.params
    return ChainRequest(seq.table.slots, len(seq.token_ids) - 1, depth, params.seed or 0, params.temperature)


def chain_trees(
    seqs: Seq[Sequence], budgets: Seq[DraftBudget], rows: Seq[Seq[int]], vocab_size: int, drafter: str
) -> list[DraftTree]:
    """The chains as trees, by the name of who made them."""
    trees = []
    for seq, budget, tokens in zip(seqs, budgets, rows, strict=True):
        pairs = [(i - 1, token) for i, token in enumerate(tokens)]
        tree = build_tree(seq.token_ids[-1], pairs, vocab_size, budget.max_nodes, budget.num_draft_tokens)
        trees.append(replace(tree, drafter=drafter))
    return trees
