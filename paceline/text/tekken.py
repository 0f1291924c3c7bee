"""Mistral's tekken.json as a tokenizer: byte-level BPE by ranks, and control tokens, whose ids come first.

A rank is a token's place among those that BPE makes. Among neighbours whose bytes together are a token, those with the
lowest rank are joined first, and the first two of several. tiktoken does so, by which mistral-common reads the file
(its ``tokens/tokenizers/tekken.py``). The ``tokenizers`` library wants the pairs that are joined instead. One pair a
token is enough: what stands around a token does not change how its own bytes are joined, so it is always made of the
same two. A token that its own bytes do not lead to has no pair, and stands only where it is a whole word.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from paceline.errors import ConfigError
from paceline.text.tokenizer import byte_level_table

TEKKEN = "tekken.json"
MAX_FILE_BYTES = 1 << 26  # the published ones have 19 MB
MAX_TOKENS, MAX_CONTROL, MAX_TOKEN_BYTES = 1 << 20, 1 << 14, 512
MAX_WORK = 1 << 26  # steps that it takes to find pairs, a token's bytes squared
NUM_BYTES = 256
# How all published files split text. A pattern of somebody else's could take for ever on some text.
PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Control tokens of files that name none, which are of these versions.
UNNAMED = ("v3", "v7")
CONTROL = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
ROLES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
Ranks = Mapping[bytes, int]


def read_tekken(file: Path) -> bytes:
    """What is in the file. Raises ConfigError where it cannot be read, and for one of more than MAX_FILE_BYTES."""
    try:
        with file.open("rb") as opened:
            content = opened.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError("model", f"{file} cannot be read: {error}") from None
    if len(content) > MAX_FILE_BYTES:
        raise _refused(file, f"it has more than {MAX_FILE_BYTES} bytes")
    return content


def tekken_tokenizer(content: bytes, file: Path) -> tuple[Tokenizer, dict[str, Any]]:
    """The tokenizer, and what its tokenizer_config.json says: which tokens begin and end a text, and that a prompt
    gets the first of them, as mistral-common has it. Equal contents make equal tokenizers.

    content: of ``file``, which refusals name. Raises ConfigError for a file that is damaged, or would give other tokens
    than mistral-common does.
    """
    try:
        raw = json.loads(content.decode("utf-8"))
        config, entries = raw["config"], raw["vocab"]
        pattern, size, shift = (config[f] for f in ("pattern", "default_vocab_size", "default_num_special_tokens"))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _refused(file, f"it is not JSON with a config and a vocab: {error!r:.200}") from None
    try:
        if pattern != PATTERN:
            raise ValueError(f"config.pattern is not the one that is known: {pattern!r:.80}")
        control = _control(raw, _whole(shift, "config.default_num_special_tokens", 0, MAX_CONTROL))
        ranks = _ranks(entries, _whole(size, "config.default_vocab_size", shift + NUM_BYTES, MAX_TOKENS) - shift)
        tokenizer = _tokenizer(control, ranks)
    except ValueError as error:
        raise _refused(file, str(error)) from None
    named = {role: text for role, text in ROLES.items() if text in control}
    return tokenizer, named | {"add_bos_token": "bos_token" in named, "clean_up_tokenization_spaces": False}


def _control(raw: Mapping[str, Any], count: int) -> list[str]:
    """Control tokens by their ids, ``count`` of them: those that the file names, and then one for each free id.

    A file says of each whether it ``is_control``. No reader of these files asks: all are left out of text, and no text
    is read as one. Raises ValueError.
    """
    entries = raw.get("special_tokens")
    if entries is None:
        version = raw["config"].get("version")
        if version not in UNNAMED:
            raise ValueError(f"it has no special_tokens, and config.version is {version!r:.40}, not in {UNNAMED}")
        entries = [{"rank": rank, "token_str": text} for rank, text in enumerate(CONTROL)]
    if not isinstance(entries, list) or len(entries) > count:
        raise ValueError(f"special_tokens is not a list of at most {count}, as config.default_num_special_tokens says")
    found: dict[int, str] = {}
    for entry in entries:
        text = entry.get("token_str") if isinstance(entry, dict) else None
        if not isinstance(text, str) or not 0 < len(text) <= MAX_TOKEN_BYTES or not text.isascii():
            raise ValueError(f"special_tokens has one that is not ASCII of 1 to {MAX_TOKEN_BYTES} bytes: {text!r:.80}")
        found[_whole(entry.get("rank"), f"the rank of {text!r:.80}", 0, len(entries) - 1)] = text
    if len(found) < len(entries):
        raise ValueError(f"special_tokens has {len(entries)} tokens with {len(found)} ranks")
    texts = [found[rank] for rank in range(len(found))]
    texts += [f"<SPECIAL_{rank}>" for rank in range(len(found), count)]
    if len(set(texts)) < count:
        raise ValueError("special_tokens has a text twice")
    return texts


def _ranks(entries: Any, count: int) -> dict[bytes, int]:
    """Ranks of the first ``count`` tokens by their bytes, in their order. Raises ValueError."""
    if not isinstance(entries, list) or len(entries) < count:
        raise ValueError(f"vocab is not a list of {count} tokens or more, as config.default_vocab_size says")
    ranks: dict[bytes, int] = {}
    for rank, entry in enumerate(entries[:count]):
        if not isinstance(entry, dict) or type(entry.get("rank")) is not int or entry["rank"] != rank:
            raise ValueError(f"vocab has {entry!r:.80} where the token of rank {rank} should be")
        try:
            token = base64.b64decode(entry["token_bytes"], validate=True)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"the token of rank {rank} has no token_bytes in base64: {error!r:.80}") from None
        if not 0 < len(token) <= MAX_TOKEN_BYTES:
            raise ValueError(f"the token of rank {rank} has {len(token)} bytes, expected 1 to {MAX_TOKEN_BYTES}")
        if rank < NUM_BYTES and token != bytes([rank]):
            raise ValueError(f"the token of rank {rank} is {token!r:.80}, expected the byte of this value")
        if (other := ranks.setdefault(token, rank)) != rank:
            raise ValueError(f"the tokens of ranks {other} and {rank} have the same bytes: {token!r:.80}")
    if sum(len(token) ** 2 for token in ranks) > MAX_WORK:
        raise ValueError(f"its tokens are so long that it takes more than {MAX_WORK} steps to find their pairs")
    return ranks


def _tokenizer(control: Sequence[str], ranks: Ranks) -> Tokenizer:
    """Raises ValueError where a control token has the name of another token."""
    letters = {byte: letter for letter, byte in byte_level_table().items()}
    names = {token: "".join(map(letters.__getitem__, token)) for token in ranks}
    vocabulary = {text: i for i, text in enumerate(control)}
    for token, rank in ranks.items():
        if vocabulary.setdefault(names[token], len(control) + rank) < len(control):
            raise ValueError(f"the token of rank {rank} is a control token too: {token!r:.80}")
    pairs = [pair for token in ranks if (pair := last_pair(token, ranks)) is not None]
    merges = [(names[first], names[second]) for first, second in pairs]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))  # a word that is a token
    split = pre_tokenizers.Split(Regex(PATTERN), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in control])
    return tokenizer


def last_pair(token: bytes, ranks: Ranks) -> tuple[bytes, bytes] | None:
    """The two tokens that a token is made of when its bytes are joined; None where they do not lead to it."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        joined = [parts[i] + parts[i + 1] for i in range(len(parts) - 1)]
        best = min(joined, key=lambda text: ranks.get(text, MAX_TOKENS))
        if best not in ranks:
            return None
        at = joined.index(best)
        parts[at : at + 2] = [best]
    return (parts[0], parts[1]) if len(parts) == 2 else None


def _whole(value: Any, name: str, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{name} is {value!r:.40}, expected a whole number from {low} to {high}")
    return value


def _refused(file: Path, why: str) -> ConfigError:
    return ConfigError("model", f"{file} cannot be read as Mistral's tokenizer: {why}")
