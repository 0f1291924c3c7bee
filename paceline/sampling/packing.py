"""Rows of sampling parameters as one buffer of words, so that a round uploads them in a single copy.

A row's history (penalties, logit bias, minimum length, bad sequences) travels as *edits*, one per token whose logit
changes:
``logit -> penalise(logit + add, repetition) - subtract``, in float32. There are three lists, and a token's edit in a
later one replaces those before: of the prompt, which stays the same from round to round; of the output, which the rows
of a sequence share; and a node's own, of its path's tokens (algorithms.md B4).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from paceline.layers.upload import staged_together
from paceline.request import SamplingParams
from paceline.sampling.noise import row_keys
from paceline.sampling.params import TOLERANCE, banned_tokens, has_penalty, needs_truncate, reads_history
from paceline.sampling.sampler import RowContext

# Columns of ``DeviceRows.numbers``.
TEMPERATURE, MASS_LIMIT, FLOOR = range(3)
NUM_NUMBERS = 3
# Columns of ``DeviceRows.words``.
KEY, TOP_K, CUT_KEY, CUT_ID, PROMPT, OUTPUT, OWN = 0, 2, 3, 4, 5, 7, 9
NUM_WORDS = 11
EDIT_WORDS = 4  # token id, then three float32: add, repetition, subtract
NO_LIMIT = math.inf
LAST_ID = 2**31 - 1

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True)
class DeviceRows:
    """What the kernels read of R rows; views of one buffer on the device."""

    numbers: torch.Tensor  # float64 [R, 3]: temperature (0 is greedy), top-p mass to reach, lowest scaled logit (min-p)
    words: torch.Tensor  # int32 [R, 11]: two words of key, top_k (0: all), cut (key, id), three lists (from, to)
    edits: torch.Tensor  # int32 [E, 4]
    cut_rows: torch.Tensor  # int32 [C], rows with top-k or top-p; the cut kernel writes their words CUT_KEY and CUT_ID

    @property
    def has_edits(self) -> bool:
        """Whether any logit changes before the temperature."""
        return self.edits.shape[0] > 0


Edit = tuple[int, float, float, float]  # token id, add, repetition, subtract


def pack_rows(rows: Sequence[RowContext], vocab_size: int) -> list[Int32Array]:
    """The four parts of ``DeviceRows`` as words, each [n]. Raises ValueError for a sampled row without seed."""
    numbers = np.zeros((len(rows), NUM_NUMBERS))
    words = np.zeros((len(rows), NUM_WORDS), dtype=np.int32)
    drawn = [i for i, row in enumerate(rows) if row.params.temperature]  # greedy rows read no noise
    keys = row_keys([_seed(rows[i].params) for i in drawn], [rows[i].position for i in drawn])
    words[drawn, KEY : KEY + 2] = keys.view(np.int32)
    words[:, CUT_KEY], words[:, CUT_ID] = -LAST_ID - 1, LAST_ID
    cut_rows = []
    for i, row in enumerate(rows):
        top_k, limit, floor = limits_of(row.params, vocab_size)
        numbers[i] = row.params.temperature, limit, floor
        words[i, TOP_K] = top_k
        if top_k or limit != NO_LIMIT:
            cut_rows.append(i)
    edits = _pack_edits(rows, words)  # which also writes where the lists lie
    return [part.reshape(-1) for part in (numbers.view(np.int32), words, edits, np.array(cut_rows, dtype=np.int32))]


def upload_rows(rows: Sequence[RowContext], vocab_size: int, device: torch.device) -> DeviceRows:
    """Pack and copy; the host does not wait for the copy."""
    numbers, words, edits, cut_rows = staged_together(pack_rows(rows, vocab_size), device)
    return DeviceRows(
        numbers.view(torch.float64).view(-1, NUM_NUMBERS),
        words.view(-1, NUM_WORDS),
        edits.view(-1, EDIT_WORDS),
        cut_rows,
    )


def limits_of(params: SamplingParams, vocab_size: int) -> tuple[int, float, float]:
    """top_k or 0, the mass that top-p must reach, and the lowest scaled logit that min-p keeps (``truncate``)."""
    if not needs_truncate(params):
        return 0, NO_LIMIT, -math.inf
    top_k = params.top_k if 0 < params.top_k < vocab_size else 0
    limit = params.top_p - TOLERANCE if params.top_p < 1.0 else NO_LIMIT
    floor = math.log(params.min_p) - TOLERANCE if params.min_p > 0.0 else -math.inf
    return top_k, limit, floor


def _seed(params: SamplingParams) -> int:
    if params.seed is None:
        raise ValueError("a request that samples needs a seed by the time it reaches the sampler")
    return params.seed


def _pack_edits(rows: Sequence[RowContext], words: Int32Array) -> Int32Array:
    """All lists one after another, int32 [E, 4]; writes where each row's lists lie into ``words``."""
    lists = _Lists()
    own: list[Edit] = []  # of all rows, behind everything else
    ranges: list[tuple[int, int, int]] = []  # (row, from, to) in ``own``
    shared: dict[tuple[int, int, int], _History] = {}  # by identity: all three live as long as the rows
    for i, row in enumerate(rows):
        if not (row.params.logit_bias or reads_history(row.params) or row.num_output < row.params.min_tokens):
            continue
        key = (id(row.params), id(row.prompt_token_ids), id(row.output_token_ids))
        if key not in shared:
            shared[key] = _History.of(row, lists)
        history = shared[key]
        words[i, PROMPT : PROMPT + 2], words[i, OUTPUT : OUTPUT + 2] = history.prompt, history.output
        start = len(own)
        own += _own_edits(row, history)
        ranges.append((i, start, len(own)))
    for i, start, end in ranges:
        words[i, OWN : OWN + 2] = lists.size + start, lists.size + end
    return np.concatenate((*lists.parts, _as_edits(own)))


def _own_edits(row: RowContext, history: _History) -> list[Edit]:
    """A path's tokens count as output; a text that is still too short must not end, and no bad sequence comes."""
    params = row.params
    edits: dict[int, Edit] = {}
    if has_penalty(params):
        for token in row.path_token_ids:
            subtract = _subtracted(params, history.counts.get(token, 0) + row.path_token_ids.count(token))
            edits[token] = (token, params.logit_bias.get(token, 0.0), params.repetition_penalty, subtract)
    if row.num_output < params.min_tokens:
        edits |= {token: (token, 0.0, 1.0, math.inf) for token in params.stop_token_ids}
    banned = banned_tokens(params, row.output_token_ids, row.path_token_ids)
    edits |= {token: (token, 0.0, 1.0, math.inf) for token in banned}
    return list(edits.values())


class _Lists:
    """Lists of edits one after another."""

    def __init__(self) -> None:
        self.parts: list[Int32Array] = []
        self.size = 0

    def append(self, edits: Int32Array) -> tuple[int, int]:
        """Append ``edits``; returns where they begin and end."""
        start, self.size = self.size, self.size + len(edits)
        self.parts.append(edits)
        return start, self.size


@dataclass(frozen=True)
class _History:
    """What one sequence's committed tokens do to its logits, for all nodes of its tree."""

    prompt: tuple[int, int]  # where the lists lie
    output: tuple[int, int]
    counts: dict[int, int]  # of output tokens

    @classmethod
    def of(cls, row: RowContext, lists: _Lists) -> _History:
        """Everything but the row's path."""
        params = row.params
        seen = tuple(row.prompt_token_ids) if params.repetition_penalty != 1.0 else ()
        bias = tuple(sorted(params.logit_bias.items()))
        counts = Counter(row.output_token_ids) if has_penalty(params) else Counter[int]()
        prompt = lists.append(_prompt_edits(seen, params.repetition_penalty, bias))
        return cls(prompt, lists.append(_output_edits(params, counts)), counts)


@lru_cache(maxsize=64)
def _prompt_edits(seen: tuple[int, ...], repetition: float, bias: tuple[tuple[int, float], ...]) -> Int32Array:
    """Edits of the prompt's tokens and of the bias; every round of a request asks for the same."""
    distinct, add = set(seen), dict(bias)
    edits = [(token, add.get(token, 0.0), repetition, 0.0) for token in distinct]
    return _as_edits([*edits, *((token, value, 1.0, 0.0) for token, value in bias if token not in distinct)])


def _output_edits(params: SamplingParams, counts: Mapping[int, int]) -> Int32Array:
    edits = np.empty((len(counts), EDIT_WORDS), dtype=np.float32)
    edits[:, 1], edits[:, 2] = 0.0, params.repetition_penalty
    edits[:, 3] = [_subtracted(params, count) for count in counts.values()]
    words = edits.view(np.int32)
    words[:, 0] = list(counts)
    if params.logit_bias:
        edits[:, 1] = [params.logit_bias.get(token, 0.0) for token in counts]
    return words


def _subtracted(params: SamplingParams, count: int) -> float:
    """Frequency and presence penalty of a token that occurs ``count`` > 0 times in the output."""
    return _rounded(params.frequency_penalty, params.presence_penalty, count)


@lru_cache(maxsize=4096)
def _rounded(rate: float, once: float, count: int) -> float:
    """rate * count + once, as ``params.adjust`` rounds."""
    return float(np.float32(rate) * np.float32(count) + np.float32(once))


def _as_edits(edits: list[Edit]) -> Int32Array:
    """int32 [n, 4]: the id, and the words of three float32."""
    table = np.array(edits, dtype=np.float64).reshape(-1, EDIT_WORDS)  # holds ids and float32 exactly
    words = table.astype(np.float32).view(np.int32)
    words[:, 0] = table[:, 0]
    return words
