"""Rounds that are told together count as those told one by one."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from cluster.contract.generation import ReceivedChoice
from cluster.routing.choice import ChoiceRun, rounds_after, rounds_within
from paceline.request import FinishReason, SamplingParams, SequenceRequest
from paceline.results import Chunk, Round
from tests.support.byte_text import ByteDetokenizer, ByteTokenizer

STOP = "xyz"


def choice(had: int, retell: bool, given: bool, ids: list[int]) -> ChoiceRun:
    """A choice of which the client has ``had`` tokens. given: the request brings them."""
    sequence = SequenceRequest("r", (1, 2), SamplingParams(max_tokens=len(ids), seed=5))
    run = ChoiceRun(0, "r", sequence, ByteDetokenizer(ByteTokenizer(), (1, 2), (STOP,)), 10.0)
    if had:
        run.resume(ReceivedChoice(0, had, tuple(ids[:had]) if given else ()), retell)
    return run


def told(run: ChoiceRun, messages: list[tuple[int, list[int], list[Round]]]) -> tuple[list[Chunk], Chunk]:
    """As cluster.routing.attempt takes them."""
    chunks = []
    for first, ids, rounds in messages:
        for part in run.cut(first, len(ids)):
            whole = rounds_within(rounds, part.stop)
            made_by = rounds_after(rounds, part.start) if part.stop == len(ids) else whole
            if run.finish_reason is None:
                chunks.append(run.take(first + part.start, ids[part.start : part.stop], [], made_by))
    run.end(FinishReason.LENGTH)
    return [chunk for chunk in chunks if chunk is not None], run.complete()


@pytest.mark.parametrize("seed", range(60))
def test_the_counts_are_those_of_rounds_told_apart(seed: int) -> None:
    """A client may have the beginning, the message may repeat some of it, and a stop text may cut the end. Mutants: a
    round that a stop text cuts off counts in full; rounds after it count; those before what is known count."""
    rng = random.Random(seed)
    sizes = [rng.randint(1, 4) for _ in range(rng.randint(2, 9))]
    ids = [rng.choice(b"abc") for _ in range(sum(sizes))]
    had, retell, given = rng.choice([0, rng.randrange(len(ids))]), rng.random() < 0.5, rng.random() < 0.5
    if rng.random() < 0.5:
        at = rng.randrange(had, len(ids))
        ids[at : at + len(STOP)] = STOP.encode()
        ids = ids[: sum(sizes)]
    rounds = [
        Round(rng.randint(size - 1, 6), size - 1, 6, rng.choice(["ngram", "eagle3"]), 0.5, 0.25) for size in sizes
    ]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    apart = [(at, ids[at : at + size], [one]) for at, size, one in zip(starts, sizes, rounds, strict=True)]
    began = rng.randrange(len(sizes)) if given else 0
    while starts[began] > (had if given else 0):
        began -= 1
    each, expected = told(choice(had, retell, given, ids), apart[began:])
    ends = sorted(rng.sample(range(began + 1, len(sizes)), rng.randint(0, len(sizes) - began - 1)))
    together = [
        (starts[a], [i for _, part, _ in apart[a:b] for i in part], rounds[a:b])
        for a, b in zip([began, *ends], [*ends, len(sizes)], strict=True)
    ]
    chunks, last = told(choice(had, retell, given, ids), together)
    assert last.completion is not None
    assert expected.completion is not None
    same = replace(last.completion, timing=expected.completion.timing)
    assert same == expected.completion
    if not had:
        made = [*each, *chunks]
        assert all(chunk.round.num_accepted < len(chunk.token_ids) for chunk in made if chunk.round is not None)
        assert all(chunk.round is None for chunk in chunks if len(chunk.token_ids) > max(sizes))
