"""One sequence on a node: its tokens, its pages, its drafter's state, its counts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from paceline.errors import InvalidRequest
from paceline.request import FinishReason, SequenceRequest, TokenLogprobs
from paceline.spec_decode.stats import SpecStats

if TYPE_CHECKING:
    from paceline.grammar.cursor import GrammarCursor
    from paceline.kvcache.table import PageTable


@dataclass
class DraftState:
    """What a drafter keeps of one sequence between rounds, and what crosses in a hand-off (algorithms.md E4, H1).

    ``proposal_ids``/``proposal_probs`` are the candidates the last extend produced: row d holds, best first, the
    candidates for position m+1+d. A drafter that runs its own steps (MTP reused, EAGLE) has one row; D chained
    MTP modules have D rows. ``hidden`` is what later draft forwards need: the last draft output a_{m-1} (reused),
    or the window g^{k-1}_{m-k+1}, k=2..D (chained).
    """

    proposal_ids: torch.Tensor  # int64 [depth, width], CPU or the model's device
    proposal_probs: torch.Tensor  # float32 [depth, width], likewise
    hidden: torch.Tensor  # [rows, hidden_size], the model's dtype and device


@dataclass
class Sequence:
    """State of one sequence on one node.

    Notation of algorithms.md A2: with last committed token t_m, ``len(token_ids) == m + 1`` and
    ``num_computed == m`` target KV rows are valid; t_m is the root of the next tree.
    """

    request: SequenceRequest
    token_ids: list[int]  # prompt, resumed output, then committed tokens; the runner appends
    num_prefill: int  # tokens that prefill covers: prompt and resumed output
    table: PageTable  # pages of this sequence; the scheduler owns it
    num_computed: int = 0  # valid target KV rows; the runner advances it
    cached_tokens: int = 0  # of them, found in the prefix cache
    draft: DraftState | None = None  # the drafter writes it; None: nothing to draft from yet
    draft_rows: int = 0  # exact draft KV rows (of the first module); the drafter advances it
    stats: SpecStats = field(default_factory=SpecStats)
    finish_reason: FinishReason | None = None
    grammar: GrammarCursor | None = None  # where it stands in the request's grammar; None: it has none
    failure: InvalidRequest | None = None  # why its grammar cannot go on; what was committed with it is not to be sent
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # the runner appends them, the node takes them
    memory: dict[str, object] = field(
        default_factory=dict
    )  # what drafters and choosers keep; rebuilt from token_ids at need

    @classmethod
    def start(cls, request: SequenceRequest, table: PageTable) -> Sequence:
        """A sequence before its prefill."""
        tokens = [*request.prompt_token_ids, *request.output_token_ids]
        return cls(request=request, token_ids=tokens, num_prefill=len(tokens), table=table)

    def take_prompt_logprobs(self) -> tuple[int, list[TokenLogprobs]]:
        """Those made since the last call, and the place in the prompt of the first of them. Between two steps."""
        made, self.prompt_logprobs = self.prompt_logprobs, []
        done = min(self.num_computed, len(self.request.prompt_token_ids) - 1)  # the last place that they reach
        return done - len(made) + 1, made

    @property
    def has_candidates(self) -> bool:
        """Whether the drafter left something to draft from; it leaves none before it has every committed row."""
        return self.draft is not None and self.draft.proposal_ids.shape[0] > 0

    @property
    def num_output(self) -> int:
        """Output tokens so far, resumed ones included."""
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        """Output tokens so far, resumed ones included."""
        return self.token_ids[len(self.request.prompt_token_ids) :]
