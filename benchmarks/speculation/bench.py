"""What each drafter is worth: every drafter on every prompt, in one process, on one loaded target.

The drafters take each prompt in turn and the order rotates from prompt to prompt, so that whatever else the machine
does hits all alike. A drafter that learns across requests (suffix, trie) learns as it would in a server that answers
these prompts once, in this order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from benchmarks.common.decode_loop import Answer, DecodeLoop, TimedRunner
from benchmarks.speculation.drafter_specs import BASELINE
from benchmarks.speculation.prompts import Prompt
from benchmarks.speculation.stats import Record, Summary, first_difference, summarise
from paceline.engine.model_runner import ModelRunner
from paceline.errors import ConfigError
from paceline.request import SamplingParams, SequenceRequest

WARM_UP_PROMPT, WARM_UP_TOKENS = 64, 16

Encode = Callable[
    [Sequence[str], Sequence[str]], "tuple[int, ...] | None"
]  # (turns, answers) -> prompt, None: too long
Decode = Callable[[Sequence[int]], str]
Progress = Callable[[int, int, str], None]  # (cases done, cases in all, what runs now)


@dataclass(frozen=True)
class Settings:
    """What was run; part of the results."""

    model: str
    dtype: str
    device: str
    threads: int
    prompts: str  # file name
    max_tokens: int
    temperature: float
    seed: int
    turns: str  # "first" or "all"
    max_prompt_tokens: int
    context: int = 0  # tokens that prompts were lengthened to; 0: as they are

    def params(self, stop_token_ids: tuple[int, ...], number: int) -> SamplingParams:
        """Sampling of the prompt with that number."""
        return SamplingParams(
            temperature=self.temperature,
            max_tokens=self.max_tokens,
            seed=self.seed + number,
            stop_token_ids=stop_token_ids,
        )


@dataclass(frozen=True)
class Report:
    """The results. Written as JSON and read back."""

    settings: Settings
    kernels: str
    bit_exact: bool  # whether this host gives a row the same bits however it is batched
    dropped: dict[str, int]  # prompts longer than max_prompt_tokens, by category
    plain_step_s: float  # one round of ``none``, mean
    summaries: tuple[Summary, ...]
    records: tuple[Record, ...]

    def to_json(self) -> str:
        """See Report."""
        return TypeAdapter(Report).dump_json(self).decode()

    @classmethod
    def read(cls, path: Path) -> Report:
        """Raises ConfigError when ``path`` is not such a file."""
        try:
            return TypeAdapter(cls).validate_json(path.read_bytes())
        except ValidationError as error:
            raise ConfigError("json", f"{path} is no result of this benchmark: {error.errors()[0]['msg']}") from None


@dataclass(frozen=True)
class Case:
    """One prompt as token ids: a first turn, or a later one with the conversation before it."""

    name: str
    category: str
    request: SequenceRequest


def compare(
    prompts: Sequence[Prompt],
    runners: Mapping[str, ModelRunner],
    settings: Settings,
    encode: Encode,
    decode: Decode,
    stop_token_ids: tuple[int, ...] = (),
    dropped: Mapping[str, int] | None = None,
    progress: Progress = lambda done, total, what: None,
) -> Report:
    """Run everything. runners: by label, ``none`` among them; each is this function's alone from here on.

    Later turns answer a conversation with ``none``'s own answers, so that every drafter has the same prompts.
    """
    if BASELINE not in runners:
        raise ConfigError("drafters", f"{BASELINE} must be among them: the others are compared with it")
    timed = [TimedRunner(label, runner) for label, runner in runners.items()]
    for each in timed:
        warm_up(each, settings.params((), 0))
    too_long, records = Counter(dropped or {}), list[Record]()
    total, done = sum(_num_turns(p, settings) for p in prompts), 0
    for prompt in prompts:
        answers: list[str] = []
        for turn in range(_num_turns(prompt, settings)):
            name = f"{prompt.prompt_id}/{turn}"
            progress(done, total, f"{prompt.group} {name}")
            ids = encode(prompt.turns[: turn + 1], answers)
            if ids is None:
                too_long[prompt.group] += 1
                break
            request = SequenceRequest(name, ids, settings.params(stop_token_ids, done))
            case = Case(name, prompt.group, request)
            told, plain = run_case(case, rotated(timed, done))
            records += sorted(told, key=lambda r: list(runners).index(r.drafter))
            answers.append(decode(plain.token_ids))
            done += 1
    if not records:
        raise ConfigError("prompts", "every prompt is longer than --max-prompt-tokens")
    progress(total, total, "done")
    return _report(settings, runners[BASELINE], too_long, records)


def _report(settings: Settings, plain: ModelRunner, dropped: Counter[str], records: list[Record]) -> Report:
    of_plain = [r for r in records if r.drafter == BASELINE]
    return Report(
        settings=settings,
        kernels=plain.identity.kernels,
        bit_exact=plain.bit_exact,
        dropped=dict(dropped),
        plain_step_s=sum(r.decode_s for r in of_plain) / max(1, sum(r.rounds for r in of_plain)),
        summaries=tuple(summarise(records)),
        records=tuple(records),
    )


def _num_turns(prompt: Prompt, settings: Settings) -> int:
    return len(prompt.turns) if settings.turns == "all" else 1


def rotated(timed: Sequence[TimedRunner], by: int) -> list[TimedRunner]:
    """The same runners, another one first each time."""
    start = by % len(timed)
    return [*timed[start:], *timed[:start]]


def warm_up(timed: TimedRunner, params: SamplingParams) -> None:
    """One request that is not of the set: kernels, memory and the drafter's buffers have been used before the clock."""
    ids = tuple(3 + (i * 7919) % (timed.runner.vocab_size - 3) for i in range(WARM_UP_PROMPT))
    longest = min(WARM_UP_TOKENS, params.max_tokens)
    params = replace(params, seed=0, max_tokens=longest, stop_token_ids=())
    DecodeLoop(timed, [SequenceRequest("warm-up", ids, params)]).finish()


def run_case(case: Case, timed: Sequence[TimedRunner]) -> tuple[list[Record], Answer]:
    """One prompt under every drafter, and the baseline's answer."""
    loops = {each.label: DecodeLoop(each, [case.request]).finish() for each in timed}
    plain = loops[BASELINE].answers[0]
    return [_record(case, label, loop, plain) for label, loop in loops.items()], plain


def _record(case: Case, label: str, loop: DecodeLoop, plain: Answer) -> Record:
    answer = loop.answers[0]
    return Record(
        drafter=label,
        case=case.name,
        category=case.category,
        prompt_tokens=len(case.request.prompt_token_ids),
        output_tokens=len(answer.token_ids),
        prefill_s=loop.prefill_s,
        decode_s=loop.decode_s,
        draft_s=loop.draft_s,
        draft_tokens=answer.stats.draft_tokens,
        accepted_per_round=tuple(answer.stats.accepted_per_round),
        drafted_per_position=tuple(answer.stats.drafted_per_position),
        accepted_per_position=tuple(answer.stats.accepted_per_position),
        rounds_by_drafter=dict(answer.stats.rounds_by_drafter),
        first_difference=first_difference(answer.token_ids, plain.token_ids),
    )
