"""Vocabularies of SentencePiece as a GGUF file has them, and a file with nothing else."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


@dataclass(frozen=True)
class SpmVocabulary:
    """Tokens, their scores and kinds, by their ids."""

    tokens: list[str]
    scores: list[float]
    kinds: list[int]

    def with_token(self, text: str, score: float, kind: int) -> SpmVocabulary:
        """One more."""
        return SpmVocabulary([*self.tokens, text], [*self.scores, score], [*self.kinds, kind])

    def add_to(self, writer: gguf.GGUFWriter) -> None:
        """Write it into a file."""
        writer.add_tokenizer_model("llama")
        writer.add_token_list(self.tokens)
        writer.add_token_scores(self.scores)
        writer.add_token_types(self.kinds)


def random_vocabulary(dice: random.Random, characters: str, count: int, given: Mapping[str, int]) -> SpmVocabulary:
    """``<unk>``, ``<s>``, ``</s>``, all bytes, tokens that are ``given`` with their kinds, ``characters``, and
    ``count`` pieces that are made of two others each, with scores in any order."""
    pieces = list(characters)
    while len(pieces) < len(characters) + count:
        made = dice.choice(pieces) + dice.choice(pieces)
        if made not in pieces and len(made) <= 8:
            pieces.append(made)
    scores = dice.sample(range(10 * len(pieces)), len(pieces))
    tokens = ["<unk>", "<s>", "</s>", *BYTES, *given, *pieces]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *given.values(), *[NORMAL] * len(pieces)]
    others = [0.0] * (len(tokens) - len(pieces))
    return SpmVocabulary(tokens, [*others, *(-float(score) for score in scores)], kinds)


def write_spm(
    path: Path,
    vocabulary: SpmVocabulary,
    fields: Mapping[str, str | bool | int] | None = None,
    architecture: str = "llama",
) -> None:
    """A file with a tokenizer and a table of as many rows. fields: of ``tokenizer.ggml``."""
    writer = gguf.GGUFWriter(str(path), architecture)
    vocabulary.add_to(writer)
    for name, index in {"unknown": 0, "bos": 1, "eos": 2}.items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", index)
    adders = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32}
    for name, value in (fields or {}).items():
        adders[type(value)](f"tokenizer.ggml.{name}", value)
    writer.add_tensor("token_embd.weight", np.zeros((len(vocabulary.tokens), 1), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
