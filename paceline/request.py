"""What is asked: sampling parameters and sequence requests, as plain frozen data. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from paceline.errors import InvalidRequest, quoted
from paceline.speculation import TreeKind

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024  # characters
MAX_LOGIT_BIAS = 1024  # entries
MAX_TOP_LOGPROBS = 20
MAX_BAD_WORDS = 64
MAX_BAD_WORD = 256  # characters
MAX_BAD_SEQUENCES = 2 * MAX_BAD_WORDS
MAX_BAD_TOKENS = 32  # of a sequence
MAX_N = 128
MAX_BIAS = 100.0
INT32_MAX = 2**31 - 1
UINT64_MAX = 2**64 - 1

# Least and greatest value of a field. A repetition penalty near 0 would make logits infinite, and no token the best.
RANGES: Mapping[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.01, 100.0),
    "top_k": (0, INT32_MAX),
    "max_tokens": (0, INT32_MAX),
    "n": (1, MAX_N),
    "top_logprobs": (0, MAX_TOP_LOGPROBS),
    "prompt_logprobs": (0, MAX_TOP_LOGPROBS),
    "seed": (0, UINT64_MAX),
}


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"  # end-of-sequence token, stop token or stop string
    LENGTH = "length"  # max_tokens or the context window
    ABORT = "abort"  # cancelled
    TOOL_CALLS = "tool_calls"  # as STOP, after one or more tool calls; the router's word, nodes say STOP


class GrammarKind(StrEnum):
    """How a grammar says which texts it allows."""

    JSON_SCHEMA = "json_schema"  # a JSON Schema, as JSON
    JSON_OBJECT = "json_object"  # any JSON object; the source is empty
    REGEX = "regex"  # a regular expression for the whole text
    EBNF = "grammar"  # a context-free grammar: Lark, or GBNF
    CHOICE = "choice"  # a JSON list of texts


@dataclass(frozen=True)
class Grammar:
    """Texts of which the answer is to be one (`paceline.grammar`)."""

    kind: GrammarKind
    source: str = ""


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen. Field names and meanings are OpenAI's and vLLM's.

    ``seed`` None means: the router draws one (and reports it), so that a request always has a seed when it
    reaches a node. ``top_logprobs`` None means no logprobs; 0 means the chosen token's alone. ``prompt_logprobs`` means
    the same for the tokens of the prompt. ``max_tokens`` 0 generates nothing; nodes are asked for one token then.
    """

    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 keeps all
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    max_tokens: int = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    top_logprobs: int | None = None
    n: int = 1
    grammar: Grammar | None = None
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool = False  # this and the next one are the router's business, as ``stop`` is
    skip_special_tokens: bool = True
    bad_words: tuple[str, ...] = ()  # the router's too: it makes sequences of them
    bad_token_ids: tuple[tuple[int, ...], ...] = ()  # sequences that no output has

    def validate(self, vocab_size: int) -> None:
        """Raise InvalidRequest naming the first field that is out of range."""
        self._validate_numbers()
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise InvalidRequest("min_tokens", f"must be between 0 and max_tokens ({self.max_tokens})")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequest("stop", f"at most {MAX_STOP_STRINGS} stop strings")
        if any(not s or len(s) > MAX_STOP_LENGTH for s in self.stop):
            raise InvalidRequest("stop", f"each stop string needs 1 to {MAX_STOP_LENGTH} characters")
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidRequest("logit_bias", f"at most {MAX_LOGIT_BIAS} entries")
        for token_id, bias in self.logit_bias.items():
            if not 0 <= token_id < vocab_size:
                raise InvalidRequest("logit_bias", f"token id {token_id} is outside the vocabulary of {vocab_size}")
            if not -MAX_BIAS <= bias <= MAX_BIAS:  # also refuses NaN
                raise InvalidRequest("logit_bias", f"bias {bias} must be between {-MAX_BIAS:g} and {MAX_BIAS:g}")
        for token_id in self.stop_token_ids:
            if not 0 <= token_id < vocab_size:
                raise InvalidRequest("stop_token_ids", f"token id {token_id} is outside the vocabulary of {vocab_size}")
        if self.min_tokens and len(set(self.stop_token_ids)) >= vocab_size:
            raise InvalidRequest("stop_token_ids", "with min_tokens at least one token must not be among them")
        self._validate_bad(vocab_size)

    def _validate_bad(self, vocab_size: int) -> None:
        if len(self.bad_words) > MAX_BAD_WORDS or any(not 0 < len(w) <= MAX_BAD_WORD for w in self.bad_words):
            raise InvalidRequest("bad_words", f"at most {MAX_BAD_WORDS}, each of 1 to {MAX_BAD_WORD} characters")
        if len(self.bad_token_ids) > MAX_BAD_SEQUENCES:
            raise InvalidRequest("bad_token_ids", f"at most {MAX_BAD_SEQUENCES} sequences")
        for ids in self.bad_token_ids:
            if not 0 < len(ids) <= MAX_BAD_TOKENS:
                raise InvalidRequest("bad_token_ids", f"each sequence needs 1 to {MAX_BAD_TOKENS} tokens")
            if any(not 0 <= token_id < vocab_size for token_id in ids):
                raise InvalidRequest("bad_token_ids", f"{list(ids)} is not within the vocabulary of {vocab_size}")
        if self.bad_token_ids and len(self.bad_token_ids) + len(set(self.stop_token_ids)) >= vocab_size:
            raise InvalidRequest("bad_token_ids", "must leave tokens that may come")

    def _validate_numbers(self) -> None:
        for name, (low, high) in RANGES.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:  # also refuses NaN
                raise InvalidRequest(name, f"must be between {low} and {high}, got {value}")
        if not 0.0 < self.top_p <= 1.0:
            raise InvalidRequest("top_p", f"must be above 0 and at most 1, got {self.top_p}")


class DraftLimits(Protocol):
    """What a deployment drafts when a request asks for nothing, and at most: its configuration."""

    @property
    def num_draft_tokens(self) -> int: ...

    @property
    def tree(self) -> str: ...

    @property
    def tree_width(self) -> int: ...


@dataclass(frozen=True)
class SpeculationParams:
    """Per-request speculation. None keeps the deployment's value; more than the deployment gives is refused."""

    num_draft_tokens: int | None = None  # K; 0 turns speculation off for this request
    tree_width: int | None = None  # candidates per expanded node; 1 is a chain
    drafter: str | None = None  # one of the deployment's list
    tree: str | None = None  # chain, static or dynamic
    prediction: str = ""  # what the answer will probably say; the router makes token ids of it
    prediction_token_ids: tuple[int, ...] = ()  # the same for nodes, which draft from it

    def check_within(self, most: DraftLimits) -> None:
        """Raise InvalidRequest naming the first field that asks for more than ``most``."""
        depth, width = self.num_draft_tokens, self.tree_width
        if depth is not None and depth > most.num_draft_tokens:
            gives = f"must be at most {most.num_draft_tokens}, which this deployment drafts"
            raise InvalidRequest("speculation.num_draft_tokens", f"{gives}; got {depth}")
        tree = most.tree if self.tree is None else self.tree
        kinds = list(TreeKind)
        if tree not in (given := kinds[: kinds.index(TreeKind(most.tree)) + 1]):
            gives = f"must be {' or '.join(given)} in this deployment"
            raise InvalidRequest("speculation.tree", f"{gives}; got {quoted(tree)}")
        widest = 1 if tree == "chain" else most.tree_width
        if width is not None and width > widest:
            gives = f"must be at most {widest} for a {tree} draft of this deployment"
            raise InvalidRequest("speculation.tree_width", f"{gives}; got {width}")


@dataclass(frozen=True)
class SequenceRequest:
    """One sequence as a node sees it: ``n > 1`` is split and every default resolved by the router.

    ``output_token_ids`` are tokens that an earlier attempt already emitted (migration); they count as output
    for penalties, ``max_tokens`` and ``min_tokens``. ``params.seed`` is never None and ``params.stop_token_ids``
    already contains the model's end-of-sequence ids unless ``ignore_eos``, and with a grammar in any case. Stop strings
    are the router's business.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    output_token_ids: tuple[int, ...] = ()
    speculation: SpeculationParams = SpeculationParams()
    cache_salt: str = ""  # tenant scope of the prefix cache


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probability of one token of prompt or output under the unprocessed model distribution, and the best
    alternatives."""

    logprob: float  # the chosen token's
    top_ids: tuple[int, ...] = ()  # the most likely tokens, best first, as many as were asked for
    top_logprobs: tuple[float, ...] = ()  # their log-probabilities, in the same order


def derive_seed(seed: int, choice: int) -> int:
    """Seed of choice ``choice`` of a request with ``n > 1``. Choice 0 keeps the request's own seed.

    splitmix64's finaliser (Steele et al. 2014) over seed and index.
    """
    if choice == 0:
        return seed
    z = (seed + choice * 0x9E3779B97F4A7C15) & UINT64_MAX
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & UINT64_MAX
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & UINT64_MAX
    return z ^ (z >> 31)
