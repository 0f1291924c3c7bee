"""A tokenizer whose tokens are bytes, and its detokenizer, for routers without a model."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from cluster.contract.plan import TokenizerLike
from paceline.text.templates import ChatTemplate

VOCAB = 300
EOS = 256


class ByteTokenizer:
    """A token is a byte of UTF-8; 256 ends a text."""

    vocab_size = VOCAB
    eos_token_ids = (EOS,)
    strip_start = 0  # what the detokenizer takes off the start of a text

    def token_bytes(self, token_id: int, skip_special_tokens: bool = False) -> bytes:
        return bytes([token_id]) if token_id < 256 else b""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return bytes(t for t in ids if t < 256).decode(errors="replace")

    template = ChatTemplate(None, {})

    def special_ids(self, texts: Collection[str]) -> dict[str, int]:
        return {}

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **options: Any
    ) -> list[int]:
        if any(message["role"] not in ("system", "user", "assistant") for message in messages):
            raise ValueError("unknown role")
        return self.encode(
            "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>" * add_generation_prompt
        )


class ByteDetokenizer:
    """Holds back what may begin a stop string, and bytes of an incomplete character."""

    def __init__(self, tokenizer: TokenizerLike, prompt_ids: Sequence[int], stop: Sequence[str]) -> None:
        self._stop, self._bytes, self._text, self._sent = tuple(stop), b"", "", 0
        self.stopped, self.stop_string = False, ""

    def push(self, token_id: int) -> str:
        self._bytes += bytes([token_id]) if token_id < 256 else b""
        try:
            self._text += self._bytes.decode()
        except UnicodeDecodeError:
            return ""
        self._bytes = b""
        found = [(at, stop) for stop in self._stop if (at := self._text.find(stop)) >= 0]
        if found:
            self.stopped, (at, self.stop_string) = True, min(found)
            return self._send(at)
        held = max((n for s in self._stop for n in range(1, len(s)) if self._text.endswith(s[:n])), default=0)
        return self._send(len(self._text) - held)

    def finish(self) -> str:
        self._text += self._bytes.decode(errors="replace")
        return self._send(len(self._text))

    def _send(self, end: int) -> str:
        text, self._sent = self._text[self._sent : end], max(end, self._sent)
        return text
