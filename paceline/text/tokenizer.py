"""Text to tokens and back, and chat templates, from a Hugging Face folder. Needs tokenizers and jinja2, no torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import tokenizers
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from paceline.errors import ConfigError, InvalidRequest
from paceline.text.detokenizer import IncrementalDetokenizer, TextStream

__all__ = ["IncrementalDetokenizer", "Tokenizer"]

ROLES = ("system", "developer", "user", "assistant", "tool")
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """A fast tokenizer with the settings of ``tokenizer_config.json``."""

    def __init__(
        self, inner: tokenizers.Tokenizer, settings: Mapping[str, Any], eos_token_ids: Sequence[int] = ()
    ) -> None:
        """Raises ConfigError for a decoder or a chat template that cannot be used."""
        inner.no_truncation()  # a saved training setting would cut prompts silently
        inner.no_padding()
        self._inner = inner
        self._specials = {name: text for name in SPECIAL_NAMES if (text := _content(settings.get(name)))}
        self._bos_id = inner.token_to_id(self._specials.get("bos_token", ""))
        self._adds_bos: bool | None = settings.get("add_bos_token")
        self._template = _compile(settings.get("chat_template"))
        self._skipped = {i for i, token in inner.get_added_tokens_decoder().items() if token.special}
        self._bytes: dict[int, bytes] = {}  # at most one entry per token of the vocabulary
        self._to_bytes, self.strip_start = _byte_decoder(inner)
        self.vocab_size = max(inner.get_vocab(with_added_tokens=True).values(), default=-1) + 1  # ids are below it
        self.eos_token_ids = tuple(eos_token_ids)

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Read tokenizer.json and the configs beside it. Raises ConfigError when there is none, or it is unreadable."""
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
        try:
            inner = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception
            raise ConfigError("model", f"{file} cannot be read: {error}") from None
        return cls(inner, settings, ids)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``; special tokens in it are recognised.

        ``add_bos_token`` decides about a beginning-of-sequence token; without the setting, tokenizer.json does. A text
        that begins with one gets no second, and none gets one without ``add_special_tokens``. Raises InvalidRequest
        for lone surrogates.
        """
        ids = self._encode(text, "prompt")
        if not add_special_tokens or (self._bos_id is not None and ids[:1] == [self._bos_id]):
            return ids
        if self._adds_bos is None:
            return self._ids(text, add_special_tokens=True)
        return [self._bos_id, *ids] if self._adds_bos and self._bos_id is not None else ids

    def _encode(self, text: str, field: str) -> list[int]:
        _check_unicode(text, field)
        return self._ids(text, add_special_tokens=False)

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        """A batch of one: the library's ``encode`` keeps the interpreter to itself, for seconds on a long text."""
        (encoding,) = self._inner.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ``ids``; bytes that are no UTF-8 become U+FFFD, ids that no token has become nothing."""
        data = b"".join(self.token_bytes(i, skip_special_tokens) for i in ids)
        return TextStream(self.strip_start).push(data, final=True)

    def token_bytes(self, token_id: int, skip_special_tokens: bool = False) -> bytes:
        """What a token adds to the text, UTF-8; may be a part of a character."""
        if skip_special_tokens and token_id in self._skipped:
            return b""
        data = self._bytes.get(token_id)
        if data is None:
            token = self._inner.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
            if token is None:
                return b""
            data = self._bytes[token_id] = self._to_bytes(token)
        return data

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True
    ) -> list[int]:
        """Token ids of a conversation. messages: ``role`` and ``content``, both text.

        The rendered text gets no further special tokens. Raises InvalidRequest naming the message that is wrong.
        """
        if self._template is None:
            raise InvalidRequest("messages", "this model has no chat template; use a plain prompt")
        _check_messages(messages)
        values = {"messages": [dict(m) for m in messages], "add_generation_prompt": add_generation_prompt}
        try:
            text = self._template.render(values, tools=None, documents=None, **self._specials)
        except Exception as error:  # the template is the model's own program: it may fail in any way
            raise InvalidRequest("messages", f"the chat template refused them: {error}") from None
        return self._encode(text, "messages")


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError("model", f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError("model", f"{path} cannot be read: it holds no object")
    return content


def _content(token: Any) -> str | None:
    """A special token is text, or an object with its text."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _check_unicode(text: str, field: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequest(field, f"is not valid Unicode at character {error.start}") from None


def _check_messages(messages: Sequence[Mapping[str, str]]) -> None:
    if not messages:
        raise InvalidRequest("messages", "must hold at least one message")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InvalidRequest(f"messages[{i}]", "must be an object with role and content")
        if message.get("role") not in ROLES:
            raise InvalidRequest(f"messages[{i}].role", f"must be one of {', '.join(ROLES)}")
        content = message.get("content")
        if not isinstance(content, str):
            raise InvalidRequest(f"messages[{i}].content", "must be text")
        _check_unicode(content, f"messages[{i}].content")


# Decoding -------------------------------------------------------------------------------------------------------------


def _byte_decoder(inner: tokenizers.Tokenizer) -> tuple[Callable[[str], bytes], int]:
    """How a token becomes bytes, and how many spaces go from the beginning of a text. Raises ConfigError."""
    state = json.loads(inner.to_str())["decoder"] or {"type": "none"}
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    if [step["type"] for step in steps] == ["ByteLevel"]:
        table = _byte_level_table()
        return lambda token: _from_byte_level(token, table), 0
    replaced: list[tuple[str, str]] = []
    strip, fallback = 0, False
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": old}, "content": new}:
                replaced.append((old, new))
            case {"type": "ByteFallback"}:
                fallback = True
            case {"type": "Fuse"}:
                pass
            case {"type": "Strip", "content": " ", "start": strip, "stop": 0} if {"type": "Fuse"} in steps:
                pass
            case _:
                raise ConfigError("model", f"tokenizer.json has the decoder {step['type']}, which is not supported")
    return lambda token: _from_pieces(token, replaced, fallback), strip


def _byte_level_table() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes: those that print stand for themselves, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


def _from_byte_level(token: str, table: Mapping[str, int]) -> bytes:
    """A token with any character outside the table is an added one, and plain text."""
    values = [table.get(character) for character in token]
    return bytes(v for v in values if v is not None) if None not in values else token.encode()


def _from_pieces(token: str, replaced: Sequence[tuple[str, str]], fallback: bool) -> bytes:
    """SentencePiece style: ``▁`` for a space, ``<0x0A>`` for a byte."""
    for old, new in replaced:
        token = token.replace(old, new)
    if fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.encode()


# Chat templates -------------------------------------------------------------------------------------------------------


class _Generation(jinja2.ext.Extension):
    """``{% generation %}`` marks the assistant's text for training; here it is only what it holds."""

    tags = {"generation"}  # noqa: RUF012  (jinja2's own declaration)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """See jinja2.ext.Extension."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compile(source: Any) -> jinja2.Template | None:
    """The template, in the sandbox and with the functions that Hugging Face templates are written for."""
    if isinstance(source, list):  # several named templates
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    if not isinstance(source, str):
        return None
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise ConfigError("model", f"the chat template cannot be read: {error}") from None


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own escapes what HTML would misread, which a model must not see."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
