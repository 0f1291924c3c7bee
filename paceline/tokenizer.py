"""Text to tokens and back, and chat templates, from a Hugging Face folder. Needs tokenizers and jinja2, no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment

from paceline.detokenizer import IncrementalDetokenizer
from paceline.errors import ConfigError, InvalidRequest

__all__ = ["IncrementalDetokenizer", "Tokenizer"]

SPECIAL_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")


class Tokenizer:
    """A fast tokenizer with the settings of ``tokenizer_config.json``."""

    def __init__(self, inner: tokenizers.Tokenizer, settings: Mapping[str, Any], eos_token_ids: Sequence[int]) -> None:
        self._inner = inner
        self._specials = {name: _content(settings.get(name)) for name in SPECIAL_NAMES}
        self._adds_bos = bool(settings.get("add_bos_token", False))
        self._template = _compile(settings.get("chat_template"))
        self.eos_token_ids = tuple(eos_token_ids)

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Read tokenizer.json and the configs beside it. Raises ConfigError when there is none."""
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ConfigError("model", f"{file} is missing: a fast tokenizer is needed")
        settings = _read(folder / "tokenizer_config.json")
        template = folder / "chat_template.jinja"
        if template.is_file():
            settings["chat_template"] = template.read_text(encoding="utf-8")
        eos = _read(folder / "generation_config.json").get("eos_token_id")
        eos = eos if eos is not None else _read(folder / "config.json").get("eos_token_id")
        ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
        return cls(tokenizers.Tokenizer.from_file(str(file)), settings, ids)

    @property
    def vocab_size(self) -> int:
        """Ids are below it."""
        return self._inner.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``, with the beginning-of-sequence token where the model wants one."""
        ids = self._encode(text, "prompt")
        bos = self._inner.token_to_id(self._specials["bos_token"]) if self._adds_bos else None
        return ids if bos is None or ids[:1] == [bos] else [bos, *ids]

    def _encode(self, text: str, field: str) -> list[int]:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidRequest(field, f"is not valid Unicode at character {error.start}") from None
        ids: list[int] = self._inner.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ``ids``; bytes that are no UTF-8 become U+FFFD."""
        text: str = self._inner.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_text(self, token_id: int) -> str:
        """Text of one token by itself, special tokens included."""
        return self.decode([token_id], skip_special_tokens=False)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True
    ) -> list[int]:
        """Token ids of a conversation. messages: ``role`` and ``content``, both text."""
        if self._template is None:
            raise InvalidRequest("messages", "this model has no chat template; use a plain prompt")
        if not messages:
            raise InvalidRequest("messages", "must hold at least one message")
        for i, message in enumerate(messages):
            for key in ("role", "content"):
                if not isinstance(message.get(key), str):
                    raise InvalidRequest(f"messages[{i}].{key}", "must be text")
        specials = {name: value or "" for name, value in self._specials.items()}
        try:
            text = self._template.render(
                messages=[dict(m) for m in messages], add_generation_prompt=add_generation_prompt, **specials
            )
        except (jinja2.TemplateError, TypeError, ValueError, ZeroDivisionError) as error:
            raise InvalidRequest("messages", f"the chat template refused them: {error}") from None
        return self._encode(text, "messages")


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return content


def _content(token: Any) -> str:
    """A special token is text, or an object with its text."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else ""


def _compile(source: Any) -> jinja2.Template | None:
    """The template, in the sandbox that Hugging Face templates are written for."""
    if isinstance(source, list):  # several named templates
        named = {entry["name"]: entry["template"] for entry in source}
        source = named.get("default")
    if not isinstance(source, str):
        return None
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise ConfigError("model", f"the chat template cannot be read: {error}") from None


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
