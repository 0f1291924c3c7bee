"""Chains of several sequences from one captured draft loop: what goes into it, and the trees that come out."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np
import torch

from paceline.layers.upload import staged
from paceline.spec_decode.base import DraftBudget
from paceline.spec_decode.drafters.head_graphs import ChainRequest, HeadGraphs
from paceline.spec_decode.sequence import Sequence
from paceline.spec_decode.trees.tree import DraftTree, build_tree
from paceline.spec_decode.unread import UnreadChains


def draft_chains(graphs: HeadGraphs, seqs: Seq[Sequence], depths: Seq[int]) -> list[list[int]] | None:
    """Draft tokens of every sequence, ``depths`` of them; none without draft state. The host waits for them.

    None where no graph holds the batch.
    """
    rows: list[list[int]] = [[] for _ in seqs]
    drawn = _drawn(seqs, depths)
    if not drawn:
        return rows
    found = _run(graphs, seqs, depths, drawn)
    if found is None:
        return None
    for i, tokens in zip(drawn, found.tolist(), strict=True):
        rows[i] = tokens[: depths[i]]
    return rows


def unread_chains(
    graphs: HeadGraphs, seqs: Seq[Sequence], depths: Seq[int], vocab_size: int, drafter: str
) -> UnreadChains | None:
    """The same, left on the device. None also where nothing is drafted at all."""
    drawn = _drawn(seqs, depths)
    found = _run(graphs, seqs, depths, drawn) if drawn else None
    if found is None:
        return None
    of_each = [0] * len(seqs)
    for i in drawn:
        of_each[i] = depths[i]
    width, wanted = found.shape[1], [depths[i] for i in drawn]
    tokens = found.reshape(-1)
    if any(depth < width for depth in wanted):
        kept = np.concatenate([np.arange(row * width, row * width + depth) for row, depth in enumerate(wanted)])
        tokens = tokens.index_select(0, staged(kept.astype(np.int64), tokens.device))
    return UnreadChains(tokens, tuple(of_each), drafter, vocab_size)


def _drawn(seqs: Seq[Sequence], depths: Seq[int]) -> list[int]:
    """Sequences that have something to draft from, and something to draft."""
    return [i for i, seq in enumerate(seqs) if seq.draft is not None and depths[i]]


def _run(graphs: HeadGraphs, seqs: Seq[Sequence], depths: Seq[int], drawn: Seq[int]) -> torch.Tensor | None:
    """int64 [len(drawn), the graph's depth]; None where no graph holds the batch."""
    states = [state for i in drawn if (state := seqs[i].draft) is not None]
    device = states[0].hidden.device
    first = torch.cat([state.proposal_ids[0, :1].to(device, non_blocking=True) for state in states])
    hidden = torch.cat([state.hidden[:1] for state in states])
    return graphs.chain([_request(seqs[i], depths[i]) for i in drawn], first, hidden)


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
