"""Are the heads those of this target, and do they pay on this host? Asked once, on a few built-in prompts, before a
node serves.

Heads that do not fit change no text: they are only accepted less, and nobody would notice (algorithms.md E12, H7).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from paceline.assembly.trial_sequences import TrialSequences
from paceline.engine.model_runner import ModelRunner
from paceline.errors import InvalidRequest
from paceline.request import SpeculationParams
from paceline.spec_decode.length.adaptive import FixedLength
from paceline.spec_decode.sequence import Sequence
from paceline.speculation import NONE, is_weightless
from paceline.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

FLOOR = 0.10  # first-position acceptance on QUESTIONS: 0.36 after an hour's training, 0.01 on the wrong layers
LIMIT_S = 2.0
MAX_TOKENS = 32  # of each prompt
MIN_DRAFTS = 16  # fewer say nothing
MIN_TIMED = 4  # rounds of each kind; fewer say nothing of their seconds
QUESTIONS = (  # answers that any head finds easy, so that a low share says something
    "What is the capital of France?",
    "How do I boil an egg?",
    "What is 12 plus 30? Explain each step.",
)
Clock = Callable[[], float]


@dataclass(frozen=True)
class HeadReport:
    """What the heads did on the built-in prompts."""

    first_acceptance: float  # share of rounds whose first draft position was accepted
    tokens_per_round: float  # of one sequence, the bonus counted
    round_steps: float | None  # seconds of a drafted round, in plain steps of the same batch; None: too few were timed

    @property
    def speedup(self) -> float | None:
        """Over plain decoding; None where rounds were not timed."""
        return None if self.round_steps is None else self.tokens_per_round / self.round_steps


def check_heads(
    runner: ModelRunner, folder: Path, *, weighed: bool = False, clock: Clock = time.perf_counter
) -> HeadReport | None:
    """Try the heads, and warn where they do not fit or do not pay. None: nothing to judge.

    folder: the target's, for its tokenizer. weighed: every round of this deployment weighs drafting against its cost,
    so heads that do not pay are not asked.
    """
    name = runner.drafter.name
    if is_weightless(name) or runner.limits.budget.num_draft_tokens == 0:
        return None
    return judge(name, try_heads(runner, tokenized(folder), clock=clock), weighed=weighed)


def judge(name: str, report: HeadReport | None, *, weighed: bool = False) -> HeadReport | None:
    """Say in the log what was found; returns it."""
    if report is None:
        log.info("the heads of %s were not checked: too few drafts in %g s, or no room", name, LIMIT_S)
    elif report.first_acceptance < FLOOR:
        log.warning(
            "only %.3f of the first draft tokens of %s are accepted on built-in prompts (floor %.2f). The text is "
            "right, but drafting costs more than it brings. Check that the heads were trained, for this very revision "
            "of the target, and that they read the auxiliary layers they were trained on (config.json of the heads)",
            report.first_acceptance, name, FLOOR,
        )  # fmt: skip
    elif report.speedup is not None and report.speedup < 1.0 and not weighed:
        log.warning(
            "drafting with %s is %.2f times as fast as plain decoding on this host: on built-in prompts a round yields "
            "%.2f tokens and takes as long as %.2f plain steps. The text is right. --drafter auto drafts only where it "
            "pays",
            name, report.speedup, report.tokens_per_round, report.round_steps,
        )  # fmt: skip
    else:
        log.info(
            "the heads of %s: %.2f of their first draft tokens are accepted on built-in prompts, %.2f tokens a round",
            name, report.first_acceptance, report.tokens_per_round,
        )  # fmt: skip
    return report


def try_heads(
    runner: ModelRunner, prompts: Seq[Seq[int]], *, limit_s: float = LIMIT_S, clock: Clock = time.perf_counter
) -> HeadReport | None:
    """Greedy answers to ``prompts``, drafted as the deployment does and decoded plainly, in turns; None where too few
    tokens were drafted, or the pool has no room."""
    end = clock() + limit_s
    slots = MAX_TOKENS + runner.spec_slots
    most = max(len(prompt) for prompt in prompts)
    pages, longest = -(-(most + slots) // runner.page_size), most + MAX_TOKENS
    if runner.allocator.fits(pages) < 2 * len(prompts) or longest > runner.max_model_len:
        return None
    policy, runner.policy = runner.policy, FixedLength()  # what is learnt here is nobody's
    try:
        with TrialSequences(runner) as drafted, TrialSequences(runner) as plain:
            drafted.add(prompts, MAX_TOKENS, slots, SpeculationParams(drafter=runner.drafter.name))
            plain.add(prompts, MAX_TOKENS, slots, SpeculationParams(drafter=NONE))
            seconds: list[tuple[float, float]] = []  # of a drafted and of a plain round, of as many sequences each
            while clock() < end and (live := _live(drafted.seqs)):
                drafted_s = _round_s(runner, live, clock)
                if len(others := _live(plain.seqs)) == len(live):
                    seconds.append((drafted_s, _round_s(runner, others, clock)))
            return _report(drafted.seqs, seconds[1:])  # the first of all pays for what is made once
    finally:
        runner.policy = policy


def _live(seqs: Seq[Sequence]) -> list[Sequence]:
    return [seq for seq in seqs if seq.finish_reason is None]


def _round_s(runner: ModelRunner, seqs: list[Sequence], clock: Clock) -> float:
    began = clock()
    runner.decode(seqs)
    return clock() - began


def _report(seqs: Seq[Sequence], seconds: Seq[tuple[float, float]]) -> HeadReport | None:
    drafted = sum(sum(seq.stats.drafted_per_position[:1]) for seq in seqs)
    accepted = sum(sum(seq.stats.accepted_per_position[:1]) for seq in seqs)
    if drafted < MIN_DRAFTS:
        return None
    rounds, tokens = (sum(getattr(seq.stats, name) for seq in seqs) for name in ("rounds", "accepted_tokens"))
    steps = median(d / p for d, p in seconds) if len(seconds) >= MIN_TIMED else None
    return HeadReport(accepted / drafted, 1 + tokens / rounds, steps)


def tokenized(folder: Path) -> list[list[int]]:
    """The built-in questions, as a chat where the model has a template."""
    tokenizer = Tokenizer.from_folder(folder)
    try:
        return [tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in QUESTIONS]
    except InvalidRequest:
        return [tokenizer.encode(text) for text in QUESTIONS]
