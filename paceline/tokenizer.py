"""Text to token ids and back, as the model's folder says. Imports no torch: the router tokenizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from paceline.chat_template import ChatTemplate, check_text, find_template
from paceline.detokenizer import IncrementalDetokenizer, TokenBytes
from paceline.errors import ConfigError, InvalidRequest
from paceline.model_files import read_eos_token_ids, read_json

__all__ = ["IncrementalDetokenizer", "Tokenizer"]

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class Tokenizer:
    """A ``tokenizer.json`` with its settings. Safe to share between threads."""

    def __init__(
        self, backend: Backend, settings: Mapping[str, Any], template: str | None, eos_token_ids: tuple[int, ...]
    ) -> None:
        """``settings``: the content of tokenizer_config.json. ``template``: the chat template, if there is one."""
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.special_tokens = _special_tokens(settings)  # e.g. {"bos_token": "<s>"}
        self._template = None if template is None else ChatTemplate(template, self.special_tokens)
        self._affixes = self._read_affixes(settings)
        eos = self._id_of("eos_token")
        self.eos_token_ids = eos_token_ids or (() if eos is None else (eos,))
        self.token_bytes = TokenBytes(backend)

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Raises ConfigError saying which file is missing or cannot be used."""
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ConfigError("model", f"{file} is missing; only folders with a tokenizer.json can be served")
        try:
            backend = Backend.from_file(str(file))
        except Exception as error:  # tokenizers raises plain Exception
            raise ConfigError("model", f"{file} cannot be read: {error}") from error
        settings: dict[str, Any] = {}
        for name in ("special_tokens_map.json", "tokenizer_config.json"):
            if (folder / name).is_file():
                settings |= read_json(folder / name)
        return cls(backend, settings, find_template(folder, settings), read_eos_token_ids(folder))

    @property
    def vocab_size(self) -> int:
        """Number of tokens, special ones included. The model's own may be larger: embeddings are padded."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``, which may spell special tokens. Raises InvalidRequest if it is not valid Unicode.

        ``add_special_tokens``: with the beginning-of-sequence token, where the model uses one.
        """
        check_text("prompt", text)
        if self._affixes is None:
            return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)
        ids = self._backend.encode(text, add_special_tokens=False).ids
        before, after = self._affixes if add_special_tokens else ((), ())
        return [*before, *ids, *after]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ``token_ids``; an incomplete or invalid character reads as U+FFFD."""
        return self.token_bytes.decode(token_ids, skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """Text of one token by itself, special tokens included."""
        return self.decode([token_id], skip_special_tokens=False)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, object]], add_generation_prompt: bool = True
    ) -> list[int]:
        """Token ids of a conversation, ready for the assistant's turn. The template writes the special tokens itself.

        Raises InvalidRequest naming the field, e.g. ``messages[0].content``.
        """
        if self._template is None:
            raise InvalidRequest("messages", "this model has no chat template; send a prompt instead")
        text = self._template.render(messages, add_generation_prompt)
        return self.encode(text, add_special_tokens=False)

    def _id_of(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self._backend.token_to_id(token)

    def _read_affixes(self, settings: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Ids to put (before, after) a text where the settings say so; None leaves it to tokenizer.json."""
        if "add_bos_token" not in settings and "add_eos_token" not in settings:
            return None
        bos = self._id_of("bos_token") if settings.get("add_bos_token") else None
        eos = self._id_of("eos_token") if settings.get("add_eos_token") else None
        return () if bos is None else (bos,), () if eos is None else (eos,)


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Name -> text. A value is either the text or an object with ``content``."""
    found = {}
    for name in SPECIAL_TOKENS:
        value = settings.get(name)
        if isinstance(value, Mapping):
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
    return found
