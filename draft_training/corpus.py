"""A corpus: prompts with the target's own answers, as token ids, one JSON object per line (plain, .xz or .gz).

``{"prompt_ids": [...], "answer_ids": [...], "temperature": 0.0, "source": "...", ...}``; further keys are kept by
whoever wrote them and ignored here.
"""

from __future__ import annotations

import gzip
import json
import lzma
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TextIO

from paceline.errors import ConfigError

MIN_ANSWER_TOKENS = 8  # shorter answers have no position to draft


@dataclass(frozen=True)
class Sample:
    """One prompt and its answer."""

    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    greedy: bool = True  # the answer is the target's argmax at every step
    source: str = ""  # where the prompt is from

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Prompt, then answer."""
        return self.prompt_ids + self.answer_ids


@dataclass(frozen=True)
class Corpus:
    """Samples in a fixed random order; the held-out ones are never trained on."""

    train: tuple[Sample, ...]
    held_out: tuple[Sample, ...]

    def token_counts(self, shares: Mapping[str, float]) -> Counter[int]:
        """How often each token occurs in the training answers, weighted by ``share_of`` their source."""
        by_source: dict[str, Counter[int]] = {}
        for sample in self.train:
            by_source.setdefault(sample.source, Counter()).update(sample.answer_ids)
        total: Counter[int] = Counter()
        for source, counts in by_source.items():
            share = share_of(source, shares)
            for token, count in counts.items():
                total[token] += round(count * share)
        return total


def share_of(source: str, shares: Mapping[str, float]) -> float:
    """The part of a source's samples that an epoch has: all, unless a prefix of its name says otherwise."""
    return next((share for prefix, share in shares.items() if source.startswith(prefix)), 1.0)


def open_text(path: Path) -> TextIO:
    """A text file, decompressed by its suffix."""
    if path.suffix == ".xz":
        return lzma.open(path, "rt", encoding="utf-8")
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8")
    return path.open(encoding="utf-8")


def read_samples(path: Path, vocab_size: int, max_tokens: int) -> Iterator[Sample]:
    """Samples of a corpus file, cut to ``max_tokens``; answers left too short are dropped.

    Raises ConfigError naming file, line and field.
    """
    with open_text(path) as lines:
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
                prompt, answer = (tuple(int(t) for t in row[name]) for name in ("prompt_ids", "answer_ids"))
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError("corpus", f"{path}:{number} is not a sample: {error!r}") from None
            if any(not 0 <= t < vocab_size for t in prompt + answer):
                raise ConfigError("corpus", f"{path}:{number} has token ids outside the target's vocabulary")
            answer = answer[: max(0, max_tokens - len(prompt))]
            if prompt and len(answer) >= MIN_ANSWER_TOKENS:
                yield Sample(prompt, answer, not row.get("temperature", 0.0), str(row.get("source", "")))


def load_corpus(path: Path, vocab_size: int, max_tokens: int = 1024, held_out: int = 200, seed: int = 7) -> Corpus:
    """All samples of ``path`` in a random order that depends on ``seed`` alone; the first ``held_out`` set apart."""
    samples = list(read_samples(path, vocab_size, max_tokens))
    if len(samples) <= held_out:
        raise ConfigError("corpus", f"{len(samples)} usable samples, no more than the {held_out} that are held out")
    Random(seed).shuffle(samples)
    return Corpus(tuple(samples[held_out:]), tuple(samples[:held_out]))
