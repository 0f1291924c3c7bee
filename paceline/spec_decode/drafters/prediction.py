"""Drafting from what the request itself says its answer will be, e.g. a file of which some lines are to change.

The answer is followed through the prediction: as long as its tokens are the predicted ones, the next predicted tokens
are the draft. Where it leaves the prediction, the place at which it comes back is searched for by its last tokens, and
until then the deployment's drafter drafts. How far a draft goes depends on how long the two agreed, as for any copy
(copying.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.spec_decode.base import DraftBudget
from paceline.spec_decode.drafters.copying import GRAM_SIZES, MAX_MATCH, CopyLimits, grow, text_of
from paceline.spec_decode.sequence import Sequence
from paceline.spec_decode.trees.tree import DraftTree
from paceline.speculation import PREDICTION

MEMORY = "prediction"
LEAST_MATCH = 2  # tokens that must agree after the answer left the prediction: single ones agree by chance


@dataclass
class Followed:
    """Where in the prediction the answer stands."""

    text: str  # the prediction, a code point for each token
    place: int = 0  # of the token that is predicted next
    agreed: int = MAX_MATCH  # tokens before it that the answer has too; 0: it left the prediction. The start is trusted
    seen: int = 0  # output tokens that were looked at

    def follow(self, output: list[int]) -> None:
        """Go on to the end of ``output``."""
        for token in output[self.seen :]:
            if self.agreed and self.text[self.place : self.place + 1] == chr(token):
                self.place, self.agreed = self.place + 1, self.agreed + 1
            else:
                self.agreed = 0
        self.seen = len(output)
        if not self.agreed:
            self._search(text_of(output[-MAX_MATCH:]))

    def _search(self, tail: str) -> None:
        """Look for the end of the answer: of its longest known end the next place, or else the last one before."""
        for size in GRAM_SIZES:
            if LEAST_MATCH <= size <= len(tail):
                gram = tail[-size:]
                at = self.text.find(gram, max(0, self.place - size))
                if at < 0:
                    at = self.text.rfind(gram)
                if at >= 0:
                    self.place, self.agreed = at + size, size
                    return


def predicted_tree(seq: Sequence, budget: DraftBudget) -> DraftTree | None:
    """A chain of what the request predicts next, within ``budget``. None where it predicts nothing or drafts nothing,
    and where the answer is somewhere else."""
    ids = seq.request.speculation.prediction_token_ids
    if not ids or budget.num_draft_tokens == 0:
        return None
    followed = seq.memory.get(MEMORY)
    if not isinstance(followed, Followed):
        followed = seq.memory[MEMORY] = Followed(text_of(ids))
    followed.follow(seq.output_token_ids)
    if not followed.agreed or followed.place >= len(followed.text):
        return None
    bounds = CopyLimits(budget.num_draft_tokens, budget.num_draft_tokens, width=1)
    pairs = grow([(float(followed.agreed), followed.text, followed.place)], bounds)
    nodes = range(len(pairs) + 1)
    tokens = (seq.token_ids[-1], *(token for _, token in pairs))
    return DraftTree(tokens, tuple(i - 1 for i in nodes), tuple(nodes), None, PREDICTION)
