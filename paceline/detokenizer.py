"""Token ids to text, all at once or as they come.

A token stands for bytes, and text is the UTF-8 reading of their concatenation: a character may need several tokens, a
token may end in the middle of one. An invalid or truncated sequence reads as U+FFFD, one for each maximal
subpart (Unicode 3.9, "substitution of maximal subparts"). Hence a token costs its own bytes, at most three bytes are
ever held, and the stream equals the whole.

For byte-level decoders this is what ``tokenizers`` computes, for every sequence of ids. For decoders with byte
fallback (SentencePiece) it is the same for every valid text. In a run of byte tokens with an invalid one among them,
``tokenizers`` gives up the whole run, whose good characters a stream may long have shown; here only the bad bytes
are lost, as in SentencePiece itself.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer as Backend

from paceline.errors import ConfigError
from paceline.stop_strings import StopFilter

if TYPE_CHECKING:
    from paceline.tokenizer import Tokenizer

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
LONGEST_INCOMPLETE = 3  # bytes of a UTF-8 character that is not finished


def byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in a byte-level vocabulary (Radford et al. 2019).

    Printable Latin-1 stands for itself; the other bytes, in order, for the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


class TokenBytes:
    """The bytes of each token, as the decoder of ``tokenizer.json`` defines them."""

    def __init__(self, backend: Backend) -> None:
        """Raises ConfigError when the decoder is of a kind that is not known here."""
        self._backend = backend
        self._cache: dict[int, bytes] = {}  # at most one entry per token of the vocabulary
        self._special = frozenset(i for i, t in backend.get_added_tokens_decoder().items() if t.special)
        self._alphabet: dict[str, int] | None = None
        self._replacements: list[tuple[str, str]] = []
        self._byte_fallback = False
        self.strip_left = ("", 0)  # (character, how many of it the decoder takes off the beginning of a text)
        state = b'{"type": "none"}' if backend.decoder is None else backend.decoder.__getstate__()
        decoder = json.loads(state)
        self._read_decoder(decoder["decoders"] if decoder["type"] == "Sequence" else [decoder])

    def _read_decoder(self, steps: list[dict[str, Any]]) -> None:
        for step in steps:
            match step:
                case {"type": "ByteLevel"}:
                    self._alphabet = byte_alphabet()
                case {"type": "Replace", "pattern": {"String": old}, "content": new}:
                    self._replacements.append((old, new))
                case {"type": "ByteFallback"}:
                    self._byte_fallback = True
                case {"type": "Fuse"}:
                    pass  # everything is joined here anyway
                case {"type": "Strip", "content": character, "start": count, "stop": 0}:
                    self.strip_left = (character, count)
                case _:
                    kinds = [s["type"] for s in steps]
                    raise ConfigError("model", f"decoder {kinds} of tokenizer.json is not supported: {step}")
        if self._alphabet is not None and len(steps) > 1:
            raise ConfigError("model", "a ByteLevel decoder together with others is not supported")

    def of(self, token_id: int, skip_special_tokens: bool) -> bytes:
        """Bytes of a token; none for an id outside the vocabulary (models pad theirs) or a skipped special token."""
        if skip_special_tokens and token_id in self._special:
            return b""
        found = self._cache.get(token_id)
        if found is None:
            token = self._backend.id_to_token(token_id)
            if token is None:
                return b""
            found = self._cache[token_id] = self._bytes(token)
        return found

    def _bytes(self, token: str) -> bytes:
        if self._alphabet is not None:
            try:
                return bytes(self._alphabet[c] for c in token)
            except KeyError:  # an added token with characters outside the alphabet stands for itself
                return token.encode()
        for old, new in self._replacements:
            token = token.replace(old, new)
        if self._byte_fallback and (match := BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return token.encode()

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool) -> str:
        """The text of a whole sequence."""
        text = b"".join(self.of(i, skip_special_tokens) for i in token_ids).decode(errors="replace")
        return _strip(text, *self.strip_left)[0]


def _strip(text: str, character: str, count: int) -> tuple[str, int]:
    """``text`` without up to ``count`` leading ``character``, and how many may still be taken off what follows."""
    while count and text.startswith(character):
        text, count = text[len(character) :], count - 1
    return text, 0 if text else count


class IncrementalDetokenizer:
    """Text of one sequence while its tokens arrive.

    What ``push`` and ``finish`` returned, joined, is ``tokenizer.decode`` of all tokens, cut before the first stop
    string (see ``StopFilter``). With ``prompt_ids`` the text continues theirs: a character that the prompt left
    unfinished is part of it, and a leading space is kept.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        stop: Sequence[str] = (),
        skip_special_tokens: bool = True,
    ) -> None:
        self._bytes = tokenizer.token_bytes
        self._skip = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip_character, self._strip_count = self._bytes.strip_left
        self._stop = StopFilter(tuple(stop))
        self._finished = False
        if tail := self._tail(prompt_ids):
            self._strip_count = 0
            self._utf8.decode(tail)

    def _tail(self, prompt_ids: Sequence[int]) -> bytes:
        """The last bytes of the prompt: enough to hold an unfinished character."""
        tail = b""
        for token_id in reversed(prompt_ids):
            tail = self._bytes.of(token_id, self._skip) + tail
            if len(tail) >= LONGEST_INCOMPLETE:
                break
        return tail

    @property
    def stopped(self) -> bool:
        """Whether a stop string ended the text."""
        return self._stop.stop_string is not None

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text."""
        return self._stop.stop_string

    def push(self, token_id: int) -> str:
        """The text that became certain with this token. Raises ValueError after the end."""
        if self.stopped or self._finished:
            raise ValueError("the text has ended; no token may follow it")
        return self._stop.push(self._stripped(self._utf8.decode(self._bytes.of(token_id, self._skip))))

    def finish(self) -> str:
        """The rest of the text: an unfinished character as U+FFFD, and what might have begun a stop string."""
        if self.stopped or self._finished:
            return ""
        self._finished = True
        certain = self._stop.push(self._stripped(self._utf8.decode(b"", final=True)))
        return certain + self._stop.finish()

    def _stripped(self, text: str) -> str:
        if not self._strip_count:
            return text
        text, self._strip_count = _strip(text, self._strip_character, self._strip_count)
        return text
