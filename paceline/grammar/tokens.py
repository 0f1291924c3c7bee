"""A model's vocabulary, as the grammar library reads it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import llguidance

from paceline.errors import InvalidRequest
from paceline.grammar.bounds import FIELD


@dataclass(frozen=True)
class GrammarTokens:
    """The vocabulary of one model. ``inner`` is thread-safe and never changes."""

    inner: llguidance.LLTokenizer
    vocab_size: int  # width of the model's logits; ids that the tokenizer lacks are never allowed
    eos_token_ids: tuple[int, ...]  # what ends an answer

    @classmethod
    def from_folder(cls, folder: Path, vocab_size: int) -> GrammarTokens:
        """Read a Hugging Face folder. Raises InvalidRequest where the model cannot serve grammars.

        It takes some half a second and 70 MB for 49,000 tokens, so it is done at the first grammar.
        """
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise InvalidRequest(FIELD, "this model has no tokenizer.json, so it cannot follow one")
        eos = _eos_token_ids(folder, vocab_size)
        if not eos:
            raise InvalidRequest(FIELD, "this model has no end-of-sequence token, so an answer could not end")
        try:
            inner = llguidance.LLTokenizer(file.read_text(encoding="utf-8"), vocab_size, list(eos))
        except Exception as error:  # the library raises what it likes
            raise InvalidRequest(FIELD, f"this model's tokenizer cannot follow one: {error}") from None
        return cls(inner, vocab_size, eos)


def _eos_token_ids(folder: Path, vocab_size: int) -> tuple[int, ...]:
    for name in ("generation_config.json", "config.json"):
        file = folder / name
        content: Any = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        eos = content.get("eos_token_id")
        if eos is not None:
            ids = eos if isinstance(eos, list) else [eos]
            return tuple(i for i in ids if isinstance(i, int) and 0 <= i < vocab_size)
    return ()


@cache
def version() -> str:
    """The library and its version: two nodes with the same one make the same masks."""
    return f"llguidance {llguidance.__version__}"
