"""The steps of a decode round as data (algorithms.md E15): what is drafted, what a judge makes of it, what is kept."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch

from paceline.attention.base import Segment
from paceline.models.late_tokens import LateTokens
from paceline.request import TokenLogprobs
from paceline.results import Round
from paceline.sampling.logprobs import token_logprobs
from paceline.spec_decode.accept.verify import Verdict
from paceline.spec_decode.sequence import Sequence
from paceline.spec_decode.trees.tree import DraftTree
from paceline.spec_decode.unread import UnreadChains

# Launches what follows a walk on the device. int32 [trees]: how many nodes were accepted, and the new token.
Ahead = Callable[[torch.Tensor, torch.Tensor], None]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Drafted:
    """A round's trees, one for each sequence, before the target has seen them."""

    seqs: Seq[Sequence]
    trees: Seq[DraftTree]
    tokens_left: Seq[int]  # how many tokens each sequence may still get, >= 1
    unread: UnreadChains | None = None  # where ``trees`` are its blank ones: their tokens are on the device alone

    @cached_property
    def sizes(self) -> list[int]:
        """Rows that the target computes for each sequence."""
        return [tree.num_nodes for tree in self.trees]

    def segments(self) -> list[Segment]:
        """What the target verifies; with ``late_tokens``."""
        return [_segment(seq, tree) for seq, tree in zip(self.seqs, self.trees, strict=True)]

    def late_tokens(self) -> LateTokens | None:
        """Tokens of ``segments`` that the host does not know."""
        return None if self.unread is None else self.unread.for_target()


@dataclass(frozen=True)
class Judged:
    """What the target made of every tree; its KV rows are compacted onto the accepted paths (D6)."""

    verdicts: list[Verdict]
    argmax: list[list[int]]  # its best token at each node of each tree; empty where nobody asked
    trees: list[DraftTree]  # with the tokens that only the device knew


class Judge(Protocol):
    """Samples the target's tokens. One is chosen for each batch: ``HostJudge`` or ``DeviceJudge``."""

    @property
    def takes_unread(self) -> bool:
        """Whether drafts may stay on the device until the verdict."""

    def first_tokens(self, seqs: Seq[Sequence], logits: torch.Tensor) -> list[int]:
        """Tokens after the prompts of ``seqs``. logits: float32 [len(seqs), V]."""

    def judge(self, drafted: Drafted, logits: torch.Tensor, *, want_argmax: bool, ahead: Ahead | None = None) -> Judged:
        """logits: float32 [nodes of all trees, V]. ahead: is called before the host waits, with a walk of drafts that
        it has not read; not otherwise."""


def accepted_rows(rows: torch.Tensor, path: Seq[int]) -> torch.Tensor:
    """Rows of the root and of the nodes of ``path``. rows: [num_nodes, width]; a view where they lie together."""
    nodes = [0, *path]
    if nodes == list(range(len(nodes))):
        return rows[: len(nodes)]
    return rows[nodes]


def commit(seq: Sequence, tree: DraftTree, verdict: Verdict, logits: torch.Tensor) -> tuple[TokenLogprobs, ...]:
    """Append the round's tokens; their log-probabilities where the request wants them. logits: [num_nodes, V]."""
    tokens = verdict.committed(tree)
    seq.token_ids.extend(tokens)
    seq.num_computed += len(tokens)
    seq.finish_reason = verdict.finish_reason
    top = seq.request.params.top_logprobs
    if top is None:
        return ()
    return tuple(token_logprobs(logits[n], t, top) for n, t in zip((0, *verdict.path), tokens, strict=True))


def counted(
    seqs: Seq[Sequence], judged: Judged, drafter: str, draft_s: float, verify_s: float
) -> Iterator[tuple[tuple[int, ...], Round]]:
    """Each sequence's new tokens and its round, which is entered in its statistics and in the log.

    drafter: who made the trees that do not say; draft_s, verify_s: seconds of the whole batch.
    """
    for seq, tree, verdict in zip(seqs, judged.trees, judged.verdicts, strict=True):
        name, accepted, depth = tree.drafter or drafter, len(verdict.path), max(tree.depths)
        seq.stats.add(tree.num_draft_tokens, depth, accepted, name, draft_s, verify_s)
        if log.isEnabledFor(logging.DEBUG):
            log.debug(
                "%s round %d: %s drafted %d, accepted %d of depth %d (%.2f), draft %.1f ms, verify %.1f ms",
                seq.request.request_id, seq.stats.rounds, name, tree.num_draft_tokens, accepted,
                depth, accepted / max(depth, 1), 1e3 * draft_s, 1e3 * verify_s,
            )  # fmt: skip
        yield tuple(verdict.committed(tree)), Round(tree.num_draft_tokens, accepted, depth, name, draft_s, verify_s)


def _segment(seq: Sequence, tree: DraftTree) -> Segment:
    if tree.is_chain:
        return Segment.linear(tree.token_ids, seq.num_computed, seq.table.slots)
    return Segment.tree(tree.token_ids, tree.parents, seq.num_computed, seq.table.slots)
