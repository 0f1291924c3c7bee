"""Text from a stream of tokens: never half a character, never the beginning of a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
CONTEXT_TOKENS = 6  # of the prompt: some decoders treat the first token otherwise (leading space)
MAX_HELD_TOKENS = 16  # an incomplete character has at most 3 bytes; longer runs of U+FFFD are real
OPEN_TOKENS = 4  # the last tokens that a later one may still change


class Decoder(Protocol):
    """What is needed of a tokenizer."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ``ids``."""
        ...


class IncrementalDetokenizer:
    """Push tokens, take text as it becomes certain.

    The pieces and ``finish()`` together are ``decode(all ids)``, or that text cut before the first stop string. A
    window of the last tokens is decoded for each push, so that the cost of a token does not grow with the text.
    """

    def __init__(
        self,
        tokenizer: Decoder,
        prompt_ids: Sequence[int] = (),
        stop: Sequence[str] = (),
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._ids = list(prompt_ids[-CONTEXT_TOKENS:])
        self._prefix = 0  # start of the window
        self._read = len(self._ids)  # tokens whose text was taken
        self._stop = tuple(stop)
        self._held = ""  # certain text that may begin a stop string
        self.stopped = False
        self.stop_string = ""

    def push(self, token_id: int) -> str:
        """Newly certain text; may be empty. Raises ValueError once stopped."""
        if self.stopped:
            raise ValueError("a stop string ended this text; no token may follow it")
        self._ids.append(token_id)
        return self._emit(self._take())

    def finish(self) -> str:
        """What was withheld. Incomplete characters come out as U+FFFD."""
        if self.stopped:
            return ""
        text = self._window(self._prefix, len(self._ids))[len(self._window(self._prefix, self._read)) :]
        self._read = len(self._ids)
        text = self._emit(text)
        if self.stopped:
            return text
        held, self._held = self._held, ""
        return text + held

    def _window(self, start: int, end: int) -> str:
        return self._tokenizer.decode(self._ids[start:end], skip_special_tokens=self._skip) if end > start else ""

    def _take(self) -> str:
        """Text of the tokens whose characters are complete."""
        end = len(self._ids)
        before, text = self._window(self._prefix, self._read), self._window(self._prefix, end)
        if text.endswith(REPLACEMENT):
            if end - self._read < MAX_HELD_TOKENS:
                return ""
            end = self._cut(text)
            text = self._window(self._prefix, end)
        self._advance(end)
        return text[len(before) :]

    def _cut(self, text: str) -> int:
        """The latest token boundary that splits no character and that no later token can change."""
        for end in range(len(self._ids) - OPEN_TOKENS, self._read, -1):
            if self._window(self._prefix, end) + self._window(end, len(self._ids)) == text:
                return end
        return self._read

    def _advance(self, end: int) -> None:
        if end > self._read:
            self._prefix, self._read = self._read, end
            drop, self._prefix = self._prefix, 0  # forget tokens before the window
            del self._ids[:drop]
            self._read -= drop

    def _emit(self, text: str) -> str:
        """Pass text through the stop strings."""
        if not self._stop:
            return text
        pending = self._held + text
        found = [(at, s) for s in self._stop if (at := pending.find(s)) >= 0]
        if found:
            at, self.stop_string = min(found, key=lambda f: (f[0], -len(f[1])))
            self.stopped, self._held = True, ""
            return pending[:at]
        keep = self._undecided(pending)
        self._held = pending[len(pending) - keep :]
        return pending[: len(pending) - keep]

    def _undecided(self, text: str) -> int:
        """Length of the longest end of ``text`` that begins a stop string."""
        longest = max(map(len, self._stop)) - 1
        for size in range(min(longest, len(text)), 0, -1):
            tail = text[-size:]
            if any(s.startswith(tail) for s in self._stop):
                return size
        return 0
