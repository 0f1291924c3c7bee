"""Small tokenizers of both kinds, their model folders, and streams through the detokenizer."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from paceline.text.tokenizer import IncrementalDetokenizer, Tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. Stop! STOP the stream, please: END of turn.\n\n",
    "naïve café — “quotes” … 12345 tabs\tand\r\nnewlines; aaaa aaab abab ababab",
    "日本語のテキスト、中文文本，한국어 텍스트。 Ελληνικά кириллица ไทย हिन्दी العربية",
    "🦊🦊🚀 👩‍👩‍👧‍👦 🇫🇷 e\u0301 \ufffd \x00 zero",
]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<s>", "</s>", "<|user|>", "<|assistant|>", "<|pad me|>"]
QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def byte_level() -> Backend:
    """A small byte-level BPE: most characters beyond ASCII take several tokens."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=360,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens(["<tool call>", "né", "ｆ▁w"])  # outside the byte alphabet, half in it, outside it
    return backend


@functools.cache
def library() -> Backend:
    """The backend that ``tokenizer`` was saved from: training is deterministic."""
    return byte_level()


@functools.cache
def byte_ids() -> dict[int, int]:
    """Byte -> id of the token of ``byte_level`` that is this byte alone."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    vocabulary = library().get_vocab()
    found = {b: vocabulary[chr(b)] for b in printable}
    return found | {b: vocabulary[chr(256 + i)] for i, b in enumerate(others)}


def byte_fallback() -> Backend:
    """A SentencePiece-like vocabulary: words with a visible space, and bytes for everything else."""
    pieces = ["<unk>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "▁a", "a", "b", "▁the", "é", "日", "▁▁"]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(["<s>", "</s>"])
    return backend


def write_folder(folder: Path, backend: Backend, *, template: Any = TEMPLATE, **config: Any) -> Path:
    """A model folder as far as a tokenizer needs it."""
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": {"content": "</s>", "special": True}}
    settings_ = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template} | special | config
    (folder / "tokenizer_config.json").write_text(json.dumps(settings_))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 1, "model_type": "llama"}))
    return folder


def stream(tokenizer: Tokenizer, ids: Sequence[int], **options: Any) -> tuple[str, str | None]:
    """(everything that came out, stop string or None)."""
    detokenizer = IncrementalDetokenizer(tokenizer, **options)
    text = ""
    for token_id in ids:
        text += detokenizer.push(token_id)
        if detokenizer.stopped:
            break
    text += detokenizer.finish()
    return text, (detokenizer.stop_string if detokenizer.stopped else None)
