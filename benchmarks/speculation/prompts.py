"""Prompts for the speculation benchmarks: Spec-Bench's file format and plain ``{"prompt": ...}`` lines.

A Spec-Bench line is ``{"question_id", "category", "turns"}`` (github.com/hemingkx/Spec-Bench). Eight of its categories
are MT-bench's and are reported as one group, as the field does; the other five are groups of their own.
"""

from __future__ import annotations

import bisect
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError, InvalidRequest
from paceline.text.tokenizer import Tokenizer

MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
GROUPS = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag")  # the order of tables
PLAIN = "prompts"  # category of {"prompt": ...} lines
MAX_PROMPTS = 50_000
MAX_LINE_CHARS = 1_000_000


@dataclass(frozen=True)
class Prompt:
    """One question: its user turns, at least one."""

    prompt_id: str
    category: str  # as the file says
    turns: tuple[str, ...]

    @property
    def group(self) -> str:
        """Category that it is reported under."""
        return "mt_bench" if self.category in MT_BENCH else self.category


def group_order(groups: Iterable[str]) -> list[str]:
    """Distinct groups: Spec-Bench's in its order, then any other by name."""
    found = set(groups)
    return [g for g in GROUPS if g in found] + sorted(found.difference(GROUPS))


# Reading --------------------------------------------------------------------------------------------------------------


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of a JSON-lines file, empty lines skipped. Raises ConfigError naming line and field."""
    prompts: list[Prompt] = []
    seen: set[str] = set()
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                where = f"{path} line {number}"
                prompts.append(parse_line(line, where, number))
                if prompts[-1].prompt_id in seen:
                    raise _wrong(where, "question_id", f"{prompts[-1].prompt_id} stands on an earlier line too")
                seen.add(prompts[-1].prompt_id)
                if len(prompts) > MAX_PROMPTS:
                    raise ConfigError("prompts", f"{path} holds more than {MAX_PROMPTS} prompts")
    except OSError as error:
        raise ConfigError("prompts", f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError("prompts", f"{path} is not UTF-8 text: byte {error.start}") from None
    if not prompts:
        raise ConfigError("prompts", f"{path} holds no prompt")
    return prompts


def parse_line(line: str, where: str, number: int) -> Prompt:
    """One line; ``number`` names a prompt that has no id of its own. Raises ConfigError."""
    if len(line) > MAX_LINE_CHARS:
        raise ConfigError("prompts", f"{where}: longer than {MAX_LINE_CHARS} characters")
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise ConfigError("prompts", f"{where}: is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ConfigError("prompts", f"{where}: must be an object")
    if "turns" in fields:
        return _spec_bench(fields, where)
    if "prompt" in fields:
        return Prompt(f"line-{number}", PLAIN, (_text(fields["prompt"], where, "prompt"),))
    raise ConfigError("prompts", f"{where}: has neither turns nor prompt")


def _spec_bench(fields: dict[str, Any], where: str) -> Prompt:
    number, turns = fields.get("question_id"), fields["turns"]
    if isinstance(number, bool) or not isinstance(number, int | str):
        raise _wrong(where, "question_id", "must be a number or text")
    if not isinstance(turns, list) or not turns:
        raise _wrong(where, "turns", "must be a list of at least one text")
    category = _text(fields.get("category"), where, "category")
    return Prompt(str(number), category, tuple(_text(turn, where, f"turns[{i}]") for i, turn in enumerate(turns)))


def _text(value: object, where: str, field: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise _wrong(where, field, "must be text that is not empty")
    return value


def _wrong(where: str, field: str, message: str) -> ConfigError:
    return ConfigError("prompts", f"{where}: {field}: {message}")


# Choosing -------------------------------------------------------------------------------------------------------------


def in_turn(prompts: Sequence[Prompt], key: Callable[[Prompt], str]) -> list[Prompt]:
    """One of each ``key`` in turn, file order within a key: any beginning of the result is balanced."""
    columns: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        columns.setdefault(key(prompt), []).append(prompt)
    return [prompt for row in zip_longest(*columns.values()) for prompt in row if prompt is not None]


def balanced(prompts: Sequence[Prompt], limit_per_category: int | None = None) -> list[Prompt]:
    """At most ``limit_per_category`` prompts of each group, the categories inside a group in turn; groups in turn."""
    taken: Counter[str] = Counter()
    kept = []
    for prompt in in_turn(prompts, lambda p: p.category):
        if limit_per_category is None or taken[prompt.group] < limit_per_category:
            taken[prompt.group] += 1
            kept.append(prompt)
    return in_turn(kept, lambda p: p.group)


class Encoder:
    """Conversations to token ids, and answers back to text."""

    def __init__(self, tokenizer: Tokenizer, *, chat: bool, max_prompt_tokens: int) -> None:
        """Without ``chat`` the turns and answers stand in the prompt as they are, no template around them."""
        self._tokenizer, self._chat, self._longest = tokenizer, chat, max_prompt_tokens

    def encode(self, turns: Sequence[str], answers: Sequence[str]) -> tuple[int, ...] | None:
        """Prompt of a conversation; ``answers[i]`` came after ``turns[i]``. None: longer than the bound."""
        said = [*answers, ""]
        if not self._chat:
            ids = self._tokenizer.encode("\n".join(t for pair in zip(turns, said, strict=True) for t in pair if t))
            return tuple(ids) if len(ids) <= self._longest else None
        messages = [
            {"role": role, "content": text}
            for pair in zip(turns, said, strict=True)
            for role, text in zip(("user", "assistant"), pair, strict=True)
        ][:-1]
        try:
            ids = self._tokenizer.apply_chat_template(messages)
        except InvalidRequest as error:
            raise ConfigError("chat", f"{error.message} (--no-chat uses the prompts as they are)") from None
        return tuple(ids) if len(ids) <= self._longest else None

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of an answer, special tokens left out."""
        return self._tokenizer.decode(token_ids)


def lengthened(prompts: Sequence[Prompt], encoder: Encoder, num_tokens: int) -> list[Prompt]:
    """The same questions behind other prompts' texts, as documents that a question comes after: their first turns
    encode to ``num_tokens`` or a little less. A longer one stays as it is. Raises ConfigError when the other prompts
    together are too short."""
    texts = [turn for prompt in prompts for turn in prompt.turns]
    found = []
    for number, prompt in enumerate(prompts):
        others = [text for text in (*texts[number:], *texts[:number]) if text not in prompt.turns]
        words = " ".join(others).split(" ")

        def with_words(count: int, prompt: Prompt = prompt, words: list[str] = words) -> Prompt:
            first = " ".join([*words[:count], "\n\n"]) + prompt.turns[0] if count else prompt.turns[0]
            return replace(prompt, turns=(first, *prompt.turns[1:]))

        def length(count: int, with_words: Callable[[int], Prompt] = with_words) -> int:
            ids = encoder.encode(with_words(count).turns[:1], ())
            return num_tokens + 1 if ids is None else len(ids)

        if length(len(words)) < num_tokens:
            raise ConfigError("context", f"all prompts together are shorter than {num_tokens} tokens")
        count = bisect.bisect_right(range(len(words) + 1), num_tokens, key=length) - 1
        found.append(with_words(max(count, 0)))
    return found


def drop_long(prompts: Sequence[Prompt], encoder: Encoder) -> tuple[list[Prompt], Counter[str]]:
    """Prompts whose first turn is within the encoder's bound, and how many of each group are not.

    A prompt is never cut: half of a chat template, or of a question, is not a prompt that anybody sends.
    """
    kept, dropped = [], Counter[str]()
    for prompt in prompts:
        if encoder.encode(prompt.turns[:1], ()) is None:
            dropped[prompt.group] += 1
        else:
            kept.append(prompt)
    return kept, dropped
