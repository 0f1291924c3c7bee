"""The law of the rejection rules on their real path, by Monte Carlo (algorithms.md J2).

Drafts are drawn by ``candidates.choose``, the target's law comes from ``target_probs``, the coins are real. Two rounds
make two tokens, so the draft noise of the second position is used twice where the first round rejects. The rules are
plain Python: 3,000 generations in each of six cells of the table below, over 64 or 256 joint outcomes. A right rule
fails one with probability P_FAIL. Seeds are fixed: a pass stays a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import pytest
import torch

from paceline.request import SamplingParams
from paceline.sampling.probs import target_probs
from paceline.sampling.sampler import RowContext
from paceline.spec_decode.accept import coins as coins_module
from paceline.spec_decode.accept.acceptance import RULES, Verification
from paceline.spec_decode.accept.coins import Coins, CoinSource
from paceline.spec_decode.base import DraftSampling
from paceline.spec_decode.drafters.candidates import DRAFT_STREAM, choose
from paceline.spec_decode.trees.tree import DraftTree, build_tree, comb
from tests.support.goodness_of_fit import chi_square

GENERATIONS = 3_000
MUTANT_GENERATIONS = 4_000
OWN_STREAM_GENERATIONS = 10_000
ROOT_POSITION = 20
P_FAIL = 1e-4
ROOT = 0  # the last committed token of every generation


@dataclass
class World:
    """A target and a drafter whose logits depend on the token before; the drafter is the target, disturbed."""

    vocab_size: int
    params: SamplingParams
    disturbance: float = 1.0
    laws: dict[int, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.vocab_size)
        shape = (self.vocab_size, self.vocab_size)
        self.target = torch.randn(shape, generator=generator) * 1.5  # [previous token, V]
        self.drafter = self.target + torch.randn(shape, generator=generator) * self.disturbance
        for token in range(self.vocab_size):
            self.laws[token] = target_probs(self.target[token], RowContext(self.params, 0, (), (), ()))

    def joint(self) -> npt.NDArray[np.float64]:
        """The target's law of two tokens, [V, V]."""
        first = self.laws[ROOT].numpy()
        return np.stack([first[t] * self.laws[t].numpy() for t in range(self.vocab_size)])


@dataclass(frozen=True)
class Rows:
    """The target at the nodes of one tree; no history matters but the token before."""

    world: World
    tree: DraftTree

    def sample(self, node: int) -> int:
        raise AssertionError("the rejection rules do not use the target's noise")

    def probs(self, node: int) -> torch.Tensor:
        return self.world.laws[self.tree.token_ids[node]]


Draft = Callable[[torch.Tensor, Sequence[SamplingParams], int, int], tuple[torch.Tensor, torch.Tensor]]


def sampled(
    logits: torch.Tensor, params: Sequence[SamplingParams], position: int, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids [R, width], q [R, V]) as drafters draw them."""
    drawn = choose(logits, params, [position] * len(params), width, DraftSampling.SAMPLED, logits.shape[1])
    assert drawn.full is not None
    return drawn.ids, drawn.full


def drafted_trees(
    world: World, roots: Sequence[int], params: Sequence[SamplingParams], position: int, width: int, draft: Draft
) -> list[DraftTree]:
    """Trees of depth 2, ``width`` children after the root and after its first child: a comb, or a chain."""
    ids, q = draft(world.drafter[list(roots)], params, position + 1, width)
    ids2, q2 = draft(world.drafter[ids[:, 0]], params, position + 2, width)
    trees = []
    for row, (first, second) in enumerate(zip(ids.tolist(), ids2.tolist(), strict=True)):
        tree = build_tree(roots[row], comb([first, second]), world.vocab_size, 1 + 2 * width, 2)
        trees.append(replace(tree, draft_probs={0: q[row], 1: q2[row]}))
    return trees


@dataclass(frozen=True)
class Outcome:
    """What the generations gave."""

    counts: npt.NDArray[np.int64]  # [V, V] of their first two tokens
    accepted: float  # mean length of the first round's accepted path


def generate(
    rule: str,
    world: World,
    width: int,
    draft: Draft = sampled,
    coins_of: Callable[[int], CoinSource] = Coins,
    generations: int = GENERATIONS,
) -> Outcome:
    """Two tokens of each seed, in as many rounds as that takes."""
    params = [replace(world.params, seed=seed) for seed in range(generations)]
    texts: list[list[int]] = [[ROOT] for _ in params]
    lengths = []
    running = list(range(generations))
    while running:
        position = ROOT_POSITION + len(texts[running[0]]) - 1
        roots = [texts[i][-1] for i in running]
        trees = drafted_trees(world, roots, [params[i] for i in running], position, width, draft)
        for i, tree in zip(running, trees, strict=True):
            verdict = RULES[rule].function(
                Verification(tree, Rows(world, tree), coins_of(i), position, lambda _: False, 3)
            )
            texts[i] += verdict.committed(tree)
            lengths.append(len(verdict.path))
        running = [i for i in running if len(texts[i]) == 2]
    counts = np.zeros((world.vocab_size, world.vocab_size), dtype=np.int64)
    np.add.at(counts, ([text[1] for text in texts], [text[2] for text in texts]), 1)
    return Outcome(counts, float(np.mean(lengths[:generations])))


PARAMS = {
    "mild": SamplingParams(temperature=0.7, top_p=0.9),
    "plain": SamplingParams(),
    "cut": SamplingParams(top_k=5, top_p=0.95, min_p=0.02),
}


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize(("rule", "width"), [("rejection", 1), ("recursive", 3)])
def test_generations_follow_the_target(rule: str, width: int, params: str) -> None:
    world = World(16 if params == "plain" else 8, PARAMS[params])
    outcome = generate(rule, world, width)
    assert chi_square(outcome.counts, world.joint()) > P_FAIL
    assert 0.2 < outcome.accepted < 2.0  # drafts were taken, and refused


def test_a_drafter_equal_to_the_target_is_always_right() -> None:
    """p == q, the 0/0 of B1: every draft is accepted, and the law stays the target's."""
    world = World(8, SamplingParams(temperature=0.8), disturbance=0.0)
    outcome = generate("rejection", world, 1)
    assert outcome.accepted == 2.0
    assert chi_square(outcome.counts, world.joint()) > P_FAIL


# ---- mutants ------------------------------------------------------------------------------------------------------


def greedy(
    logits: torch.Tensor, params: Sequence[SamplingParams], position: int, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Greedy drafts that claim to be draws (B2)."""
    positions = [position] * len(params)
    best = choose(logits, params, positions, width, DraftSampling.GREEDY, logits.shape[1])
    return best.ids, sampled(logits, params, position, width)[1]


def at_another_temperature(
    logits: torch.Tensor, params: Sequence[SamplingParams], position: int, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Drawn at the request's temperature, q reported at a higher one."""
    ids, q = sampled(logits, params, position, width)
    return ids, torch.softmax(q.log() / 1.5, dim=1)


@dataclass(frozen=True)
class OnePosition:
    """Coins that forget the position."""

    seed: int

    def flip(self, probability: float, position: int, draw: int) -> bool:
        return Coins(self.seed).flip(probability, 0, draw)

    def pick(self, probs: torch.Tensor, position: int, draw: int) -> int:
        return Coins(self.seed).pick(probs, 0, draw)


def caught(
    rule: str,
    width: int,
    draft: Draft = sampled,
    coins_of: Callable[[int], CoinSource] = Coins,
    generations: int = MUTANT_GENERATIONS,
) -> bool:
    world = World(8, SamplingParams())
    outcome = generate(rule, world, width, draft, coins_of, generations)
    return chi_square(outcome.counts, world.joint()) < P_FAIL


@pytest.mark.parametrize(("rule", "width"), [("rejection", 1), ("recursive", 3)])
@pytest.mark.parametrize("draft", [greedy, at_another_temperature])
def test_drafts_that_are_no_draws_from_q_are_caught(rule: str, width: int, draft: Draft) -> None:
    assert caught(rule, width, draft)


def test_coins_that_forget_the_position_are_caught() -> None:
    assert caught("recursive", 3, coins_of=OnePosition)


def test_coins_of_the_drafts_own_stream_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coins_module, "COIN_STREAM", DRAFT_STREAM)
    assert caught("recursive", 3, generations=OWN_STREAM_GENERATIONS)
