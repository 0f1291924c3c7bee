"""The comparison of KV caches, on a tiny model."""

from __future__ import annotations

from benchmarks.kv8 import compare
from tests.support.needs import needs_kernels
from tests.support.tiny_model import VOCAB, tiny_llama


@needs_kernels
def test_rounding_costs_little_and_is_seen() -> None:
    ids = [(7919 * i + 13) % VOCAB for i in range(300)]
    found = compare(tiny_llama("fp32", 0, VOCAB), ids)
    assert found.token_bytes == (2 * 2 * 2 * 16 * 4, 2 * 2 * 2 * (16 + 4))
    assert 0 < found.kl < 0.01
    assert 0.9 < found.agreement <= 1
    assert found.perplexity[0] != found.perplexity[1]
