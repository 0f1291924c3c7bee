"""Text from a stream of tokens: never half a character, never the beginning of a stop string.

Tokens are taken as bytes and the bytes as UTF-8, so that nothing is decoded twice and nothing depends on how tokens
split characters. Text is *certain* once no later token can change it: all of it but an incomplete last character,
which has at most three bytes.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from paceline.errors import InvalidRequest

MOST_BYTES_OPEN = 3  # an incomplete UTF-8 sequence is no longer


class ByteSource(Protocol):
    """What is needed of a tokenizer."""

    strip_start: int

    def token_bytes(self, token_id: int, skip_special_tokens: bool = False) -> bytes:
        """What the token adds to the text."""
        ...


class TextStream:
    """Bytes in, certain text out. Bytes that are no UTF-8 become U+FFFD, one for each maximal subpart (Unicode 3.9)."""

    def __init__(self, strip_start: int = 0, before: bytes = b"") -> None:
        """strip_start: leading spaces to drop, at most. before: bytes ahead of the text, whose last may be half of a
        character; the whole character then counts to the text."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoder.decode(before)
        self._strip = strip_start

    def push(self, data: bytes, final: bool = False) -> str:
        """Newly certain text. ``final``: nothing follows, what is incomplete becomes U+FFFD."""
        text = self._decoder.decode(data, final)
        if not self._strip or not text:
            return text
        spaces = min(len(text) - len(text.lstrip(" ")), self._strip)
        self._strip = self._strip - spaces if spaces == len(text) else 0
        return text[spaces:]


def end_of(tokenizer: ByteSource, prompt_ids: Sequence[int], skip_special_tokens: bool) -> bytes:
    """The last bytes of a prompt, enough to hold half a character; fewer, or none, when it has no more."""
    end = b""
    for token_id in reversed(prompt_ids):
        end = tokenizer.token_bytes(token_id, skip_special_tokens) + end
        if len(end) >= MOST_BYTES_OPEN:
            break
    return end


class StopFinder:
    """One stop string over text that arrives in pieces; constant work per character (Knuth, Morris, Pratt 1977)."""

    def __init__(self, stop: str) -> None:
        self.stop, self.matched = stop, 0  # matched: the text's longest end that begins the stop string
        self._fallback = [0] * len(stop)
        size = 0
        for i in range(1, len(stop)):
            size = self._step(size, stop[i])
            self._fallback[i] = size

    def _step(self, size: int, character: str) -> int:
        while size and self.stop[size] != character:
            size = self._fallback[size - 1]
        return size + 1 if self.stop[size] == character else 0

    def find(self, text: str) -> int | None:
        """Where the stop string starts, relative to ``text`` (below zero: in earlier pieces); None if not complete."""
        for i, character in enumerate(text):
            self.matched = self._step(self.matched, character)
            if self.matched == len(self.stop):
                return i + 1 - len(self.stop)
        return None


class IncrementalDetokenizer:
    """Push tokens, take text as it becomes certain.

    The pieces and ``finish()`` together are ``decode(all ids)``, unless a stop string appears: the earliest
    character that completes one ends the text, cut where that stop string starts; of several completed by the same
    character the longest counts. So it does not matter which token brought which character.
    """

    def __init__(
        self,
        tokenizer: ByteSource,
        prompt_ids: Sequence[int] = (),
        stop: Sequence[str] = (),
        skip_special_tokens: bool = True,
    ) -> None:
        """prompt_ids: what the text continues; it decides about a leading space and about half a character at the
        seam. Raises InvalidRequest for an empty stop string."""
        if not all(stop):
            raise InvalidRequest("stop", "a stop string must not be empty")
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        before = end_of(tokenizer, prompt_ids, skip_special_tokens)
        self._stream = TextStream(0 if before else tokenizer.strip_start, before)
        self._finders = [StopFinder(s) for s in stop]
        self._held = ""  # certain text that may begin a stop string
        self._finished = False
        self.stopped = False
        self.stop_string = ""

    def push(self, token_id: int) -> str:
        """Newly certain text that begins no stop string; often empty. Raises ValueError after a stop or ``finish``."""
        if self.stopped or self._finished:
            raise ValueError("this text has ended; no token may follow it")
        return self._emit(self._stream.push(self._tokenizer.token_bytes(token_id, self._skip)))

    def finish(self) -> str:
        """What was withheld; an incomplete character comes out as U+FFFD, which may complete a stop string."""
        if self.stopped or self._finished:
            return ""
        self._finished = True
        text = self._emit(self._stream.push(b"", final=True))
        held, self._held = self._held, ""
        return text + held

    def _emit(self, text: str) -> str:
        """Pass certain text through the stop strings."""
        pending, known = self._held + text, len(self._held)
        found = [(at, finder.stop) for finder in self._finders if (at := finder.find(text)) is not None]
        if found:
            at, self.stop_string = min(found, key=lambda f: (f[0] + len(f[1]), f[0]))
            self.stopped, self._held = True, ""
            return pending[: known + at]
        certain = len(pending) - max((finder.matched for finder in self._finders), default=0)
        self._held = pending[certain:]
        return pending[:certain]
