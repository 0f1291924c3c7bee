"""Special tokens whose text is part of an answer's: the markers by which calls and reasoning are told from text."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol, TypeVar


class Source(Protocol):
    """What is needed of a tokenizer."""

    def special_ids(self, texts: Collection[str]) -> Mapping[str, int]:
        """Ids of those of ``texts`` that are special tokens."""


S = TypeVar("S", bound=Source)
T = TypeVar("T")


def keeping(tokenizer: S, texts: Collection[str]) -> S:
    """``tokenizer``, which does not skip those of its special tokens that are among ``texts``."""
    kept = frozenset(tokenizer.special_ids(texts).values())
    made: Any = _Keeping(tokenizer, kept) if kept else tokenizer
    return made  # type: ignore[no-any-return]  # it answers as the tokenizer does


def showing_specials(tokenizer: T) -> T:
    """``tokenizer``, whose special tokens are all part of the text."""
    made: Any = _Showing(tokenizer)
    return made  # type: ignore[no-any-return]  # it answers as the tokenizer does


class _Showing:
    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def token_bytes(self, token_id: int, skip_special_tokens: bool = False) -> bytes:
        """See paceline.text.tokenizer."""
        data: bytes = self._tokenizer.token_bytes(token_id, False)
        return data

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """See paceline.text.tokenizer."""
        text: str = self._tokenizer.decode(ids, False)
        return text

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


class _Keeping:
    def __init__(self, tokenizer: Any, kept: frozenset[int]) -> None:
        self._tokenizer, self._kept = tokenizer, kept

    def token_bytes(self, token_id: int, skip_special_tokens: bool = False) -> bytes:
        """See paceline.text.tokenizer."""
        skip = skip_special_tokens and token_id not in self._kept
        data: bytes = self._tokenizer.token_bytes(token_id, skip)
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)
