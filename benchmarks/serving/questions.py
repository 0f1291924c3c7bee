"""The texts that prompts are made of, and how their tokens are counted."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from benchmarks.serving.workload import CountTokens
from benchmarks.speculation.prompts import Encoder, Prompt, balanced, read_prompts
from paceline.text.tokenizer import Tokenizer

KEPT = Path(__file__).parent / "texts.jsonl"  # written for this benchmark
NO_BOUND = 1 << 30


def read(path: Path | None) -> list[Prompt]:
    """The questions of a file in Spec-Bench's format, or the kept ones; categories in turn. Raises ConfigError."""
    return balanced(read_prompts(path or KEPT))


def counter(folder: Path, *, chat: bool) -> CountTokens:
    """Counts the tokens of a user's message by the tokenizer in ``folder``, with the chat template around it or not."""
    encoder = Encoder(Tokenizer.from_folder(folder), chat=chat, max_prompt_tokens=NO_BOUND)

    @lru_cache(maxsize=4096)
    def count(text: str) -> int:
        ids = encoder.encode((text,), ())
        assert ids is not None
        return len(ids)

    return count
