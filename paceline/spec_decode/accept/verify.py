"""The default acceptance rule, "sample, then descend" (algorithms.md B5c, E15); pure.

At each node the target's own token is sampled as plain decoding would sample it, and the walk goes to the child that
carries it, or stops there. So the text is a function of target, request and seed; drafts decide only how many tokens
a round yields. A leaf has no child, so its sample is the bonus token without a special case.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.request import FinishReason
from paceline.spec_decode.trees.tree import DraftTree


@dataclass(frozen=True)
class Verdict:
    """What one round commits: the tokens of ``path``, then ``new_token``. KV rows to keep: m + 1 + len(path)."""

    path: tuple[int, ...]  # accepted nodes in order, root excluded
    new_token: int  # sampled after the last accepted node; it has no KV row yet
    finish_reason: FinishReason | None = None  # STOP: new_token is a stop token; LENGTH: no token may follow it

    @property
    def finish(self) -> bool:
        """Whether the sequence ends with ``new_token``."""
        return self.finish_reason is not None

    def committed(self, tree: DraftTree) -> list[int]:
        """The committed tokens, at least one."""
        return [*(tree.token_ids[node] for node in self.path), self.new_token]


def walk(
    tree: DraftTree,
    sampled: Sequence[int] | Callable[[int], int],
    is_stop: Callable[[int], bool],
    max_new_tokens: int,
) -> Verdict:
    """Walk the tree from the root.

    ``sampled`` gives the target's token after each node: one per node, or a function asked only for nodes that are
    reached. The walk ends at the first stop token, which is committed and never descended into, and at
    ``max_new_tokens`` (>= 1) committed tokens (algorithms.md A4).
    """
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    sample = sampled if callable(sampled) else sampled.__getitem__
    path: list[int] = []
    node = 0
    while True:
        token = sample(node)
        if is_stop(token):
            return Verdict(tuple(path), token, FinishReason.STOP)
        if len(path) + 1 >= max_new_tokens:
            return Verdict(tuple(path), token, FinishReason.LENGTH)
        child = tree.child(node, token)
        if child is None:
            return Verdict(tuple(path), token)
        path.append(child)
        node = child
