"""Sampling, walking and compacting one round on the model's device ("sample, then descend", algorithms.md B5c, E15).

The host launches everything behind the target's forward and waits once, for a few integers of each sequence.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch

from paceline.engine.rounds import Ahead, Drafted, Judged
from paceline.kvcache.layout import LayerOwner
from paceline.kvcache.pool import KvPool
from paceline.layers.upload import begin_read
from paceline.sampling.device import BROKEN, sample_rows_device
from paceline.sampling.params import reads_history
from paceline.sampling.sampler import RowContext
from paceline.spec_decode.accept.device_trees import LENGTH, NEW_TOKEN, PATH, DeviceTrees, upload_trees
from paceline.spec_decode.accept.device_walk import read_verdicts, walk_device
from paceline.spec_decode.sequence import Sequence
from paceline.spec_decode.trees.tree import DraftTree


@dataclass(frozen=True)
class DeviceJudge:
    """See ``Judge``: the default rule. Both methods raise FloatingPointError for a row that is asked for a token and
    whose best logit is not finite."""

    kv: KvPool
    takes_unread = True

    def first_tokens(self, seqs: Seq[Sequence], logits: torch.Tensor) -> list[int]:
        """See Judge. Waits once."""
        contexts = [
            RowContext(seq.request.params, seq.num_prefill, seq.request.prompt_token_ids, seq.output_token_ids, ())
            for seq in seqs
        ]
        tokens: list[int] = sample_rows_device(logits, contexts).tolist()
        for seq, token in zip(seqs, tokens, strict=True):
            check_token(token, seq.num_prefill)
        return tokens

    def judge(self, drafted: Drafted, logits: torch.Tensor, *, want_argmax: bool, ahead: Ahead | None = None) -> Judged:
        """See Judge. Waits once. No sequence of unread drafts has penalties, which depend on a node's path."""
        seqs, trees, unread = drafted.seqs, drafted.trees, drafted.unread
        rows = [row for seq, tree in zip(seqs, trees, strict=True) for row in _rows(seq, tree)]
        sampled = sample_rows_device(logits, rows)
        there = self._upload(drafted, logits.device)
        if unread is not None:
            unread.put_into_walk(there.token_ids)
        walked = walk_device(there, sampled)
        if there.slots.numel():
            layers = self.kv.layout.layer_range(LayerOwner.TARGET)
            self.kv.keep_paths(layers, there.slots, there.starts, walked[:, LENGTH], walked[:, PATH:])
        best = logits.argmax(dim=1).to(torch.int32) if want_argmax else walked.new_empty(0)
        drawn = walked.new_empty(0) if unread is None else unread.for_walk
        read_words = begin_read(torch.cat((walked.view(-1), best, drawn)))
        if unread is not None and ahead is not None:
            ahead(walked[:, LENGTH], walked[:, NEW_TOKEN])
        words = read_words()  # the one wait
        told, best, drawn = words.split_with_sizes([walked.numel(), best.numel(), drawn.numel()])
        verdicts = read_verdicts(told.view(walked.shape))
        for seq, verdict in zip(seqs, verdicts, strict=True):
            check_token(verdict.new_token, seq.num_computed + len(verdict.path) + 1)
        argmax = torch.split_with_sizes(best, drafted.sizes) if want_argmax else ()
        read = list(trees) if unread is None else unread.read_trees(seqs, drawn.tolist())
        # A chain that ends before a token outside the vocabulary has fewer nodes than were verified.
        kept = [tokens[: tree.num_nodes].tolist() for tree, tokens in zip(read, argmax, strict=False)]
        return Judged(verdicts, kept, read)

    def _upload(self, drafted: Drafted, device: torch.device) -> DeviceTrees:
        """Trees on the device, with slots only where one branches: the accepted part of a chain lies in place."""
        seqs, trees = drafted.seqs, drafted.trees
        slots = None if all(tree.is_chain for tree in trees) else _slots(seqs, trees)
        stops = [seq.request.params.stop_token_ids for seq in seqs]
        return upload_trees(trees, stops, drafted.tokens_left, device, slots)


def check_token(token: int, position: int) -> None:
    """Raise FloatingPointError for a token that could not be sampled."""
    if token == BROKEN:
        raise FloatingPointError(f"logits at position {position} are not finite")


def _rows(seq: Sequence, tree: DraftTree) -> list[RowContext]:
    """One for each node; they share the history, which is packed once."""
    params = seq.request.params
    output: Seq[int] = seq.output_token_ids if reads_history(params) else range(seq.num_output)
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.token_ids[1:], tree.parents[1:], strict=True):
        paths.append((*paths[parent], token))
    return [
        RowContext(params, seq.num_computed + depth + 1, seq.request.prompt_token_ids, output, path)
        for depth, path in zip(tree.depths, paths, strict=True)
    ]


def _slots(seqs: Seq[Sequence], trees: Seq[DraftTree]) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    """KV slot of every node, int32 [N]."""
    parts = [
        seq.table.slots[seq.num_computed : seq.num_computed + tree.num_nodes].numpy()
        for seq, tree in zip(seqs, trees, strict=True)
    ]
    return np.concatenate(parts)
