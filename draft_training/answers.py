"""A corpus of the target's own answers, made by the serving engine: continuous batching, one line per prompt.

Prompts come from files, or from the target itself: the chat template is cut where the user's text would stand, and the
target goes on from there as if it were the user (the idea is Magpie's, arXiv 2406.08464). Openings, a few words the
user's text begins with, steer what it asks for. Every prompt has a number; seed and number decide its text, its
temperature and its answer. On a bit-exact host (``ModelRunner.bit_exact``) the same options therefore give the same
file, byte for byte, whatever the batch and however often the run was interrupted; elsewhere a batch of another
make-up may change a token where the target's best two are a rounding apart.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass
from hashlib import blake2b
from lzma import LZMAError
from pathlib import Path
from random import Random

from draft_training.answer_file import SAID_BEFORE, AnswerFile
from draft_training.corpus import open_text
from paceline.engine.model_runner import ModelRunner, PrefillChunk
from paceline.errors import ConfigError, InvalidRequest
from paceline.request import FinishReason, SamplingParams, SequenceRequest
from paceline.spec_decode.sequence import Sequence as Running
from paceline.text.tokenizer import Tokenizer

CHUNK_TOKENS = 512
MIN_USER_TOKENS = 4  # a self-made prompt shorter than this asks for nothing
MOST_PROMPTS = 1_000_000  # of a corpus; seeds of its prompts are apart by number
USER_MARK = "<user-text-here>"  # stands for the user's text while the template is cut
TOO_LONG, UNFINISHED, TOO_SHORT, MALFORMED = "too long", "unfinished", "too short", "holds a special token"
# One in two self-made prompts begins with one of these; what follows is the target's own.
OPENINGS = (
    "Summarize the following article:\n", "Summarize:", "Give a short summary of this text:\n", "Translate",
    "Translate the following sentence:", "Answer the question based on the passage below.\n\nPassage:",
    "Read the following paragraphs and answer the question.\n\n", "What is", "Who", "When did", "Where", "Why",
    "How do I", "How many", "Which", "Write a", "Write an email", "Write a story about", "Write a Python function",
    "Explain", "Compare", "Imagine you are", "List", "Give me", "Describe", "Can you", "Rewrite",
    "Edit the following paragraph:", "Classify", "Extract", "Suppose", "If", "Create a", "Design",
    "Help me", "Is it true that", "Solve", "Given the following text:\n", "Here is an article.\n\n", "Act as",
)  # fmt: skip


@dataclass(frozen=True)
class AnswerOptions:
    """How prompts are answered."""

    self_made: int = 0  # prompts that the target makes itself, numbered after those of files
    openings: tuple[str, ...] = OPENINGS
    max_prompt_tokens: int = 768
    max_user_tokens: int = 320  # of a self-made prompt
    max_answer_tokens: int = 256
    temperatures: tuple[tuple[float, float], ...] = ((0.0, 0.6), (0.7, 0.2), (1.0, 0.2))  # (temperature, share)
    batch: int = 64
    seed: int = 0

    @property
    def max_tokens(self) -> int:
        """Tokens of a prompt with its answer."""
        return self.max_prompt_tokens + self.max_answer_tokens


@dataclass(frozen=True)
class Work:
    """One prompt on its way: first its user's text, when that is self-made, then its answer."""

    number: int
    source: str
    prompt_ids: tuple[int, ...]
    answering: bool
    temperature: float


@dataclass(frozen=True)
class Made:
    """What the corpus holds so far, earlier runs' lines included."""

    answers: int
    answer_tokens: int
    left_out: int  # too long, unfinished, or asked before
    total: int  # numbers that the corpus is to have


def read_prompts(path: Path) -> Iterator[tuple[str, str]]:
    """Prompt and source of each line ``{"prompt": ..., "source": ...}``. Raises ConfigError naming file and line."""
    number = 0
    try:
        with open_text(path) as lines:
            for line in lines:
                number += 1
                row = json.loads(line)
                prompt = row["prompt"]
                if not isinstance(prompt, str) or not prompt.strip():
                    raise ValueError("'prompt' must be text")
                prompt.encode()  # half a surrogate pair is no text
                yield prompt, str(row.get("source", path.name))
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError("prompts", f"{path}:{number} is not a prompt: {error!r}") from None
    except (OSError, EOFError, LZMAError) as error:
        raise ConfigError("prompts", f"{path} cannot be read: {error}") from None


class AnswerMaker:
    """Answers prompts with one runner and appends them to a corpus file."""

    def __init__(
        self, runner: ModelRunner, tokenizer: Tokenizer, stop_token_ids: tuple[int, ...], options: AnswerOptions
    ):
        """runner: its pool must hold ``batch`` sequences of ``max_tokens``. Raises ConfigError naming the option."""
        self.runner, self.tokenizer, self.stops, self.options = runner, tokenizer, stop_token_ids, options
        try:
            self._framing = self._prompt(USER_MARK)
        except InvalidRequest as error:
            raise ConfigError("model", error.message) from None
        self._before, mark, _ = tokenizer.decode(self._framing, skip_special_tokens=False).partition(USER_MARK)
        if not mark:
            raise ConfigError("model", "its chat template does not carry the user's text as it is")
        pages = -(-(options.max_tokens + runner.spec_slots) // runner.page_size)
        if runner.allocator.fits(pages) < options.batch:
            raise ConfigError("batch", f"{options.batch} sequences of {options.max_tokens} tokens do not fit the pool")

    def run(self, prompts: Sequence[tuple[str, str]], out: Path, report: Callable[[Made], None]) -> Made:
        """Answer those of ``prompts`` and of the self-made ones that have no line in ``out`` yet.

        Raises ConfigError when ``out`` was made with other options, but for ``self_made`` and ``batch``.
        """
        total = len(prompts) + self.options.self_made
        if total > MOST_PROMPTS:
            raise ConfigError("self_made", f"{total:,} prompts, at most {MOST_PROMPTS:,} make a corpus")
        running: list[tuple[Work, Running]] = []
        with AnswerFile(out, self._run_name(prompts)) as file:
            try:
                work = self._work(prompts, file.done)
                while self._fill(work, file, running):
                    self._step(running)
                    self._drop_finished(file, running)
                    report(Made(file.answers, file.answer_tokens, file.left_out, total))
            finally:
                for _, seq in running:
                    self.runner.release(seq)
            file.settle()
            return Made(file.answers, file.answer_tokens, file.left_out, total)

    def _run_name(self, prompts: Sequence[tuple[str, str]]) -> str:
        """Digest of all that lines depend on."""
        options = asdict(self.options)
        del options["self_made"], options["batch"]
        parts = [self.runner.identity.weights, self._framing, self.stops, options, prompts]
        return blake2b(json.dumps(parts).encode(), digest_size=6).hexdigest()

    # ---- prompts

    def _work(self, prompts: Sequence[tuple[str, str]], done: AbstractSet[int]) -> Iterator[Work]:
        """Prompts of files first, by number; the random choices of a number depend on it and the seed alone."""
        options = self.options
        for number in range(len(prompts) + options.self_made):
            if number in done:
                continue
            random = Random(f"{options.seed}/{number}")
            temperature = random.choices(*zip(*options.temperatures, strict=True))[0]
            if number < len(prompts):
                text, source = prompts[number]
                yield Work(number, source, self._prompt(text), True, temperature)
            else:
                opening = random.choice(options.openings) if options.openings and random.random() < 0.5 else ""
                yield Work(number, "self-made", self._beginning(opening), False, temperature)

    def _prompt(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.apply_chat_template([{"role": "user", "content": text}]))

    def _beginning(self, opening: str) -> tuple[int, ...]:
        """Ids of the template up to where the user goes on from ``opening``."""
        ids = tuple(self.tokenizer.encode(self._before + opening))
        return ids if ids[:1] == self._framing[:1] else ids[1:]  # no beginning of text that the template lacks

    def _self_made(self, beginning: tuple[int, ...], ids: Sequence[int]) -> tuple[str, tuple[int, ...]]:
        """Why it is left out or "", and the whole prompt, of a user's text that the target went on with."""
        said = ids[:-1] if ids[-1] in self.stops else ids
        whole = self.tokenizer.decode([*beginning, *said], skip_special_tokens=False)
        text = whole.removeprefix(self._before).strip()
        if len(said) < MIN_USER_TOKENS or not text:
            return TOO_SHORT, ()
        prompt_ids = self._prompt(text)
        # The prompt has it as plain text, but it is a text that no user writes.
        spelled = self._specials(self.tokenizer.encode(text)) != self._specials(self.tokenizer.encode(""))
        return MALFORMED if spelled or not whole.startswith(self._before) else "", prompt_ids

    def _specials(self, ids: Sequence[int]) -> list[int]:
        read = self.tokenizer.token_bytes
        return [i for i in ids if read(i) and not read(i, skip_special_tokens=True)]

    # ---- sequences

    def _fill(self, work: Iterator[Work], file: AnswerFile, running: list[tuple[Work, Running]]) -> bool:
        """Start prompts until the batch is full; whether anything runs."""
        while len(running) < self.options.batch:
            item = next(work, None)
            if item is None:
                break
            self._start(item, file, running)
        return bool(running)

    def _start(self, work: Work, file: AnswerFile, running: list[tuple[Work, Running]]) -> None:
        options, length = self.options, len(work.prompt_ids)
        if length > options.max_prompt_tokens:
            file.leave_out(work.number, work.source, TOO_LONG)
            return
        if work.answering and not file.claim(work.number, work.prompt_ids):
            file.leave_out(work.number, work.source, SAID_BEFORE)
            return
        params = SamplingParams(
            temperature=work.temperature if work.answering else 1.0,
            seed=2 * (options.seed * (MOST_PROMPTS + 3) + work.number) + work.answering,
            max_tokens=min(
                options.max_answer_tokens if work.answering else options.max_user_tokens, options.max_tokens - length
            ),
            stop_token_ids=self.stops,
        )
        seq = self.runner.new_sequence(SequenceRequest(f"{work.number}/{work.answering}", work.prompt_ids, params))
        running.append((work, seq))
        seq.table.ensure(length + params.max_tokens + self.runner.spec_slots)
        for start in range(seq.num_computed, seq.num_prefill, CHUNK_TOKENS):
            self.runner.prefill([PrefillChunk(seq, start, min(start + CHUNK_TOKENS, seq.num_prefill))])

    def _step(self, running: Sequence[tuple[Work, Running]]) -> None:
        alive = [seq for _, seq in running if seq.finish_reason is None]
        if alive:
            self.runner.decode(alive)

    def _drop_finished(self, file: AnswerFile, running: list[tuple[Work, Running]]) -> None:
        """Write answers that ended; prompts that ended are answered next, in their place."""
        ended = [item for item in running if item[1].finish_reason is not None]
        running[:] = [item for item in running if item[1].finish_reason is None]
        for work, seq in ended:
            ids, reason = tuple(seq.output_token_ids), seq.finish_reason
            self.runner.release(seq)
            if work.answering:
                file.add_answer(work.number, work.source, work.temperature, str(reason), work.prompt_ids, ids)
                continue
            why, prompt_ids = self._self_made(work.prompt_ids, ids)
            if reason is not FinishReason.STOP or why:
                file.leave_out(work.number, work.source, why or UNFINISHED)
            else:
                self._start(Work(work.number, work.source, prompt_ids, True, work.temperature), file, running)
