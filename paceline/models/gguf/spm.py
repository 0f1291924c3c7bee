"""SentencePiece's BPE of a GGUF file as Hugging Face's tokenizer.json: merges that follow from scores, and bytes.

SentencePiece joins the two neighbours whose text is the piece with the highest score, the first two of several, until
no neighbours make a piece. Merges in the order of scores do the same where no two pieces share one: what stands around
a piece does not change how its own text is joined, so it is always made of the same two. Tokens that are given by
name are cut out of a text before, and a character that is no token becomes its bytes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from paceline.errors import ConfigError
from paceline.models.gguf.fields import Fields
from paceline.models.gguf.file import GgufFile

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = KINDS = range(1, 7)  # GGUF's kinds of tokens
SPACE = "\u2581"  # what stands for a space
BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
MAX_PIECE, MAX_PIECES = 256, 1 << 23  # characters of a piece, and of all; the largest vocabularies have 2 million
NO_PREFIX = ("gemma3",)  # architectures whose texts begin without a space where the file does not say
TURNS = {"gemma3": ("<start_of_turn>", "<end_of_turn>")}  # which some files have as text
NOT_DONE = ("remove_extra_whitespaces", "precompiled_charsmap")
Scores = Mapping[str, float]  # by piece


def spm_tokenizer(file: GgufFile, tokens: list[str]) -> tuple[Tokenizer, list[str]]:
    """The tokenizer, and its tokens as it has them. tokens: of the file, by their ids.

    Raises ConfigError for a vocabulary that would give other tokens than SentencePiece's, or take too long.
    """
    prefix, kinds, scores = _prefix(file), _kinds(file, tokens), _scores(file, len(tokens))
    # Spaces of a text are still spaces where these are looked for.
    texts = [
        text.replace(SPACE, " ") if kind == USER_DEFINED else text for text, kind in zip(tokens, kinds, strict=True)
    ]
    pieces = {text: score for text, kind, score in zip(texts, kinds, scores, strict=True) if kind == NORMAL}
    unused = {text: 0.0 for text, kind in zip(texts, kinds, strict=True) if kind == UNUSED}
    _check_texts(file, texts, kinds, pieces)
    try:
        merges = merges_of(pieces)
        _check_unused(unused, pieces)
    except ValueError as error:
        raise _refused(file, str(error)) from None
    unknown = next((text for text, kind in zip(texts, kinds, strict=True) if kind == UNKNOWN), None)
    vocabulary = {text: i for i, text in enumerate(texts)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    marks = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), marks]) if prefix else marks
    steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    special = [text for text, kind in zip(texts, kinds, strict=True) if kind in (CONTROL, UNKNOWN)]
    given = [text for text, kind in zip(texts, kinds, strict=True) if kind == USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in given])
    return tokenizer, texts


def merges_of(pieces: Scores) -> list[tuple[str, str]]:
    """Pairs of pieces that make a piece, in the order in which they are joined: of the highest score first.

    Raises ValueError for pieces that share a score, and for what would take too long.
    """
    _check_lengths(pieces)
    found: list[tuple[float, int, str]] = []
    by_score: dict[float, str] = {}
    for piece, score in pieces.items():
        cuts = _cuts(piece, pieces)
        if cuts and (other := by_score.setdefault(score, piece)) != piece:
            raise ValueError(f"tokens {other!r} and {piece!r} share the score {score}")
        found += [(-score, -at, piece) for at in cuts]
    return [(piece[:-back], piece[-back:]) for _, back, piece in sorted(found)]  # a cut is at -back


def _cuts(text: str, pieces: Scores) -> list[int]:
    """Where it can be cut into two pieces."""
    return [at for at in range(1, len(text)) if text[:at] in pieces and text[at:] in pieces]


def _check_lengths(pieces: Scores) -> None:
    """Raise ValueError for pieces that it takes too long to cut."""
    if sum(map(len, pieces)) > MAX_PIECES:
        raise ValueError(f"its pieces have more than {MAX_PIECES} characters")
    if long := next((piece for piece in pieces if len(piece) > MAX_PIECE), None):
        raise ValueError(f"token {long!r:.40} has more than {MAX_PIECE} characters")


def _check_unused(unused: Scores, pieces: Scores) -> None:
    """Raise ValueError for an unused token that is made of pieces: SentencePiece joins them, and takes them apart at
    the end."""
    _check_lengths(unused)
    if made := next((text for text in unused if _cuts(text, pieces)), None):
        raise ValueError(f"token {made!r} is unused, and made of others")


def _prefix(file: GgufFile) -> bool:
    """Whether each stretch of text begins with one more space. Raises ConfigError for options that change a text in
    other ways."""
    for name in NOT_DONE:
        if file.fields.get(f"tokenizer.ggml.{name}"):
            raise _refused(file, f"tokenizer.ggml.{name} is not supported")
    if (pre := file.fields.get("tokenizer.ggml.pre", "default")) != "default":
        raise _refused(file, f"tokenizer.ggml.model 'llama' with tokenizer.ggml.pre {pre!r:.40} is not supported")
    prefix = file.fields.get("tokenizer.ggml.add_space_prefix", Fields(file).architecture not in NO_PREFIX)
    if not isinstance(prefix, bool):
        raise _refused(file, f"tokenizer.ggml.add_space_prefix is {prefix!r:.40}, expected true or false")
    return prefix


def _kinds(file: GgufFile, tokens: Sequence[str]) -> list[int]:
    """Kinds of the tokens; those that begin and end a text or a turn are no text, whatever the file says. Raises
    ConfigError."""
    kinds = file.fields.get("tokenizer.ggml.token_type")
    if not isinstance(kinds, list) or len(kinds) != len(tokens) or not all(kind in KINDS for kind in kinds):
        raise _refused(file, f"tokenizer.ggml.token_type is not a list of {len(tokens)} kinds from 1 to {BYTE}")
    fields = Fields(file)
    ids = {fields.token(name) for name in ("bos", "eos", "eot")}
    turns = TURNS.get(fields.architecture, ())
    known = (i in ids or token in turns for i, token in enumerate(tokens))
    return [CONTROL if is_known else kind for kind, is_known in zip(kinds, known, strict=True)]


def _scores(file: GgufFile, count: int) -> list[float]:
    scores = file.fields.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != count or not all(_is_finite(score) for score in scores):
        raise _refused(file, f"tokenizer.ggml.scores is not a list of {count} numbers")
    return scores


def _is_finite(score: object) -> bool:
    return isinstance(score, int | float) and math.isfinite(score)


def _check_texts(file: GgufFile, texts: Sequence[str], kinds: Sequence[int], pieces: Scores) -> None:
    """Raise ConfigError for texts that are no token's or two tokens', and where a character cannot be bytes, or merged
    though it is no token."""
    counts = Counter(texts)
    if (twice := next((text for text, count in counts.items() if count > 1 or not text), None)) is not None:
        raise _refused(file, f"two tokens, or one without a text, have the text {twice!r:.40}")
    as_bytes = {text for text, kind in zip(texts, kinds, strict=True) if kind == BYTE}
    if lacking := next((name for name in BYTES if name not in as_bytes), None):
        raise _refused(file, f"it has no token {lacking} for a byte")
    if as_bytes != set(BYTES):
        raise _refused(file, f"token {min(as_bytes - set(BYTES))!r:.40} is no byte")
    if alone := min(set().union(*pieces) - counts.keys(), default=None):
        raise _refused(file, f"tokens have the character {alone!r}, which is no token itself")


def _refused(file: GgufFile, message: str) -> ConfigError:
    return ConfigError("model", f"{file.path.name}: {message}; a folder with tokenizer.json beside the file needs none")
