"""The token budget of a prefill step."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.kvcache.allocator import PageAllocator
from paceline.kvcache.table import PageTable
from paceline.request import SamplingParams, SequenceRequest
from paceline.serving.chunking import plan_chunks
from paceline.spec_decode.sequence import Sequence


def sequence(num_prefill: int, num_computed: int = 0) -> Sequence:
    request = SequenceRequest("r", tuple(range(num_prefill)), SamplingParams(seed=0))
    seq = Sequence.start(request, PageTable(PageAllocator(1), 4))
    seq.num_computed = num_computed
    return seq


def test_the_tail_of_a_prompt_takes_others_along() -> None:
    seqs = [sequence(10, 7), sequence(4), sequence(20), sequence(5)]
    chunks = plan_chunks(seqs, 9)
    assert [(chunk.start, chunk.end, chunk.final) for chunk in chunks] == [(7, 10, True), (0, 4, True), (0, 2, False)]


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 39)), max_size=6), st.integers(1, 50))
def test_every_row_once_within_the_budget(prompts: list[tuple[int, int]], budget: int) -> None:
    seqs = [sequence(n, min(done, n - 1)) for n, done in prompts]
    left = sum(seq.num_prefill - seq.num_computed for seq in seqs)
    while pending := [seq for seq in seqs if seq.num_computed < seq.num_prefill]:
        chunks = plan_chunks(pending, budget)
        taken = sum(chunk.end - chunk.start for chunk in chunks)
        assert taken == min(budget, left)
        for chunk in chunks:
            assert chunk.start == chunk.seq.num_computed < chunk.end
            chunk.seq.num_computed = chunk.end
        left -= taken
    assert left == 0
