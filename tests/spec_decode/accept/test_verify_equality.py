"""Token equality on the real sampler: any drafter, any tree, any temperature gives the tokens of plain decoding
(algorithms.md B5c, J3, J4)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from paceline.request import SamplingParams
from paceline.sampling.sampler import RowContext, perturbed_topk, sample_rows
from paceline.spec_decode.accept.verify import walk
from paceline.spec_decode.trees.tree import DraftTree, build_tree, comb

torch.set_num_threads(1)

VOCAB = 24
EOS = 5
PROMPT = (3, 1, 4, 1)
LENGTH = 40
DEPTH = 4

PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0},
    "hot": {"temperature": 1.5, "top_p": 0.95},
    "cut": {"temperature": 0.7, "top_k": 8, "min_p": 0.01},
    "penalised": {"temperature": 0.8, "repetition_penalty": 1.4, "frequency_penalty": 0.6, "presence_penalty": 0.4},
    "greedy penalised": {"temperature": 0.0, "frequency_penalty": 0.9},
    "late stop": {"temperature": 1.0, "min_tokens": 25, "logit_bias": {EOS: 3.0}},
}


def target_logits(tokens: tuple[int, ...], salt: int = 0) -> torch.Tensor:
    """float32 [VOCAB], a random table keyed by the last three tokens."""
    key = hash((salt, tokens[-3:]))
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(key)) * 2


Proposal = Callable[[tuple[int, ...], SamplingParams], list[tuple[int, int]]]


def spine(tokens: tuple[int, ...], params: SamplingParams, error: float, width: int) -> list[tuple[int, int]]:
    """A drafter at some distance from the target, coupled to its noise; ``width`` candidates per depth."""
    rows: list[list[int]] = []
    for _ in range(DEPTH):
        logits = (target_logits(tokens) + error * target_logits(tokens, salt=1)).unsqueeze(0)
        ids, _ = perturbed_topk(logits, [params], [len(tokens)], width)
        rows.append(ids[0].tolist())
        tokens = (*tokens, rows[-1][0])
    return comb(rows)


def arbitrary(tokens: tuple[int, ...], params: SamplingParams) -> list[tuple[int, int]]:
    """Any tree: random parents and tokens, some outside the vocabulary, stop tokens and duplicates among them."""
    generator = torch.Generator().manual_seed(hash(tokens[-2:]))
    draws = torch.randint(-2, VOCAB + 2, (12,), generator=generator).tolist()
    return [(int(torch.randint(-1, i, (1,), generator=generator)) if i else -1, t) for i, t in enumerate(draws)]


DRAFTERS: dict[str, Proposal] = {
    "empty": lambda tokens, params: [],
    "perfect": lambda tokens, params: spine(tokens, params, 0.0, 1),
    "good comb": lambda tokens, params: spine(tokens, params, 0.3, 3),
    "bad chain": lambda tokens, params: spine(tokens, params, 5.0, 1),
    "all of the vocabulary": lambda tokens, params: [(-1, t) for t in range(VOCAB)],
    "stop tokens": lambda tokens, params: [(-1, EOS), (0, EOS), (1, 2)],
    "repeats itself": lambda tokens, params: [(i - 1, tokens[-1]) for i in range(4)],
    "arbitrary": arbitrary,
}


@dataclass(frozen=True)
class Harness:
    """A decode loop in miniature. The fields are where mutants go in."""

    key_by_node: bool = False  # mutant: the noise is keyed by the index of the node, not by its position
    path_counts: bool = True  # False, mutant: penalties see the committed output alone

    def rows(self, tree: DraftTree, tokens: tuple[int, ...], params: SamplingParams) -> list[RowContext]:
        contexts = []
        for node in range(tree.num_nodes):
            path = tuple(tree.token_ids[i] for i in tree.path(node)[1:])
            offset = node if self.key_by_node else tree.depths[node]
            contexts.append(
                RowContext(
                    params=params,
                    position=len(tokens) + offset,
                    prompt_token_ids=PROMPT,
                    output_token_ids=tokens[len(PROMPT) :],
                    path_token_ids=path if self.path_counts else (),
                )
            )
        return contexts

    def decode(self, propose: Proposal, params: SamplingParams) -> tuple[list[int], list[int]]:
        """(output tokens, accepted drafts per round); ends at EOS or after LENGTH tokens."""
        tokens: tuple[int, ...] = PROMPT
        accepted: list[int] = []
        finished = False
        while not finished:
            tree = build_tree(tokens[-1], propose(tokens, params), VOCAB, max_nodes=64, max_depth=8)
            paths = [tuple(tree.token_ids[i] for i in tree.path(node)[1:]) for node in range(tree.num_nodes)]
            logits = torch.stack([target_logits(tokens + path) for path in paths])
            sampled = sample_rows(logits, self.rows(tree, tokens, params))
            verdict = walk(tree, sampled, lambda token: token == EOS, LENGTH - (len(tokens) - len(PROMPT)))
            tokens += tuple(verdict.committed(tree))
            accepted.append(len(verdict.path))
            finished = verdict.finish
        return list(tokens[len(PROMPT) :]), accepted


def params_of(kind: str, seed: int) -> SamplingParams:
    return replace(SamplingParams(seed=seed, stop_token_ids=(EOS,)), **PARAMS[kind])


def check(harness: Harness, drafter: str, kind: str) -> None:
    for seed in range(6):
        params = params_of(kind, seed)
        plain, _ = Harness().decode(DRAFTERS["empty"], params)
        assert harness.decode(DRAFTERS[drafter], params)[0] == plain


@pytest.mark.parametrize("kind", PARAMS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_tokens_are_those_of_plain_decoding(drafter: str, kind: str) -> None:
    check(Harness(), drafter, kind)


@pytest.mark.parametrize("drafter", ["good comb", "all of the vocabulary", "arbitrary"])
def test_noise_keyed_by_node_index_is_caught(drafter: str) -> None:
    """On a chain node index and depth agree; on a tree they do not."""
    check(Harness(), drafter, "sampled")
    with pytest.raises(AssertionError):
        check(Harness(key_by_node=True), drafter, "sampled")


@pytest.mark.parametrize("kind", ["penalised", "greedy penalised", "late stop"])
def test_a_path_that_does_not_count_is_caught(kind: str) -> None:
    """Penalties, and the minimum length, must see the node's own ancestors (J9)."""
    check(Harness(), "good comb", kind)
    with pytest.raises(AssertionError):
        check(Harness(path_counts=False), "good comb", kind)


@pytest.mark.parametrize("kind", ["greedy", "sampled"])
def test_a_drafter_equal_to_the_target_is_accepted_in_full(kind: str) -> None:
    """Every round accepts the whole chain until the text or the budget ends (J4)."""
    full = 0
    for seed in range(6):
        _, accepted = Harness().decode(DRAFTERS["perfect"], params_of(kind, seed))
        assert all(count == DEPTH for count in accepted[:-1])
        full += len(accepted) - 1
    assert full > 0


def test_the_text_ends_at_the_first_stop_token_or_the_budget() -> None:
    lengths = set()
    for seed in range(6):
        out, _ = Harness().decode(DRAFTERS["perfect"], params_of("sampled", seed))
        assert EOS not in out[:-1]
        assert out[-1] == EOS or len(out) == LENGTH
        lengths.add(len(out))
    assert len(lengths) > 1
