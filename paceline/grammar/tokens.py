"""A model's vocabulary, as the grammar library reads it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import llguidance

from paceline.errors import ConfigError, InvalidRequest
from paceline.grammar.bounds import FIELD
from paceline.model_files import read_eos_token_ids, read_json, special_token, with_tokenizers_end


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
        try:
            eos = _eos_token_ids(folder, vocab_size)
        except ConfigError as error:
            raise InvalidRequest(FIELD, f"this model cannot follow one: {error}") from None
        if not eos:
            raise InvalidRequest(FIELD, "this model has no end-of-sequence token, so an answer could not end")
        try:
            inner = llguidance.LLTokenizer(file.read_text(encoding="utf-8"), vocab_size, list(eos))
        except Exception as error:  # the library raises what it likes
            raise InvalidRequest(FIELD, f"this model's tokenizer cannot follow one: {error}") from None
        return cls(inner, vocab_size, eos)


def _eos_token_ids(folder: Path, vocab_size: int) -> tuple[int, ...]:
    """As the router's tokenizer has them, or an answer could not end where it ends."""
    named = folder / "tokenizer_config.json"
    text = special_token(read_json(named).get("eos_token")) if named.is_file() else None
    own = None if text is None else _id_of(text, read_json(folder / "tokenizer.json"))
    return tuple(i for i in with_tokenizers_end(read_eos_token_ids(folder), own) if 0 <= i < vocab_size)


def _id_of(text: str, tokenizer: dict[str, Any]) -> int | None:
    added = {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or []}
    vocabulary = (tokenizer.get("model") or {}).get("vocab")
    found = added.get(text, vocabulary.get(text) if isinstance(vocabulary, dict) else None)
    return found if isinstance(found, int) else None


@cache
def version() -> str:
    """The library and its version: two nodes with the same one make the same masks."""
    return f"llguidance {llguidance.__version__}"
