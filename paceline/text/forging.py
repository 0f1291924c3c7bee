"""Keeps what clients write from being read as special tokens.

A *guarded* text has a private-use character, the mark, within every special token that it spells, and after the first
character of one that its end begins. The template renders guarded texts; special tokens of the rendered text are then
the template's own. Where a mark stands, the text between two of them is tokenized without special tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import tokenizers

from paceline.errors import InvalidRequest

MARKS = tuple(map(chr, range(0xE000, 0xF8FE)))
BRACKETS = {"<": ">", "[": "]", "{": "}"}
MAX_DEPTH = 200  # of a value that a template gets


class Guard:
    """For one tokenizer."""

    def __init__(self, inner: tokenizers.Tokenizer, state: Mapping[str, Any]) -> None:
        """state: tokenizer.json."""
        added = inner.get_added_tokens_decoder()
        self._inner = inner
        special = {token.content for token in added.values() if token.special and len(token.content) > 1}
        tags = {token.content for token in added.values() if not token.special and _is_tag(token.content)}
        # Any text may have characters that no token has, so the token that stands for them tells nothing.
        self._ids = {i for i, token in added.items() if token.content in special | tags} - {_unknown(inner, state)}
        loose = {token.content for token in added.values() if token.normalized}  # matched after normalization
        normalizer = inner.normalizer if loose & (special | tags) else None
        self._every, self._special = _Spelled(special | tags, normalizer), _Spelled(special, normalizer)
        others = [token for _, token in sorted(added.items()) if token.content not in special | tags]
        self._first = _without_specials(inner, others, None)
        # Added tokens have other ids there; the vocabulary has the same.
        pairs = ((self._first.token_to_id(t.content), inner.token_to_id(t.content)) for t in others)
        self._own_ids = {theirs: own for theirs, own in pairs if theirs is not None and own is not None}
        later = json.dumps(state["pre_tokenizer"]).replace('"prepend_scheme": "first"', '"prepend_scheme": "never"')
        self._later = _without_specials(inner, others, later)

    def mark_for(self, values: Sequence[Any]) -> str | None:
        """A character that none of the texts within ``values`` has; None when none of them needs one."""
        texts = [text for value in values for text in _texts(value)]
        if not any(self._every.where(self._every.read(text)) for text in texts):
            return None
        whole = "\n".join(texts)
        for mark in MARKS:
            if mark not in whole and json.dumps(mark)[1:-1] not in whole:
                return mark
        raise InvalidRequest("messages", "have every private-use character of Unicode")

    def guarded(self, value: Any, mark: str, *, tags_stay: bool = False) -> Any:
        """``value`` with every text in it guarded. tags_stay: only against special tokens, not against tags like
        ``<tool_call>``, which an assistant's turn may have."""
        spelled = self._special if tags_stay else self._every
        if isinstance(value, str):
            return spelled.broken(value, mark)
        if isinstance(value, Mapping):
            return {spelled.broken(k, mark): self.guarded(v, mark, tags_stay=tags_stay) for k, v in value.items()}
        if isinstance(value, list):
            return [self.guarded(item, mark, tags_stay=tags_stay) for item in value]
        return value

    def encode(self, text: str, mark: str) -> list[int]:
        """Token ids of a rendered text."""
        text = text.replace(json.dumps(mark)[1:-1], mark)  # where the template escaped it
        (encoding,) = self._inner.encode_batch([text], add_special_tokens=False)
        ids: list[int] = []
        start = first = 0  # of the piece: in the text, in the tokens
        for i, (token_id, (begin, end)) in enumerate(zip(encoding.ids, encoding.offsets, strict=True)):
            if token_id in self._ids:
                ids += self._piece(text[start:begin], mark, encoding.ids[first:i], start)
                ids.append(token_id)
                start, first = end, i + 1
        return ids + self._piece(text[start:], mark, encoding.ids[first:], start)

    def _piece(self, text: str, mark: str, ids: list[int], start: int) -> list[int]:
        """Tokens of what stands between special tokens; ``ids`` unless there is a mark in it."""
        if mark not in text:
            return ids
        found = self._plain(text.replace(mark, ""), start)
        if not self._ids.isdisjoint(found):  # the vocabulary itself spells one
            found = [i for part in text.split(mark) for i in self._plain(part, start)]
        if not self._ids.isdisjoint(found):
            raise InvalidRequest("messages", "spell a special token of the model")
        return found

    def _plain(self, text: str, start: int) -> list[int]:
        encoder = self._later if start else self._first
        (encoding,) = encoder.encode_batch([text], add_special_tokens=False)
        return [self._own_ids.get(i, i) for i in encoding.ids]


class _Spelled:
    """Where a text spells one of some tokens."""

    def __init__(self, tokens: set[str], normalizer: Any) -> None:
        """normalizer: of texts, where tokens are matched after it; else None."""
        self._normalizer = normalizer
        self._pattern = re.compile(_trie_pattern(tokens)) if tokens else None
        self._beginnings = {token[:size] for token in tokens for size in range(1, len(token))}
        self._longest = max(map(len, tokens), default=0)

    def read(self, text: str) -> str:
        """``text``, normalized where that makes it spell a token."""
        if self._normalizer is None:
            return text
        other = str(self._normalizer.normalize_str(text))
        return other if self.where(other) else text

    def where(self, text: str) -> list[int]:
        """Where a token begins that ``text`` spells, or whose beginning is its end."""
        found: list[int] = []
        match = self._pattern.search(text) if self._pattern else None
        while match is not None:
            found.append(match.start())
            match = self._pattern.search(text, match.start() + 1) if self._pattern else None
        sizes = range(min(len(text), self._longest), 0, -1)
        return found + [len(text) - size for size in sizes if text[-size:] in self._beginnings]

    def broken(self, text: str, mark: str) -> str:
        """``text`` with a mark after the first character of each."""
        text = self.read(text)
        pieces, last = [], 0
        for at in sorted(set(self.where(text))):
            pieces.append(text[last : at + 1])
            last = at + 1
        return mark.join([*pieces, text[last:]]) if pieces else text


def _unknown(inner: tokenizers.Tokenizer, state: Mapping[str, Any]) -> int | None:
    """Id of the token that stands for characters that no token has."""
    model = state["model"]
    token = model.get("unk_token")
    return model.get("unk_id") if token is None else inner.token_to_id(token)


def _is_tag(token: str) -> bool:
    return len(token) > 2 and BRACKETS.get(token[0]) == token[-1]


def _texts(value: Any, depth: int = 0) -> Iterator[str]:
    if depth > MAX_DEPTH:
        raise InvalidRequest("messages", "are nested too deeply")
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from _texts(item, depth + 1)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item, depth + 1)


def _trie_pattern(tokens: Iterable[str]) -> str:
    """One of ``tokens``, without trying each of them at every place."""
    by_first: dict[str, list[str]] = {}
    for token in tokens:
        by_first.setdefault(token[:1], []).append(token[1:])
    if "" in by_first:  # a shorter token is enough
        return ""
    branches = [re.escape(first) + _trie_pattern(rest) for first, rest in sorted(by_first.items())]
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"


def _without_specials(
    inner: tokenizers.Tokenizer, others: Sequence[tokenizers.AddedToken], pre_tokenizer: str | None
) -> tokenizers.Tokenizer:
    """The same model and rules without special tokens and tags; it shares the vocabulary. pre_tokenizer: another one,
    as JSON."""
    made = tokenizers.Tokenizer(inner.model)
    if inner.normalizer is not None:
        made.normalizer = inner.normalizer
    if pre_tokenizer not in (None, "null"):
        empty = '{"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}, '
        made.pre_tokenizer = tokenizers.Tokenizer.from_str(f'{empty}"pre_tokenizer": {pre_tokenizer}}}').pre_tokenizer
    elif inner.pre_tokenizer is not None:
        made.pre_tokenizer = inner.pre_tokenizer
    made.add_tokens(list(others))
    return made
