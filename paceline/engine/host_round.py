"""Sampling, walking and compacting a round on the host, tree by tree: any acceptance rule, and the way for whoever
wants to see logits."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from paceline.engine.rounds import Ahead, Drafted, Judged
from paceline.engine.tree_rows import ObserveLogits, TreeRows, row_context
from paceline.kvcache.layout import LayerOwner
from paceline.kvcache.pool import KvPool
from paceline.sampling.sampler import sample_rows
from paceline.sampling.topk import argmax_lowest
from paceline.spec_decode.accept.acceptance import RULES, AcceptanceRule, Verification
from paceline.spec_decode.accept.coins import Coins
from paceline.spec_decode.accept.verify import Verdict
from paceline.spec_decode.sequence import Sequence
from paceline.spec_decode.trees.tree import DraftTree


@dataclass(frozen=True)
class HostJudge:
    """See ``Judge``. It reads every logits row that a walk reaches."""

    kv: KvPool
    rule: AcceptanceRule  # of requests that are not greedy: those need no probabilities
    observe: ObserveLogits | None
    takes_unread = False

    def first_tokens(self, seqs: Seq[Sequence], logits: torch.Tensor) -> list[int]:
        """See Judge."""
        return [self._first_token(seq, row) for seq, row in zip(seqs, logits, strict=True)]

    def judge(self, drafted: Drafted, logits: torch.Tensor, *, want_argmax: bool, ahead: Ahead | None = None) -> Judged:
        """See Judge."""
        verdicts, argmax = [], []
        parts = torch.split_with_sizes(logits, drafted.sizes)
        for seq, tree, left, scores in zip(drafted.seqs, drafted.trees, drafted.tokens_left, parts, strict=True):
            verdict = self._verdict(seq, tree, left, scores)
            verdicts.append(verdict)
            argmax += [argmax_lowest(scores).tolist()] if want_argmax else []
            self._compact(seq, tree, verdict)
        return Judged(verdicts, argmax, list(drafted.trees))

    def _first_token(self, seq: Sequence, logits: torch.Tensor) -> int:
        if self.observe is not None:
            self.observe(seq, seq.num_prefill, logits)
        return sample_rows(logits[None], [row_context(seq, (), seq.num_prefill)])[0]

    def _verdict(self, seq: Sequence, tree: DraftTree, tokens_left: int, logits: torch.Tensor) -> Verdict:
        params = seq.request.params
        rule = self.rule if params.temperature > 0.0 else RULES["sample"]
        target, is_stop = TreeRows(seq, tree, logits, self.observe), params.stop_token_ids.__contains__
        return rule.function(
            Verification(tree, target, Coins(params.seed or 0), seq.num_computed, is_stop, tokens_left)
        )

    def _compact(self, seq: Sequence, tree: DraftTree, verdict: Verdict) -> None:
        """The target's rows of the accepted path move up to the root's (D6)."""
        nodes = [0, *verdict.path]
        if nodes != list(range(len(nodes))):
            slots = seq.table.slots[seq.num_computed : seq.num_computed + tree.num_nodes].to(torch.int64)
            self.kv.copy_slots(self.kv.layout.layer_range(LayerOwner.TARGET), slots[nodes], slots[: len(nodes)])
