"""One choice of a request while it is made: its tokens, text, rounds and times, whichever nodes serve it.

Tokens arrive by index, from several attempts if need be; each index is taken once. The detokenizer lives here, so a
stop string ends a choice at the same token whatever the size of the rounds.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Protocol

from cluster.contract.generation import ReceivedChoice
from paceline.errors import HandoffFailed, InvalidRequest
from paceline.parsing.answer import AnswerParts
from paceline.request import FinishReason, SequenceRequest, TokenLogprobs
from paceline.results import (
    Chunk,
    Completion,
    HandoffBytes,
    Round,
    ServedBy,
    SpeculationStats,
    Timing,
    Usage,
)
from paceline.spec_decode.stats import SpecStats
from paceline.tracing import NO_TRACE, Trace

NOTHING = AnswerParts()


class Detokenizer(Protocol):
    """paceline.text.tokenizer.IncrementalDetokenizer, as far as the router needs it."""

    @property
    def stopped(self) -> bool: ...

    @property
    def stop_string(self) -> str: ...

    def push(self, token_id: int) -> str:
        """Newly certain text that begins no stop string; often empty."""

    def finish(self) -> str:
        """The text that was withheld."""


class Parser(Protocol):
    """paceline.parsing.parser.AnswerParser, as far as the router needs it."""

    @property
    def over(self) -> bool: ...

    @property
    def thinking(self) -> bool: ...

    @property
    def num_calls(self) -> int: ...

    def push(self, text: str) -> AnswerParts:
        """What became certain."""

    def finish(self) -> AnswerParts:
        """What was withheld."""


class ChoiceRun:
    """Life: open, perhaps ``resume`` -> ``finish_reason`` set by ``take`` (stop string) or ``end`` -> ``complete``."""

    def __init__(
        self,
        index: int,
        request_id: str,
        sequence: SequenceRequest,
        detokenizer: Detokenizer,
        started_at: float,
        lossless: bool = True,
        parser: Parser | None = None,
    ) -> None:
        """started_at: arrival of the request, monotonic clock. lossless: what the acceptance rule is. parser: splits
        the text into its parts; None: the text is the answer."""
        self.index = index
        self.request_id = request_id
        self.sequence = sequence
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.cached_tokens: int | None = None  # of the first attempt that said so
        self.handoff = HandoffBytes()  # of all attempts
        self.nodes = ServedBy()
        self.trace: Trace = NO_TRACE  # the router sets it
        self.again: Chunk | None = None  # of a resumed choice: what is told again before anything else
        self.first_token_at: float | None = None
        self.last_token_at = started_at
        self._detokenizer = detokenizer
        self._started_at = started_at
        self._lossless = lossless
        self._parser = parser
        self._stats = SpecStats()
        self._reasoning_tokens = 0
        self._had = 0  # tokens that the client has from another router
        self._had_end = False  # it has the end too
        self._retell = False
        wanted = sequence.params.prompt_logprobs is not None
        self._prompt_logprobs_left = len(sequence.prompt_token_ids) - 1 if wanted else 0

    def resume(self, received: ReceivedChoice, retell: bool = False) -> None:
        """Before anything else: what the client has. Tokens given here are what nodes go on from; nodes make the others
        again. All of them are taken without being sent, or with ``retell`` sent in chunks that say so: those given here
        in ``again``. Raises InvalidRequest.
        """
        self._had, self._had_end, self._retell = received.next_index, received.complete, retell
        self._prompt_logprobs_left -= received.num_prompt_logprobs
        token_ids = received.token_ids
        parts = self._push(token_ids)
        self.end_by_tokens()
        if len(self.token_ids) < len(token_ids):
            raise InvalidRequest("resume.choices", f"choice {self.index} ended at token {len(self.token_ids)}")
        if retell and token_ids:
            again = Chunk(self.index, first_index=0, token_ids=token_ids, logprobs=received.logprobs, retold=True)
            self.again = with_parts(again, parts)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether any of the prompt's log-probabilities are still to be told."""
        return self._prompt_logprobs_left > 0

    @property
    def is_scored_alone(self) -> bool:
        """Whether the request looks at the prompt, and nothing would be left to decode after one more token."""
        params = self.sequence.params
        scores = params.max_tokens == 0 or params.prompt_logprobs is not None
        return scores and params.max_tokens - len(self.token_ids) <= 1

    def for_nodes(self) -> SequenceRequest:
        """What nodes are asked now: to go on after the tokens that are there, and to tell of the prompt what is left to
        tell. They make one token at least."""
        params = self.sequence.params
        wanted = params.prompt_logprobs if self.wants_prompt_logprobs else None
        asked = replace(params, max_tokens=max(params.max_tokens, 1), prompt_logprobs=wanted)
        return replace(self.sequence, output_token_ids=tuple(self.token_ids), params=asked)

    def take_prompt_logprobs(self, first_position: int, logprobs: Sequence[TokenLogprobs]) -> Chunk | None:
        """Take log-probabilities of the prompt's tokens from ``first_position`` on; those already sent are dropped.
        None when all were. Raises HandoffFailed on a gap."""
        known = len(self.sequence.prompt_token_ids) - self._prompt_logprobs_left - first_position
        if known < 0:
            raise HandoffFailed(f"log-probabilities of the prompt are missing before those of token {first_position}")
        new = tuple(logprobs[known : known + self._prompt_logprobs_left])
        if not new:
            return None
        self._prompt_logprobs_left -= len(new)
        return Chunk(self.index, max(len(self.token_ids), self._had), prompt_logprobs=new)

    def cut(self, first_index: int, num_tokens: int) -> list[range]:
        """Tokens from index ``first_index`` on, as they are to be taken: where they are told again, no chunk has both
        what the client has and what it has not. Returns places among those tokens."""
        at = self._had - first_index
        if not self._retell or not 0 < at < num_tokens:
            return [range(num_tokens)]
        return [range(at), range(at, num_tokens)]

    def take(
        self,
        first_index: int,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs],
        rounds: Sequence[Round],
    ) -> Chunk | None:
        """Take tokens from index ``first_index`` on; those already taken, or sent, are dropped. None when all were.
        rounds: what made them, in order.

        Raises HandoffFailed, and takes nothing, on a gap, on a token that differs from the one sent before, and where
        log-probabilities of the prompt should have come first.
        """
        if self.wants_prompt_logprobs:
            raise HandoffFailed("a token came before all log-probabilities of the prompt")
        if self.sequence.params.max_tokens == 0:  # made because nodes make one at least; nobody asked for it
            self.end(FinishReason.LENGTH)
            return None
        known = len(self.token_ids) - first_index
        if known < 0:
            raise HandoffFailed(f"token {len(self.token_ids)} is missing: the node went on with {first_index}")
        if list(token_ids[:known]) != self.token_ids[first_index : first_index + len(token_ids)]:
            raise HandoffFailed(f"tokens from {first_index} on differ from those already sent")
        start = len(self.token_ids)
        parts = self._push(token_ids[known:])
        taken = len(self.token_ids) - start
        if taken == 0:
            return None
        counted = self._count(rounds_after(rounds, known), taken)
        retold = self._retell and len(self.token_ids) <= self._had
        first = start if retold else max(start, self._had)
        if first >= len(self.token_ids):
            return None
        if not retold:
            self._stamp()
        chunk = Chunk(
            choice=self.index,
            first_index=first,
            token_ids=tuple(self.token_ids[first:]),
            logprobs=tuple(logprobs[known + first - start : known + taken]),
            round=counted[0] if len(counted) == 1 else None,
            retold=retold,
        )
        return with_parts(chunk, parts)

    def _push(self, token_ids: Sequence[int]) -> AnswerParts:
        """Append tokens up to the one that completes a stop string or the only call, or that is a stop token (whose
        text is not part of the answer, unless it asks for that). Returns the parts of those that are to be told."""
        parts, params = NOTHING, self.sequence.params
        for token_id in token_ids:
            self.token_ids.append(token_id)
            stops = token_id in params.stop_token_ids
            if stops and not params.include_stop_str_in_output:
                break
            piece = self._read(self._detokenized(self._detokenizer.push(token_id)))
            if self._retell or len(self.token_ids) > self._had:
                parts += piece
            if stops:
                break
            if self._detokenizer.stopped or (self._parser is not None and self._parser.over):
                self.finish_reason = FinishReason.STOP
                break
        return parts

    def _detokenized(self, text: str) -> str:
        """``text`` as the detokenizer gave it, with the stop string that it ends with where that is asked for."""
        includes = self._detokenizer.stopped and self.sequence.params.include_stop_str_in_output
        return text + self._detokenizer.stop_string if includes else text

    def _read(self, text: str) -> AnswerParts:
        """The parts that the text of one token brings. Tokens of the reasoning are counted."""
        if self._parser is None:
            return AnswerParts(text)
        thought = self._parser.thinking
        parts = self._parser.push(text)
        self._reasoning_tokens += thought or self._parser.thinking
        return parts

    def _stamp(self) -> None:
        self.last_token_at = time.monotonic()
        if self.first_token_at is None:
            self.first_token_at = self.last_token_at

    def _count(self, rounds: Sequence[Round], taken: int) -> list[Round]:
        """Count rounds as far as their tokens are part of the answer."""
        counted: list[Round] = []
        for round_ in rounds:
            if taken <= 0:
                break
            accepted = min(round_.num_accepted, taken - 1)
            taken -= round_.num_accepted + 1
            counted.append(replace(round_, num_accepted=accepted))
            depth = max(accepted, round_.depth)
            self._stats.add(round_.num_draft_tokens, depth, accepted, round_.drafter, round_.draft_s, round_.verify_s)
        return counted

    def end(self, reason: FinishReason) -> None:
        """The node says that the sequence ended. A stop string that came first keeps its reason."""
        if self.finish_reason is None:
            self.finish_reason = reason

    def end_by_tokens(self) -> None:
        """End when the tokens alone say so: a node may die between the last token and the word, and a request may ask
        for none."""
        params = self.sequence.params
        if self.token_ids and self.token_ids[-1] in params.stop_token_ids:
            self.end(FinishReason.STOP)
        elif len(self.token_ids) >= params.max_tokens and not self.wants_prompt_logprobs:
            self.end(FinishReason.LENGTH)

    def add_handoff(self, handoff: HandoffBytes) -> None:
        """Count the bytes of a completed hand-off."""
        have = self.handoff
        self.handoff = HandoffBytes(
            have.target_kv + handoff.target_kv,
            have.draft_kv + handoff.draft_kv,
            have.hidden + handoff.hidden,
            have.meta + handoff.meta,
        )

    def complete(self) -> Chunk:
        """The last chunk: text that was held back, and how it ended."""
        assert self.finish_reason is not None
        if len(self.token_ids) < self._had:
            raise InvalidRequest("resume.choices", f"choice {self.index} has {len(self.token_ids)} tokens")
        parts = NOTHING if self._detokenizer.stopped else self._rest()
        if self._detokenizer.stopped:  # the text held back may complete a stop string
            self.finish_reason = FinishReason.STOP
        if self._parser is not None:
            parts += self._parser.finish()
            if self.finish_reason is FinishReason.STOP and self._parser.num_calls:
                self.finish_reason = FinishReason.TOOL_CALLS
        self.trace.record("finished", reason=self.finish_reason, tokens=len(self.token_ids))
        chunk = Chunk(
            choice=self.index,
            first_index=len(self.token_ids),
            completion=self._completion(self.finish_reason),
            retold=self._had_end,
        )
        return with_parts(chunk, parts)

    def _rest(self) -> AnswerParts:
        """What was held back, which may complete a stop string."""
        text = self._detokenized(self._detokenizer.finish())
        return AnswerParts(text) if self._parser is None else self._parser.push(text)

    def _completion(self, reason: FinishReason) -> Completion:
        prompt, made, stats = len(self.sequence.prompt_token_ids), len(self.token_ids), self._stats
        return Completion(
            finish_reason=reason,
            usage=Usage(
                prompt, len(self.token_ids), min(self.cached_tokens or 0, prompt), min(self._reasoning_tokens, made)
            ),
            speculation=SpeculationStats(
                rounds=stats.rounds,
                draft_tokens=stats.draft_tokens,
                accepted_tokens=stats.accepted_tokens,
                acceptance_length=stats.acceptance_length,
                accepted_per_position=tuple(stats.accepted_per_position),
                drafted_per_position=tuple(stats.drafted_per_position),
                accepted_per_round=tuple(stats.accepted_per_round),
                rounds_by_drafter=dict(stats.rounds_by_drafter),
                draft_s=stats.draft_s,
                verify_s=stats.verify_s,
                lossless=self._lossless,
                predicted_tokens=stats.predicted_tokens,
                accepted_predicted_tokens=stats.accepted_predicted_tokens,
            ),
            timing=self._timing(),
            nodes=self.nodes,
            handoff=self.handoff,
            seed=self.sequence.params.seed or 0,
            request_id=self.request_id,
            stop_string=self._detokenizer.stop_string,
        )

    def _timing(self) -> Timing:
        first = self.first_token_at if self.first_token_at is not None else time.monotonic()
        spent = self.last_token_at - first
        speed = (len(self.token_ids) - self._had - 1) / spent if spent > 0 else 0.0
        return Timing(first - self._started_at, time.monotonic() - self._started_at, speed)


def rounds_after(rounds: Sequence[Round], num_tokens: int) -> list[Round]:
    """What is left of rounds without the first ``num_tokens`` of their tokens."""
    left = []
    for round_ in rounds:
        if num_tokens == 0:
            left.append(round_)
        elif num_tokens <= round_.num_accepted:
            left.append(replace(round_, num_accepted=round_.num_accepted - num_tokens))
        num_tokens = max(num_tokens - round_.num_accepted - 1, 0)
    return left


def rounds_within(rounds: Sequence[Round], num_tokens: int) -> list[Round]:
    """Those that have no tokens but among the first ``num_tokens``."""
    ends = accumulate(round_.num_accepted + 1 for round_ in rounds)
    return [round_ for round_, end in zip(rounds, ends, strict=True) if end <= num_tokens]


def with_parts(chunk: Chunk, parts: AnswerParts) -> Chunk:
    """``chunk`` with what its tokens came to. Cut in order, the first part has the tokens and the last the completion,
    and each is a thought, then text, then a part of one call, as far as it has them."""
    whole = replace(chunk, text=parts.text, reasoning=parts.reasoning, tool_calls=parts.tool_calls)
    if not parts.mixed:  # most chunks, of a token each
        return whole
    behind = replace(chunk, first_index=chunk.first_index + len(chunk.token_ids), token_ids=(), logprobs=(), round=None)
    steps = [
        replace(
            behind if i else chunk,
            text=step.text,
            reasoning=step.reasoning,
            tool_calls=step.tool_calls,
            completion=chunk.completion if step is parts.mixed[-1] else None,
        )
        for i, step in enumerate(parts.mixed)
    ]
    return replace(whole, in_order=tuple(steps))
