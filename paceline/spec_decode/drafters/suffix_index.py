"""Where the end of a context stood before, over stored token lists: hash chains, as LZ77 coders keep them.

Gram hashes of a few orders lead to earlier positions, newest first; each is then compared backwards with the context,
so a hash collision costs time and never a wrong answer. Linear in the stored tokens, where a suffix trie of depth d
is d times that.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq

ORDERS = (8, 4, 2, 1)  # gram lengths that are hashed; longer matches are found through the first
MAX_OCCURRENCES = 32  # looked at per query: bounds its time
BOUNDARY = -1  # closes a document; equals no token


class SuffixIndex:
    """Documents (token lists) one after the other; positions count from the first token ever stored.

    The gram before a position is entered when the token at that position arrives, so the end of the open document
    never matches itself.
    """

    def __init__(self, max_depth: int) -> None:
        self.max_depth = max_depth  # longest match that is told from a longer one
        self._tokens: list[int] = []  # every document that is kept, each closed one followed by BOUNDARY
        self._offset = 0  # position of _tokens[0]
        self._start = 0  # position where the open document begins
        self._latest: tuple[dict[int, int], ...] = tuple({} for _ in ORDERS)  # gram hash -> position after it
        self._earlier = tuple(array("q") for _ in ORDERS)  # per position: the one before with that hash, or -1

    def __len__(self) -> int:
        """Tokens kept, boundaries included."""
        return len(self._tokens)

    def append(self, token_ids: Iterable[int]) -> None:
        """Extend the open document."""
        tokens = self._tokens
        for token_id in token_ids:
            position = self._offset + len(tokens)
            before = tuple(tokens[-ORDERS[0] :])
            for order, latest, earlier in zip(ORDERS, self._latest, self._earlier, strict=True):
                if position - order < self._start:
                    earlier.append(-1)
                    continue
                key = hash(before[-order:])
                earlier.append(latest.get(key, -1))
                latest[key] = position
            tokens.append(token_id)

    def close(self) -> None:
        """End the open document; the next token starts another."""
        self._tokens.append(BOUNDARY)
        for earlier in self._earlier:
            earlier.append(-1)
        self._start = self._offset + len(self._tokens)

    def drop_first(self, length: int) -> None:
        """Forget the oldest document; ``length`` counts its boundary."""
        for i in range(1, length - 1):
            before = tuple(self._tokens[max(0, i - ORDERS[0]) : i])
            for order, latest in zip(ORDERS, self._latest, strict=True):
                # A later position under the same hash stays; chains end where they leave what is kept.
                if order <= i and latest.get(key := hash(before[-order:])) == self._offset + i:
                    del latest[key]
        del self._tokens[:length]
        for earlier in self._earlier:
            del earlier[:length]
        self._offset += length

    def occurrences(self, context: Seq[int]) -> list[tuple[int, int]]:
        """(position after it, match length) of earlier occurrences of the end of ``context``.

        Longest match first (up to max_depth), newest first among equals; at most MAX_OCCURRENCES, of which the ones
        found by longer grams have precedence.
        """
        tail = list(context[-self.max_depth :])
        found: dict[int, int] = {}
        for order, latest, earlier in zip(ORDERS, self._latest, self._earlier, strict=True):
            if order > len(tail):
                continue
            position = latest.get(hash(tuple(tail[-order:])), -1)
            for _ in range(MAX_OCCURRENCES):
                if position < self._offset or len(found) == MAX_OCCURRENCES:
                    break
                if position not in found and (length := self._match(position, tail)) >= order:
                    found[position] = length
                position = earlier[position - self._offset]
        return sorted(found.items(), key=lambda item: (-item[1], -item[0]))

    def _match(self, position: int, tail: list[int]) -> int:
        end = position - self._offset
        limit = min(len(tail), end)
        if limit and self._tokens[end - limit : end] == tail[-limit:]:
            return limit
        length = 0
        while length < limit and self._tokens[end - 1 - length] == tail[-1 - length]:
            length += 1
        return length

    def followers(self, positions: Seq[int]) -> dict[int, list[int]]:
        """Token -> the positions after it, of those ``positions`` that it stands at; ends of documents drop out."""
        tokens, offset = self._tokens, self._offset
        groups: dict[int, list[int]] = {}
        for position in positions:
            if position - offset < len(tokens) and (token_id := tokens[position - offset]) != BOUNDARY:
                groups.setdefault(token_id, []).append(position + 1)
        return groups


class FinishedTexts:
    """The newest finished texts of one tenant, whole ones, ``max_tokens`` tokens (boundaries counted) at most."""

    def __init__(self, max_tokens: int, max_depth: int) -> None:
        self.max_tokens = max_tokens
        self.index = SuffixIndex(max_depth)
        self._lengths: deque[int] = deque()

    def __len__(self) -> int:
        """Texts kept."""
        return len(self._lengths)

    def add(self, token_ids: Seq[int]) -> None:
        """Keep a text, or its end when it alone is past the bound; the oldest ones make room."""
        token_ids = token_ids[max(0, len(token_ids) - self.max_tokens + 1) :]
        while self._lengths and len(self.index) + len(token_ids) + 1 > self.max_tokens:
            self.index.drop_first(self._lengths.popleft())
        self.index.append(token_ids)
        self.index.close()
        self._lengths.append(len(token_ids) + 1)
