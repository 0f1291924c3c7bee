"""Tiny runners that follow grammars: one token per byte, and the ends of answers that a chat model has."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Unpack

from tokenizers import decoders, pre_tokenizers

from paceline.assembly.build import assemble
from paceline.engine.colocated import ColocatedEngine, Completed
from paceline.engine.model_runner import ModelRunner, RunnerIdentity
from paceline.grammar.compile import GrammarCompiler
from paceline.request import Grammar, SequenceRequest
from tests.support.asked import Sampling
from tests.support.tiny_chat import BOS, EOS, write_chat_tokenizer
from tests.support.tiny_model import tiny_config, tiny_llama, tiny_request

GRAMMAR_VOCAB = 263  # some columns of the logits have no token


def grammar_runner(folder: Path, /, **options: object) -> ModelRunner:
    """A tiny runner; ``options`` are NodeConfig's."""
    return _runner(folder, options, decodes=True)


def grammar_prefill_runner(folder: Path, /, **options: object) -> ModelRunner:
    """A prefill node's."""
    return _runner(folder, options, decodes=False)


def _runner(folder: Path, options: dict[str, object], *, decodes: bool) -> ModelRunner:
    config = tiny_config("fp32", options)
    identity = RunnerIdentity("tiny", "seed-0", "test")
    grammars = GrammarCompiler(write_chat_tokenizer(folder), GRAMMAR_VOCAB)
    return assemble(config, tiny_llama("fp32", 0, GRAMMAR_VOCAB), identity, grammars, decodes=decodes)


def grammar_request(
    asked: Grammar | None, *, index: int = 0, max_tokens: int = 64, **params: Unpack[Sampling]
) -> SequenceRequest:
    """A request whose prompt is text."""
    prompt = [BOS, *f"number {index}: give me JSON like this, a list, or a word.".encode()]
    fields: Sampling = {"stop_token_ids": (EOS,)}
    fields |= params
    fields["grammar"] = asked
    return tiny_request(prompt, index=index, max_tokens=max_tokens, **fields)


def answers(runner: ModelRunner, requests: list[SequenceRequest]) -> list[Completed]:
    """All of them, in batches."""
    return ColocatedEngine(runner, max_running=8).generate(requests)


def text_of(token_ids: Sequence[int]) -> str:
    """The text of an answer, without its end."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = decoders.ByteLevel()
    return str(backend.decode([letters[token] for token in token_ids if token < len(letters)]))
