"""Where one sequence stands in its grammar. The state is a function of the tokens alone: whoever asks names all tokens
that were emitted, and the cursor goes there, back and forth as it must."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from paceline.errors import InvalidRequest
from paceline.grammar.bounds import FIELD
from paceline.grammar.compile import CompiledGrammar

MAX_MASK_S = 0.25  # of a core for one mask: others of the batch wait for it. Usual ones take less than 1 ms
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Allowed:
    """Which tokens may come next; at least one."""

    mask: BoolArray  # [vocab_size]
    eos_token_ids: tuple[int, ...]

    @cached_property
    def forced(self) -> int | None:
        """The one token that may come, unless it ends the answer.

        Where all texts that may follow begin with the same characters, the library's mask is the token that the
        model's tokenizer would begin them with, and that token alone.
        """
        ids = np.flatnonzero(self.mask)
        return int(ids[0]) if len(ids) == 1 and int(ids[0]) not in self.eos_token_ids else None


class GrammarCursor:
    """One sequence's. Not thread-safe: the engine's thread owns it."""

    def __init__(self, grammar: CompiledGrammar, *, ignore_eos: bool = False) -> None:
        """ignore_eos: the answer ends only where no other token may follow."""
        self._grammar, self._ignore_eos = grammar, ignore_eos
        self._matcher = grammar.matcher()
        self._fed: list[int] = []  # what the matcher has consumed
        self._output: list[int] = []  # of which ``_masks`` are
        self._masks: dict[tuple[int, ...], Allowed] = {}

    @property
    def end(self) -> Allowed:
        """The end of the answer, and nothing else."""
        vocab = self._grammar.tokens
        mask = np.zeros(vocab.vocab_size, dtype=np.bool_)
        mask[list(vocab.eos_token_ids)] = True
        return Allowed(mask, vocab.eos_token_ids)

    def allowed(self, output: Sequence[int], path: tuple[int, ...] = ()) -> Allowed:
        """What may follow ``output`` and then ``path``, a drafted branch; neither holds the end of the answer.

        Raises InvalidRequest where these tokens are none that the grammar allows, or the grammar is too complex.
        """
        if self._output != output:
            self._output, self._masks = list(output), {}
        if path not in self._masks:
            self._masks[path] = self._mask([*output, *path])
        return self._masks[path]

    def _mask(self, tokens: list[int]) -> Allowed:
        self._go_to(tokens)
        began = time.thread_time()
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            self._restart(tokens)  # what the lexer met in other branches counts against it: again, with these alone
            began = time.thread_time()
            bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            self._fail(f"is too complex to go on after {len(tokens)} tokens")
        if time.thread_time() - began > MAX_MASK_S:
            self._fail(f"is too complex to go on after {len(tokens)} tokens: a mask takes more than {MAX_MASK_S:g} s")
        vocab = self._grammar.tokens
        mask = np.unpackbits(bits, bitorder="little")[: vocab.vocab_size].astype(np.bool_)
        eos = list(vocab.eos_token_ids)
        ends = bool(mask[eos].any())
        mask[eos] = False
        if ends and not (self._ignore_eos and mask.any()):
            mask[eos] = True
        if not mask.any():
            self._fail(f"allows nothing to follow {len(tokens)} tokens")
        return Allowed(mask, vocab.eos_token_ids)

    def _go_to(self, tokens: list[int]) -> None:
        """Back to where ``tokens`` and what was consumed part, then on."""
        same = len(self._fed)
        if self._fed != tokens[:same]:
            same = next(i for i, fed in enumerate(self._fed) if i >= len(tokens) or fed != tokens[i])
        if same < len(self._fed) and not self._matcher.rollback(len(self._fed) - same):
            self._restart(tokens)
            return
        del self._fed[same:]
        if self._consume(tokens[same:]) < len(tokens):
            self._restart(tokens)

    def _restart(self, tokens: list[int]) -> None:
        self._matcher, self._fed = self._grammar.matcher(), []
        taken = self._consume(tokens)
        if taken < len(tokens) and self._matcher.is_error():
            self._fail(f"is too complex to go on after {taken} tokens")
        if taken < len(tokens):
            self._fail(f"does not allow token {taken} of the answer")

    def _consume(self, tokens: list[int]) -> int:
        """Returns how many tokens of the text are consumed now."""
        taken = self._matcher.try_consume_tokens(tokens) if tokens else 0
        self._fed += tokens[:taken]
        return len(self._fed)

    def _fail(self, why: str) -> None:
        """Raise, and leave a matcher that can be asked again: one that failed stays failed."""
        self._matcher, self._fed = self._grammar.matcher(), []
        raise InvalidRequest(FIELD, why)
