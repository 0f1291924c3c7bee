"""The tokenizer of a GGUF file as Hugging Face's tokenizer.json: byte-level BPE with a pre-tokenizer known by name, or
SentencePiece's."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from paceline.errors import ConfigError
from paceline.models.gguf.file import GgufFile
from paceline.models.gguf.spm import CONTROL, USER_DEFINED, spm_tokenizer

# How Llama 3 and Qwen2 split text before they merge bytes; they differ in how many digits go together.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{DIGITS}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# How o200k splits it: a word is capitals before small letters, and the end of a short form belongs to it.
ABOVE, BELOW = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
LEAD, SHORT = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
O200K = (
    rf"{LEAD}{ABOVE}*{BELOW}+{SHORT}|{LEAD}{ABOVE}+{BELOW}*{SHORT}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# How DeepSeek-V3 splits it, one pattern after the other: digits, Chinese and Japanese, and what is left.
DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)


def _split(*patterns: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _of_digits(digits: str) -> Any:
    return _split(SPLIT.replace("{DIGITS}", digits))


def _single_digits() -> Any:
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])


@dataclass(frozen=True)
class PreTokenizer:
    """What a name in ``tokenizer.ggml.pre`` stands for."""

    make: Callable[[], Any]
    composes: bool = False  # text is brought into Unicode's NFC first
    ignores_merges: bool = False  # a word that is a token is one, whatever the merges say
    adds_bos: bool = False  # where the file does not say


_LLAMA3 = PreTokenizer(lambda: _of_digits("{1,3}"), ignores_merges=True, adds_bos=True)
_QWEN2 = PreTokenizer(lambda: _of_digits(""), composes=True)
PRE_TOKENIZERS = {
    "smollm": PreTokenizer(_single_digits),
    "gpt-2": PreTokenizer(lambda: pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "gpt-4o": PreTokenizer(lambda: _split(O200K), ignores_merges=True),
    "deepseek-v3": PreTokenizer(lambda: _split(*DEEPSEEK3)),
}


def write_tokenizer(file: GgufFile, folder: Path, max_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json. Raises ConfigError for a tokenizer that is not known here."""
    fields, tokens = file.fields, _texts(file, "tokens")
    if len(tokens) > (rows := file.tensors["token_embd.weight"].shape[0]):
        raise ConfigError("model", f"{file.path.name}: it has {len(tokens)} tokens, and a table of {rows}")
    if fields.get("tokenizer.ggml.model") == "llama":
        (tokenizer, tokens), adds_bos = spm_tokenizer(file, tokens), True
    else:
        record = _pre_tokenizer(file)
        tokenizer, adds_bos = _tokenizer(file, tokens, record), record.adds_bos
    tokenizer.save(str(folder / "tokenizer.json"))

    def token(which: str) -> str | None:
        index = fields.get(f"tokenizer.ggml.{which}_token_id")
        return tokens[index] if isinstance(index, int) and 0 <= index < len(tokens) else None

    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": bool(fields.get("tokenizer.ggml.add_bos_token", adds_bos)),
        "bos_token": token("bos"),
        "eos_token": token("eos"),
        "pad_token": token("padding") or token("eos"),
        "unk_token": token("unknown"),
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "chat_template": fields.get("tokenizer.chat_template"),
    }
    text = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def _pre_tokenizer(file: GgufFile) -> PreTokenizer:
    kind, pre = file.fields.get("tokenizer.ggml.model"), file.fields.get("tokenizer.ggml.pre")
    if kind == "gpt2" and isinstance(pre, str) and pre in PRE_TOKENIZERS:
        return PRE_TOKENIZERS[pre]
    known = ", ".join(PRE_TOKENIZERS)
    raise ConfigError(
        "model",
        f"{file.path.name}: tokenizer.ggml.model {kind!r} with tokenizer.ggml.pre {pre!r} is not supported (llama, or "
        f"gpt2 with {known}); a folder with tokenizer.json beside the file needs none",
    )


def _tokenizer(file: GgufFile, tokens: list[str], record: PreTokenizer) -> Tokenizer:
    pairs = [merge.partition(" ") for merge in _texts(file, "merges")]
    merges = [(first, second) for first, _, second in pairs]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    try:
        model = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=record.ignores_merges)
    except Exception as error:  # the library raises plain Exception
        raise ConfigError("model", f"{file.path.name}: its merges cannot be read: {error}") from None
    tokenizer = Tokenizer(model)
    if record.composes:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = record.make()
    tokenizer.decoder = decoders.ByteLevel()
    kinds = file.fields.get("tokenizer.ggml.token_type")
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise ConfigError("model", f"{file.path.name}: tokenizer.ggml.token_type is not a list of {len(tokens)} kinds")
    named = list(zip(tokens, kinds, strict=True))
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t, k in named if k == CONTROL])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t, k in named if k == USER_DEFINED])
    return tokenizer


def _texts(file: GgufFile, name: str) -> list[str]:
    value = file.fields.get(f"tokenizer.ggml.{name}")
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise ConfigError("model", f"{file.path.name}: tokenizer.ggml.{name} is not a list of texts")
    return value
