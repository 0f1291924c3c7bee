"""The least that a row of the GPU benchmark can take: bytes, FLOPs and the ceilings that turn them into seconds. Pure.

Bytes count every weight matrix and every visible key and value once, FLOPs a multiplication and an addition each.
Norms, activations and the gathered rows of the embedding are left out: under a thousandth of the rest at these sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.models.config import ModelSpec
from paceline.spec_decode.heads.formats.config import Eagle3Config


@dataclass(frozen=True)
class Ceilings:
    """What the device reached in this run."""

    copy_bytes_per_s: float  # device-to-device copy, bytes read and bytes written
    matmul_flops_per_s: float  # a large product of the benchmark's dtype


@dataclass(frozen=True)
class Work:
    """What a step has to move and to compute."""

    num_bytes: float
    flops: float

    def floor_s(self, ceilings: Ceilings) -> float:
        """Seconds that it takes at the least: the longer of the two."""
        return max(self.num_bytes / ceilings.copy_bytes_per_s, self.flops / ceilings.matmul_flops_per_s)


def layer_params(spec: ModelSpec) -> int:
    """Weights of the matrices of one decoder layer (Llama family)."""
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    return spec.hidden_size * (2 * q + 2 * kv + 3 * spec.intermediate_size)


def head_params(spec: ModelSpec) -> int:
    """Weights of the LM head, tied or not."""
    return spec.vocab_size * spec.hidden_size


def weight_bytes(spec: ModelSpec, itemsize: int) -> int:
    """Bytes of weights that a step reads."""
    return (spec.num_layers * layer_params(spec) + head_params(spec)) * itemsize


def kv_token_bytes(spec: ModelSpec, itemsize: int) -> int:
    """Bytes of keys and values of one token over all target layers."""
    return spec.num_layers * 2 * spec.num_kv_heads * spec.head_dim * itemsize


def causal_pairs(start: int, end: int) -> int:
    """The number of (row, visible position) pairs of rows start..end-1, each of which sees itself and all before it."""
    return (end * (end + 1) - start * (start + 1)) // 2


def forward_flops(spec: ModelSpec, rows: int, logit_rows: int, pairs: int) -> float:
    """Operations of a forward over ``rows``, scores of ``logit_rows`` of them, and attention over ``pairs``."""
    dense = 2.0 * rows * spec.num_layers * layer_params(spec) + 2.0 * logit_rows * head_params(spec)
    return dense + 4.0 * spec.num_layers * spec.num_heads * spec.head_dim * pairs


def decode_work(spec: ModelSpec, itemsize: int, batch: int, context: int, rows: int = 1) -> Work:
    """A step of ``batch`` sequences whose first row stands at position ``context``, ``rows`` rows each.

    The rows of a sequence share one reading of its context."""
    token = kv_token_bytes(spec, itemsize)
    moved = weight_bytes(spec, itemsize) + batch * (context + rows) * token + batch * rows * token
    pairs = batch * causal_pairs(context, context + rows)
    return Work(moved, forward_flops(spec, batch * rows, batch * rows, pairs))


def prefill_work(spec: ModelSpec, itemsize: int, tokens: int) -> Work:
    """A whole prompt in one forward; only its last row is scored."""
    moved = weight_bytes(spec, itemsize) + 2 * tokens * kv_token_bytes(spec, itemsize)
    return Work(moved, forward_flops(spec, tokens, 1, causal_pairs(0, tokens)))


def eagle3_step_params(config: Eagle3Config) -> int:
    """Weights that one draft step reads: the layer over (embedding, row) and the LM head; fc is for committed rows."""
    shape = config.shape
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    layer = 2 * shape.hidden_size * (q + 2 * kv) + q * shape.hidden_size
    return layer + shape.hidden_size * (3 * shape.intermediate_size + config.draft_vocab_size)


def eagle3_step_work(config: Eagle3Config, itemsize: int, batch: int, context: int) -> Work:
    """One draft step of ``batch`` sequences: one row each."""
    shape, params = config.shape, eagle3_step_params(config)
    token = 2 * shape.num_kv_heads * shape.head_dim * itemsize
    moved = params * itemsize + batch * (context + 2) * token
    attention = 4.0 * shape.num_heads * shape.head_dim * batch * (context + 1)
    return Work(moved, 2.0 * batch * params + attention)


def page_copy_work(tokens: int, token_bytes: int) -> Work:
    """A gather and a scatter of ``tokens``: each reads every byte and writes it."""
    return Work(4.0 * tokens * token_bytes, 0.0)


def share(floor_s: float, measured_s: float) -> float:
    """How much of the measured time the floor is; 1 cannot be beaten."""
    return floor_s / measured_s


def expected_speedup(step_s: float, draft_s: float, verify_s: float, acceptance_length: float) -> float:
    """Tokens per second over plain decoding's, of rounds that take ``draft_s + verify_s`` (algorithms.md I1)."""
    return acceptance_length * step_s / (draft_s + verify_s)
