"""Several drafters behind one: each request names its own, or ``auto`` and has it chosen round by round.

One drafter, the primary, may own KV layers and per-sequence state; the others live on the tokens alone. A sequence
that named another drafter never reaches the primary: its draft rows stay where they are (``seq.draft_rows``), and
``seq.draft`` stays None. Otherwise the primary digests every committed row, used or not, because a drafter whose rows
fell behind could not be taken up again. Where rounds may do without it, under ``auto`` and under draft lengths that go
down to 0, rows are held back until it is to draft: copying and plain steps do not pay for its steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

import torch

from paceline.errors import ConfigError
from paceline.spec_decode.base import DraftBudget, Drafter, ExtendItem, Settle
from paceline.spec_decode.drafters.auto import AskingOrder, AutoChooser
from paceline.spec_decode.drafters.none import NoDrafter
from paceline.spec_decode.sequence import Sequence
from paceline.spec_decode.trees.tree import DraftTree
from paceline.spec_decode.unread import UnreadChains, UnreadWalk
from paceline.speculation import AUTO, NONE

MEMORY = "held"
MAX_HELD_ROWS = 64  # of one sequence: bounds their memory, and how long the step that takes them all may be


@dataclass
class Held:
    """Rows of one sequence that the primary has yet to digest, in order."""

    items: list[ExtendItem] = field(default_factory=list)

    @classmethod
    def of(cls, seq: Sequence) -> Held:
        """The sequence's."""
        held = seq.memory.setdefault(MEMORY, cls())
        assert isinstance(held, cls)
        return held

    @property
    def num_rows(self) -> int:
        """Rows held."""
        return sum(item.end - item.start for item in self.items)

    def take(self) -> ExtendItem:
        """All of them as one item; none are left."""
        items, self.items = self.items, []
        return replace(items[0], end=items[-1].end, hidden=torch.cat([item.hidden for item in items]), final=True)


class SelectingDrafter(Drafter):
    """Routes every call to the drafters of its sequences, each called once with all of its own.

    It carries the primary's name, which is what a peer must match; trees carry the name of who made them.
    """

    def __init__(
        self,
        primary: Drafter,
        others: Mapping[str, Drafter],
        default: str,
        chooser: AutoChooser | None = None,
        fallback: str | None = None,
        *,
        patient: bool = False,
    ) -> None:
        """default: for requests that name none, or one that is not here. chooser: allows ``auto``. fallback: drafts
        for a sequence whose state for the primary never came. patient: draft lengths may go down to 0, hold rows back.

        Raises ConfigError when another than the primary has layers, rows or state, or ``default`` is not there.
        """
        for name, drafter in others.items():
            if drafter.kv_layers or drafter.state_width or drafter.aux_layers or drafter.lookahead:
                raise ConfigError("drafter", f"{name} keeps KV rows or state: only the primary drafter may")
            if name in (primary.name, AUTO):
                raise ConfigError("drafter", f"{name} is given twice")
        self._primary, self._chooser = primary, chooser
        self._drafters = {primary.name: primary, **others}
        self._drafters.setdefault(NONE, NoDrafter())
        self.choices = (*self._drafters, *([AUTO] if chooser is not None else []))
        if default not in self.choices:
            raise ConfigError("drafter", f"{default} is none of {', '.join(self.choices)}")
        if chooser is not None and chooser.primary not in (primary.name, NONE):
            raise ConfigError(
                "drafter", f"{AUTO} would take {chooser.primary} for the primary, which {primary.name} is"
            )
        unknown = [name for name in chooser.drafters if name not in self._drafters] if chooser is not None else []
        if unknown:
            raise ConfigError("drafter", f"{AUTO} may choose {', '.join(unknown)}, which this node does not have")
        self.default = default
        self.name = primary.name
        self.kv_layers, self.aux_layers = primary.kv_layers, primary.aux_layers
        self.lookahead, self.state_width = primary.lookahead, primary.state_width
        self.row_width, self.fused_width = primary.row_width, primary.fused_width
        self._fallback, self._patient = fallback, patient
        if fallback is not None and fallback not in self._drafters:
            raise ConfigError("drafter", f"falls back to {fallback}, which this node does not have")
        self.needs_extend = any(drafter.needs_extend for drafter in self._drafters.values())
        self.needs_argmax = any(drafter.needs_argmax for drafter in self._drafters.values())

    @property
    def primary(self) -> Drafter:
        """See Drafter."""
        return self._primary

    def choice(self, seq: Sequence) -> str:
        """The drafter of a request, or ``auto``."""
        asked = seq.request.speculation.drafter or self.default
        return asked if asked in self.choices else self.default

    def fuse(self, rows: torch.Tensor) -> torch.Tensor:
        """See Drafter."""
        return self._primary.fuse(rows)

    def draft_slots(self, budget: DraftBudget) -> int:
        """See Drafter: of the drafter that writes most."""
        return max(drafter.draft_slots(budget) for drafter in self._drafters.values())

    def extend(self, items: Seq[ExtendItem]) -> None:
        """See Drafter."""
        for name, drafter in self._drafters.items():
            mine = [item for item in items if drafter.needs_extend and self._may_use(name, item.seq)]
            now = [item for item in mine if drafter is not self._primary or not self._held(item)]
            if now:
                drafter.extend(now)
        self._digest([item.seq for item in items if Held.of(item.seq).num_rows > MAX_HELD_ROWS])

    def _held(self, item: ExtendItem) -> bool:
        """Hold back a decoded row, if the primary may not be asked next and could draft already."""
        seq = item.seq
        if not (self._patient or self.choice(seq) == AUTO) or not seq.has_candidates or item.start < seq.num_prefill:
            return False
        Held.of(seq).items.append(replace(item, hidden=item.hidden.clone()))  # its memory may be the next round's
        return True

    def _digest(self, seqs: Seq[Sequence]) -> None:
        """Give the primary what was held back of ``seqs``."""
        items = [held.take() for seq in seqs if (held := Held.of(seq)).items]
        if items:
            self._primary.extend(items)

    def propose(self, seqs: Seq[Sequence], budgets: Seq[DraftBudget]) -> list[DraftTree]:
        """See Drafter. A plan's later drafters are asked where the earlier found nothing; a primary that steps comes
        last, so that all of its sequences share its draft steps."""
        plans = self._plans(seqs, budgets)
        trees: list[DraftTree | None] = [None] * len(seqs)
        step = 0
        waiting = list(range(len(seqs)))
        last = self._primary.name if self._primary.needs_extend else ""
        for_primary: list[int] = []
        while waiting:
            groups: dict[str, list[int]] = {}
            for i in waiting:
                groups.setdefault(plans[i][step][0], []).append(i)
            for_primary += groups.pop(last, [])
            for name, group in groups.items():
                self._fill(name, group, [plans[i][step][1] for i in group], seqs, trees)
            step += 1
            waiting = [i for group in groups.values() for i in group if self._goes_on(trees[i], plans[i], step)]
        for_primary.sort()
        chosen = [next(budget for name, budget in plans[i] if name == last) for i in for_primary]
        self._digest([seqs[i] for i, budget in zip(for_primary, chosen, strict=True) if budget.num_draft_tokens])
        self._fill(last, for_primary, chosen, seqs, trees)
        done = [tree for tree in trees if tree is not None]
        for seq, tree in zip(seqs, done, strict=True):
            if self._chooser is not None and self.choice(seq) == AUTO:
                self._chooser.drafted(seq, tree)
        return done

    def propose_unread(self, seqs: Seq[Sequence], budgets: Seq[DraftBudget]) -> UnreadChains | None:
        """See Drafter: where all sequences are the primary's, by their own choice."""
        if self._chooser is not None or any(self.choice(seq) != self._primary.name for seq in seqs):
            return None
        if self._fallback is not None and self._primary.state_width and not all(seq.has_candidates for seq in seqs):
            return None
        self._digest([seq for seq, budget in zip(seqs, budgets, strict=True) if budget.num_draft_tokens])
        return self._primary.propose_unread(seqs, budgets)

    def extend_ahead(self, seqs: Seq[Sequence], walk: UnreadWalk) -> Settle | None:
        """See Drafter: the primary's, where it holds nothing back. All sequences are its own: its drafts are unread."""
        if self._patient or self._chooser is not None:
            return None
        return self._primary.extend_ahead(seqs, walk)

    def observe(self, seq: Sequence, tree: DraftTree, argmax: Seq[int]) -> None:
        """See Drafter: to the one that made the tree."""
        drafter = self._drafters.get(tree.drafter)
        if drafter is not None and drafter.needs_argmax:
            drafter.observe(seq, tree, argmax)

    def finish(self, seq: Sequence) -> None:
        """See Drafter: to all that the sequence may have met. Its pages may serve another: they get their rows."""
        if self.kv_layers:
            self._digest([seq])
        for name, drafter in self._drafters.items():
            if self._may_use(name, seq):
                drafter.finish(seq)

    def copies(self) -> dict[str, tuple[int, int]]:
        """See Drafter."""
        return {name: counts for drafter in self._drafters.values() for name, counts in drafter.copies().items()}

    def _may_use(self, name: str, seq: Sequence) -> bool:
        choice = self.choice(seq)
        return choice == name or (choice == AUTO and self._chooser is not None and name in self._chooser.drafters)

    def _plans(self, seqs: Seq[Sequence], budgets: Seq[DraftBudget]) -> list[AskingOrder]:
        plans: list[AskingOrder] = []
        if self._chooser is not None:
            self._chooser.start_round(len(seqs))
        for seq, budget in zip(seqs, budgets, strict=True):
            choice = self.choice(seq)
            # A drafter without hidden rows of its own (a draft model) drafts from tokens and KV alone.
            ready = seq.has_candidates or self._primary.state_width == 0
            if choice == self._primary.name and not ready and self._fallback is not None:
                plans.append(((self._fallback, budget),))
            elif choice == AUTO and self._chooser is not None:
                plans.append(self._chooser.choose(seq, budget, primary_ready=ready))
            else:
                plans.append(((choice, budget),))
        if self._chooser is not None:
            for i, (seq, budget) in enumerate(zip(seqs, budgets, strict=True)):
                if self.choice(seq) == AUTO:
                    plans[i] = self._chooser.settle(seq, budget, plans[i])
        return plans

    def _fill(
        self,
        name: str,
        group: Seq[int],
        budgets: Seq[DraftBudget],
        seqs: Seq[Sequence],
        trees: list[DraftTree | None],
    ) -> None:
        """Put the trees of ``name`` for the sequences ``group`` where they belong."""
        if not group:
            return
        made = self._drafters[name].propose([seqs[i] for i in group], budgets)
        for i, tree in zip(group, made, strict=True):
            trees[i] = tree if tree.drafter == name else replace(tree, drafter=name)

    @staticmethod
    def _goes_on(tree: DraftTree | None, plan: AskingOrder, step: int) -> bool:
        return step < len(plan) and tree is not None and tree.num_draft_tokens == 0
