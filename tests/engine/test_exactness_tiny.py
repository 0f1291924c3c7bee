"""The signature, on tiny models: tokens and logit bits never depend on drafter, tree, K, batch, chunk, page or cache.

The real model's version is tests/engine/test_exactness_real.py.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path

import pytest
import torch

from paceline.engine import tree_rows
from paceline.engine.model_runner import ModelRunner
from paceline.engine.tree_rows import row_context
from paceline.models.llama import LlamaModel
from paceline.request import SequenceRequest
from paceline.spec_decode.base import DraftBudget, Drafter, ExtendItem
from paceline.spec_decode.sequence import Sequence
from paceline.spec_decode.trees.tree import DraftTree, build_tree
from tests.support.asked import Asked
from tests.support.exactness import Outcome, run
from tests.support.needs import needs_kernels
from tests.support.tiny_model import VOCAB, tiny_request, tiny_runner
from tests.support.untrained_heads import write_tiny_head

DTYPES = ["bf16", "fp32"]
VARIANTS: dict[str, tuple[dict[str, object], dict[str, int]]] = {
    "ngram K=1": ({"drafter": "ngram", "num_draft_tokens": 1}, {}),
    "ngram K=8": ({"drafter": "ngram", "num_draft_tokens": 8}, {}),
    "ngram tree": ({"drafter": "ngram", "num_draft_tokens": 4, "tree": "static", "tree_width": 3}, {}),
    "mtp K=4": ({"drafter": "mtp", "num_draft_tokens": 4}, {}),
    "mtp tree": ({"drafter": "mtp", "num_draft_tokens": 4, "tree": "static", "tree_width": 3}, {}),
    "mtp x3": ({"drafter": "mtp", "mtp_modules": 3, "num_draft_tokens": 3}, {}),
    "mtp x3 tree": ({"drafter": "mtp", "mtp_modules": 3, "num_draft_tokens": 3, "tree": "static", "tree_width": 4}, {}),
    "suffix": ({"drafter": "suffix", "num_draft_tokens": 8}, {"batch": 3}),
    "trie tree": ({"drafter": "trie", "num_draft_tokens": 6, "tree": "static", "tree_nodes": 12}, {"batch": 2}),
    "lookahead": ({"drafter": "lookahead", "num_draft_tokens": 9, "tree": "static", "tree_nodes": 55}, {}),
    "mtp dynamic": ({"drafter": "mtp", "num_draft_tokens": 4, "tree": "dynamic", "tree_width": 3}, {"batch": 3}),
    "mtp greedy drafts": ({"drafter": "mtp", "draft_sampling": "greedy"}, {}),
    "mtp sampled drafts": ({"drafter": "mtp", "draft_sampling": "sampled"}, {}),
    "mtp window": ({"drafter": "mtp", "num_draft_tokens": 8, "adaptive": "window"}, {"batch": 4}),
    "mtp goodput": ({"drafter": "mtp", "num_draft_tokens": 8, "adaptive": "goodput"}, {"batch": 4}),
    "mtp unsure": ({"drafter": "mtp", "num_draft_tokens": 8, "min_confidence": 0.02}, {}),
    "auto": ({"drafter": "auto", "num_draft_tokens": 6}, {"batch": 4}),
    "several": ({"drafter": "mtp", "drafters": "ngram,suffix,none"}, {"batch": 8}),
    "eagle": ({"drafter": "eagle"}, {"batch": 3}),
    "eagle3": ({"drafter": "eagle3", "num_draft_tokens": 8}, {"batch": 3}),
    "eagle3 static": ({"drafter": "eagle3", "tree": "static", "tree_width": 6, "tree_nodes": 24}, {"chunk_tokens": 5}),
    "eagle3 dynamic": ({"drafter": "eagle3", "tree": "dynamic", "tree_width": 3, "page_size": 1}, {"batch": 8}),
    "medusa tree": ({"drafter": "medusa", "num_draft_tokens": 3, "tree": "static"}, {"batch": 3}),
    "draft model": ({"drafter": "draft_model", "num_draft_tokens": 5}, {"batch": 3}),
    "K=0": ({"drafter": "mtp", "num_draft_tokens": 0}, {}),
    "batch of 8": ({"drafter": "ngram"}, {"batch": 8}),
    "chunks of 1": ({"drafter": "mtp"}, {"chunk_tokens": 1}),
    "chunks of 7": ({"drafter": "mtp"}, {"chunk_tokens": 7}),
    "pages of 1": ({"drafter": "mtp", "page_size": 1, "tree": "static", "tree_width": 2}, {}),
    "pages of 64": ({"drafter": "ngram", "page_size": 64}, {"batch": 3}),
    "no prefix cache": ({"drafter": "mtp", "prefix_cache": False}, {}),
}


HEADS = ("eagle", "eagle3", "medusa", "draft_model")


def requests() -> list[SequenceRequest]:
    """Greedy, sampled, penalised, truncated, biased; short and long prompts."""
    extras: list[Asked] = [
        {},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.8, "presence_penalty": 0.5, "frequency_penalty": 0.3},
        {"temperature": 1.0, "top_k": 9, "repetition_penalty": 1.3},
        {"temperature": 1.2, "min_p": 0.02, "logit_bias": {5: 4.0, 9: -100.0}},
        {"frequency_penalty": 1.0},
        {"temperature": 1.0, "min_tokens": 10, "stop_token_ids": (5, 9, 11, 21, 33)},
        {"top_logprobs": 2},
    ]
    return [tiny_request(index=i, **extra) for i, extra in enumerate(extras)]


def outcomes(runner: ModelRunner, **how: int) -> list[Outcome]:
    return run(runner, requests(), **how)


@pytest.fixture(scope="module")
def plain() -> dict[str, list[Outcome]]:
    return {dtype: outcomes(tiny_runner(dtype, drafter="none", prefix_cache=False)) for dtype in DTYPES}


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Untrained heads of every kind, and a draft model."""
    folder = tmp_path_factory.mktemp("heads")
    for name in HEADS:
        write_tiny_head(folder / name, name)
    return folder


def differing(got: Seq[Outcome], expected: Seq[Outcome]) -> list[int]:
    pairs = enumerate(zip(got, expected, strict=True))
    return [i for i, (g, e) in pairs if (g.token_ids, g.logit_bits) != (e.token_ids, e.logit_bits)]


@needs_kernels
@pytest.mark.parametrize(
    ("variant", "dtype"), [*((name, "bf16") for name in VARIANTS), *((name, "fp32") for name in list(VARIANTS)[1::3])]
)
def test_tokens_and_logit_bits(variant: str, dtype: str, plain: dict[str, list[Outcome]], heads: Path) -> None:
    options, how = VARIANTS[variant]
    if dtype == "fp32":
        how = {"batch": 3} | how
    if options["drafter"] in HEADS:
        options = options | {"drafter_path": str(heads / str(options["drafter"]))}
    runner = tiny_runner(dtype, **options)
    assert runner.bit_exact
    assert differing(outcomes(runner, **how), plain[dtype]) == []
    again = outcomes(runner, **how | {"batch": 8})  # now from the prefix cache, where it is on, and side by side
    assert differing(again, plain[dtype]) == []


def test_drafts_are_accepted_and_refused(plain: dict[str, list[Outcome]]) -> None:
    """The comparison above means something only if rounds of both kinds occur."""
    rounds = [n for o in outcomes(tiny_runner("bf16", drafter="ngram")) for n in o.accepted_per_round]
    assert 0 in rounds
    assert max(rounds) >= 1


def test_rounds_do_not_depend_on_chunks_batch_or_cache() -> None:
    """Not only the text: which drafts are accepted is the same too."""
    expected = [o.accepted_per_round for o in outcomes(tiny_runner("bf16", drafter="mtp", prefix_cache=False))]
    for options, how in (({}, {"chunk_tokens": 3}), ({}, {"batch": 8}), ({"page_size": 1}, {"batch": 2})):
        runner = tiny_runner("bf16", drafter="mtp", **options)
        for _ in range(2):
            assert [o.accepted_per_round for o in outcomes(runner, **how)] == expected


def test_prefix_cache_is_hit() -> None:
    runner = tiny_runner("bf16", drafter="mtp", page_size=4)
    run(runner, requests())
    assert runner.prefix is not None
    before = runner.prefix.hit_tokens
    run(runner, requests())
    assert runner.prefix.hit_tokens > before


class Adversary(Drafter):
    """Drafts that no honest drafter would make (algorithms.md J4)."""

    name = "adversary"

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.generator = torch.Generator().manual_seed(3)

    def extend(self, items: Seq[ExtendItem]) -> None:
        """Keeps nothing."""

    def propose(self, seqs: Seq[Sequence], budgets: Seq[DraftBudget]) -> list[DraftTree]:
        """See the kinds."""
        return [self._tree(seq, budget) for seq, budget in zip(seqs, budgets, strict=True)]

    def _tree(self, seq: Sequence, budget: DraftBudget) -> DraftTree:
        last = seq.token_ids[-1]
        length = 50 if self.kind == "over-long" else budget.num_draft_tokens
        tokens = {
            "same": [last] * length,
            "end of sequence": [2] * length,
            "out of vocabulary": [VOCAB + 5, -1, 10**9, 3][:length],
            "empty": [],
        }.get(self.kind) or torch.randint(0, VOCAB, (length,), generator=self.generator).tolist()
        if self.kind == "empty":
            tokens = []
        pairs = [(i - 1, token) for i, token in enumerate(tokens)]
        return build_tree(last, pairs, VOCAB, budget.max_nodes, budget.num_draft_tokens)


@needs_kernels
@pytest.mark.parametrize("kind", ["same", "end of sequence", "out of vocabulary", "empty", "over-long", "random"])
def test_adversarial_drafts_change_nothing(kind: str, plain: dict[str, list[Outcome]]) -> None:
    runner = tiny_runner("bf16", drafter="none", num_draft_tokens=4)
    runner.drafter = Adversary(kind)
    assert differing(outcomes(runner, batch=4), plain["bf16"]) == []


@needs_kernels
def test_resumed_requests_continue_the_same_text(plain: dict[str, list[Outcome]]) -> None:
    """Migration: prompt and emitted tokens replayed elsewhere give the rest of the text, penalties included."""
    runner = tiny_runner("bf16", drafter="mtp")
    for request, whole in zip(requests(), plain["bf16"], strict=True):
        for cut in (1, 5, len(whole.token_ids) - 1):
            if not 0 < cut < len(whole.token_ids):
                continue
            resumed = SequenceRequest(
                f"{request.request_id}/{cut}", request.prompt_token_ids, request.params, whole.token_ids[:cut]
            )
            rest = run(runner, [resumed])[0]
            assert rest.token_ids == whole.token_ids[cut:]
            assert rest.logit_bits == whole.logit_bits[cut:]


def mutant(runner: ModelRunner, plain: list[Outcome]) -> bool:
    """Whether the comparison notices the change made to ``runner``."""
    try:
        return differing(outcomes(runner, batch=2), plain) != []
    except (AssertionError, KeyError, RuntimeError):
        return True


def test_mutants_are_noticed(plain: dict[str, list[Outcome]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Compaction left out; tree rows that see their siblings."""
    tree = {"drafter": "mtp", "num_draft_tokens": 3, "tree": "static", "tree_width": 6}

    runner = tiny_runner("bf16", **tree)
    make_useful(runner)
    monkeypatch.setattr(runner.kv, "copy_slots", lambda *_: None)
    assert mutant(runner, plain["bf16"])

    runner = tiny_runner("bf16", **tree)
    monkeypatch.setattr(DraftTree, "is_chain", property(lambda self: True))
    assert mutant(runner, plain["bf16"])
    monkeypatch.undo()


def repeating_runner(drafter: Drafter | None) -> ModelRunner:
    """A target that likes to repeat its last token, so that penalties along a draft path decide."""
    runner = tiny_runner("bf16", drafter="none", num_draft_tokens=4)
    assert isinstance(runner.model, LlamaModel)
    for layer in runner.model.layers:
        layer.o_proj._packed.zero_()
        layer.down_proj._packed.zero_()
    runner.drafter = drafter or runner.drafter
    return runner


def test_penalties_that_ignore_the_path_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """B4: node x needs the history of its own path."""
    penalised = [tiny_request(index=i, frequency_penalty=1.7, temperature=i % 2) for i in range(4)]
    expected = run(repeating_runner(None), penalised)
    assert run(repeating_runner(Adversary("same")), penalised)[0].accepted_per_round != expected[0].accepted_per_round
    assert differing(run(repeating_runner(Adversary("same")), penalised), expected) == []
    monkeypatch.setattr(tree_rows, "row_context", lambda seq, path, position: row_context(seq, (), position))
    assert differing(run(repeating_runner(Adversary("same")), penalised), expected) != []


def make_useful(runner: ModelRunner) -> None:
    """Proposals that hold the right token second, so that trees are accepted off the spine."""
    propose = runner.drafter.propose

    def with_answers(seqs: Seq[Sequence], budgets: Seq[DraftBudget]) -> list[DraftTree]:
        known = dict(zip((r.prompt_token_ids for r in requests()), ANSWERS, strict=True))
        trees = []
        for seq, budget, tree in zip(seqs, budgets, propose(seqs, budgets), strict=True):
            answer = known[seq.request.prompt_token_ids][seq.num_output :]
            pairs = [(-1, 3), *((i - 1 if i > 1 else -1, t) for i, t in enumerate(answer[:2], start=1))]
            trees.append(build_tree(tree.token_ids[0], pairs, VOCAB, budget.max_nodes, budget.num_draft_tokens))
        return trees

    ANSWERS = [o.token_ids for o in outcomes(tiny_runner("bf16", drafter="none"))]
    runner.drafter.propose = with_answers  # type: ignore[method-assign]


@needs_kernels
def test_off_spine_acceptance_is_compacted(plain: dict[str, list[Outcome]]) -> None:
    """The same useful trees without the mutation: accepted off the spine, compacted, and exact."""
    runner = tiny_runner("bf16", drafter="mtp", num_draft_tokens=3, tree="static", tree_width=6)
    make_useful(runner)
    got = outcomes(runner, batch=2)
    assert differing(got, plain["bf16"]) == []
    assert max(n for o in got for n in o.accepted_per_round) >= 2
