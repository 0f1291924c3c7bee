"""Are the heads those of this target? Asked once, on a few built-in prompts, before a node serves.

Heads that do not fit change no text: they are only accepted less, and nobody would notice (algorithms.md E12, H7).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path

from paceline.assembly.scratch import ScratchSequences
from paceline.config import WEIGHTLESS_DRAFTERS
from paceline.engine.model_runner import ModelRunner
from paceline.errors import InvalidRequest
from paceline.request import SpeculationParams
from paceline.spec_decode.length.adaptive import FixedLength
from paceline.spec_decode.sequence import Sequence
from paceline.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

FLOOR = 0.10  # first-position acceptance on QUESTIONS: 0.36 after an hour's training, 0.01 on the wrong layers
LIMIT_S = 2.0
MAX_TOKENS = 32  # of each prompt
MIN_DRAFTS = 16  # fewer say nothing
QUESTIONS = (  # answers that any head finds easy, so that a low share says something
    "What is the capital of France?",
    "How do I boil an egg?",
    "What is 12 plus 30? Explain each step.",
)


def check_heads(runner: ModelRunner, folder: Path) -> float | None:
    """Measure, and warn when it is below FLOOR. folder: the target's, for its tokenizer. None: nothing to judge."""
    name = runner.drafter.name
    if name in WEIGHTLESS_DRAFTERS or runner.limits.budget.num_draft_tokens == 0:
        return None
    return judge(name, first_acceptance(runner, tokenized(folder)))


def judge(name: str, share: float | None) -> float | None:
    """Say in the log what was found; returns it."""
    if share is None:
        log.info("the heads of %s were not checked: too few drafts in %g s, or no room", name, LIMIT_S)
    elif share < FLOOR:
        log.warning(
            "only %.3f of the first draft tokens of %s are accepted on built-in prompts (floor %.2f). The text is "
            "right, but drafting costs more than it brings. Check that the heads were trained, for this very revision "
            "of the target, and that they read the auxiliary layers they were trained on (config.json of the heads)",
            share, name, FLOOR,
        )  # fmt: skip
    else:
        log.info("the heads of %s: %.2f of their first draft tokens are accepted on built-in prompts", name, share)
    return share


def first_acceptance(
    runner: ModelRunner,
    prompts: Seq[Seq[int]],
    *,
    limit_s: float = LIMIT_S,
    clock: Callable[[], float] = time.perf_counter,
) -> float | None:
    """Accepted share of the first draft tokens over greedy answers to ``prompts``; None where too few were drafted."""
    end = clock() + limit_s
    slots = MAX_TOKENS + runner.spec_slots
    pages = sum(-(-(len(prompt) + slots) // runner.page_size) for prompt in prompts)
    longest = max(len(prompt) for prompt in prompts) + MAX_TOKENS
    if pages > runner.allocator.num_free or longest > runner.max_model_len:
        return None
    one = SpeculationParams(num_draft_tokens=1, tree_width=1, drafter=runner.drafter.name)
    policy, runner.policy = runner.policy, FixedLength()  # what is learnt here is nobody's
    try:
        with ScratchSequences(runner) as scratch:
            scratch.add(prompts, MAX_TOKENS, slots, one)
            while clock() < end and (live := [seq for seq in scratch.seqs if seq.finish_reason is None]):
                runner.decode(live)
            return _share(scratch.seqs)
    finally:
        runner.policy = policy


def _share(seqs: Seq[Sequence]) -> float | None:
    drafted = sum(sum(seq.stats.drafted_per_position[:1]) for seq in seqs)
    accepted = sum(sum(seq.stats.accepted_per_position[:1]) for seq in seqs)
    return accepted / drafted if drafted >= MIN_DRAFTS else None


def tokenized(folder: Path) -> list[list[int]]:
    """The built-in questions, as a chat where the model has a template."""
    tokenizer = Tokenizer.from_folder(folder)
    try:
        return [tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in QUESTIONS]
    except InvalidRequest:
        return [tokenizer.encode(text) for text in QUESTIONS]
