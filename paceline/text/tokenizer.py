"""Text to tokens and back, and chat templates, from a Hugging Face folder. Needs tokenizers and jinja2, no torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from paceline.errors import ConfigError, InvalidRequest
from paceline.model_files import read_eos_token_ids, special_token, with_tokenizers_end
from paceline.text.detokenizer import IncrementalDetokenizer, TextStream
from paceline.text.forging import Guard
from paceline.text.templates import ChatTemplate

__all__ = ["IncrementalDetokenizer", "Tokenizer"]

ROLES = ("system", "developer", "user", "assistant", "tool")
OPEN_END = "\uf8ff\uf8fe\uf8ff "  # ends an open message while it is rendered; the space tells whether it is trimmed
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """A fast tokenizer with the settings of ``tokenizer_config.json``."""

    def __init__(
        self, inner: tokenizers.Tokenizer, settings: Mapping[str, Any], eos_token_ids: Sequence[int] = ()
    ) -> None:
        """eos_token_ids: of the model's configs. Raises ConfigError for a decoder or a chat template that cannot be
        used."""
        inner.no_truncation()  # a saved training setting would cut prompts silently
        inner.no_padding()
        self._inner = inner
        self._specials = {name: text for name in SPECIAL_NAMES if (text := special_token(settings.get(name)))}
        self._bos_id = inner.token_to_id(self._specials.get("bos_token", ""))
        self._adds_bos: bool | None = settings.get("add_bos_token")
        self.template = ChatTemplate(settings.get("chat_template"), self._specials)
        self._skipped = {i for i, token in inner.get_added_tokens_decoder().items() if token.special}
        self._bytes: dict[int, bytes] = {}  # at most one entry per token of the vocabulary
        state = json.loads(inner.to_str())
        self._to_bytes, self.strip_start = _byte_decoder(state["decoder"])
        self._guard = Guard(inner, state)
        self.vocab_size = max(inner.get_vocab(with_added_tokens=True).values(), default=-1) + 1  # ids are below it
        own = self._specials.get("eos_token")
        self.eos_token_ids = with_tokenizers_end(eos_token_ids, None if own is None else inner.token_to_id(own))

    @classmethod
    def from_folder(cls, folder: Path, chat_template: str = "") -> Tokenizer:
        """Read tokenizer.json and the configs beside it. chat_template: a file to take in place of the folder's.

        Raises ConfigError when there is none, or it is unreadable.
        """
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ConfigError("model", f"{file} is missing: a fast tokenizer is needed")
        settings = _read(folder / "tokenizer_config.json")
        settings["chat_template"] = _template(folder, settings.get("chat_template"), chat_template)
        try:
            inner = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception
            raise ConfigError("model", f"{file} cannot be read: {error}") from None
        return cls(inner, settings, read_eos_token_ids(folder))

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
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        native_tools: bool | None = None,
        continue_final_message: bool = False,
        values: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation. What messages, tools and values spell is text: special tokens are the
        template's own, but tags that are no special tokens, like ``<think>``, stay in an assistant's turn.

        messages: ``role`` and ``content``, and as Hugging Face's templates take them ``tool_calls`` (arguments as an
        object), ``tool_call_id``, ``name`` and ``reasoning_content``. tools: each ``{"type": "function", "function":
        {...}}``. native_tools: whether the template is given them, or they are told in text; None: as it knows them.
        continue_final_message: the prompt ends with the last message, which is open. values: more for the template.

        The rendered text gets no further special tokens. Raises InvalidRequest naming what is wrong.
        """
        if not self.template:
            raise InvalidRequest("messages", "this model has no chat template; use a plain prompt")
        _check_messages(messages)
        turns = [dict(message) for message in messages]
        mark = self._guard.mark_for([turns, list(tools or ()), dict(values or {})])
        if mark is not None:
            turns = [self._guarded_turn(turn, mark) for turn in turns]
            tools = self._guard.guarded(list(tools), mark) if tools else tools
            values = self._guard.guarded(dict(values or {}), mark)
        if continue_final_message:
            turns[-1]["content"] += OPEN_END
        text = self.template.render(
            turns,
            tools=tools or None,
            native_tools=self.template.knows_tools if native_tools is None else native_tools,
            add_generation_prompt=add_generation_prompt and not continue_final_message,
            values=values or {},
        )
        if continue_final_message:
            text = _cut_at_end(text)
        return self._encode(text, "messages") if mark is None else self._guard.encode(text, mark)

    def _guarded_turn(self, turn: Mapping[str, Any], mark: str) -> dict[str, Any]:
        own = ("content", "reasoning_content", "reasoning") if turn["role"] == "assistant" else ()
        return {key: self._guard.guarded(value, mark, tags_stay=key in own) for key, value in turn.items()}

    def special_ids(self, texts: Collection[str]) -> dict[str, int]:
        """Ids of those of ``texts`` that are special tokens, which are left out of text."""
        return {text: i for text in texts if (i := self._inner.token_to_id(text)) is not None and i in self._skipped}


def _template(folder: Path, settings: Any, file: str) -> Any:
    """Chat templates: of ``file``, else of files in the folder, else of the settings, else of what models that read
    images have for their processor. Raises ConfigError."""
    if file:
        try:
            return Path(file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError("chat_template", f"{file} cannot be read: {error}") from None
    default = folder / "chat_template.jinja"
    if default.is_file():
        settings = default.read_text(encoding="utf-8")
    elif settings is None:
        settings = _read(folder / "chat_template.json").get("chat_template")
    more = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    if more and isinstance(settings, str):
        named = [("default", settings), *((path.stem, path.read_text(encoding="utf-8")) for path in more)]
        return [{"name": name, "template": text} for name, text in named]
    return settings


def _cut_at_end(text: str) -> str:
    """A rendered text up to where its last message ends. A template that trims messages trims this one too."""
    at = text.rfind(OPEN_END.strip())
    if at < 0:
        raise InvalidRequest("continue_final_message", "the chat template drops the last message")
    return text[:at] if text.startswith(OPEN_END, at) else text[:at].rstrip()


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


def _check_unicode(text: str, field: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequest(field, f"is not valid Unicode at character {error.start}") from None


def _check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    if not messages:
        raise InvalidRequest("messages", "must hold at least one message")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InvalidRequest(f"messages[{i}]", "must be an object with role and content")
        if message.get("role") not in ROLES:
            raise InvalidRequest(f"messages[{i}].role", f"must be one of {', '.join(ROLES)}")
        content = message.get("content")
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise InvalidRequest(f"messages[{i}].content", "must be text")
        _check_unicode(content or "", f"messages[{i}].content")


# Decoding -------------------------------------------------------------------------------------------------------------


def _byte_decoder(state: Mapping[str, Any] | None) -> tuple[Callable[[str], bytes], int]:
    """How a token becomes bytes, and how many spaces go from the beginning of a text. Raises ConfigError."""
    state = state or {"type": "none"}
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    if [step["type"] for step in steps] == ["ByteLevel"]:
        table = byte_level_table()
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


def byte_level_table() -> dict[str, int]:
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
