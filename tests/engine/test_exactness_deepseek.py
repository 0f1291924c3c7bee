"""The signature on a tiny DeepSeek-V3: latent attention, experts and MTP modules of the same kind change no bit."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from paceline.engine.fingerprint import fingerprint_of
from paceline.engine.model_runner import ModelRunner
from paceline.kvcache.layout import LayerOwner
from paceline.models.moe import MoeMlp
from paceline.request import SequenceRequest
from paceline.spec_decode.base import DraftBudget, Drafter, ExtendItem
from paceline.spec_decode.sequence import Sequence
from paceline.spec_decode.trees.tree import DraftTree, build_tree
from tests.support.asked import Sampling
from tests.support.exactness import Outcome, run
from tests.support.needs import needs_kernels
from tests.support.tiny_deepseek import tiny_deepseek_runner, write_mtp_folder
from tests.support.tiny_model import VOCAB, tiny_request

pytestmark = needs_kernels

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
VARIANTS: dict[str, tuple[dict[str, object], dict[str, int]]] = {
    "ngram K=4": ({"drafter": "ngram", "num_draft_tokens": 4}, {}),
    "ngram tree": ({"drafter": "ngram", "num_draft_tokens": 4, "tree": "static", "tree_width": 3}, {"batch": 3}),
    "mtp x1, reused": ({"drafter": "mtp", "mtp_modules": 1, "num_draft_tokens": 3}, {}),
    "mtp x1, tree": (
        {"drafter": "mtp", "mtp_modules": 1, "num_draft_tokens": 3, "tree": "static", "tree_width": 3},
        {"batch": 2},
    ),
    "mtp x2": ({"drafter": "mtp", "mtp_modules": 2, "num_draft_tokens": 2}, {"chunk_tokens": 5}),
    "mtp x2, tree": (
        {"drafter": "mtp", "mtp_modules": 2, "num_draft_tokens": 2, "tree": "static", "tree_width": 3},
        {},
    ),
    "batch of 6": ({"drafter": "none"}, {"batch": 6}),
    "chunks of 1": ({"drafter": "none"}, {"chunk_tokens": 1}),
    "chunks of 7, pages of 1": ({"drafter": "none", "page_size": 1}, {"chunk_tokens": 7}),
    "pages of 64": ({"drafter": "ngram", "page_size": 64}, {"batch": 3}),
}


def requests() -> list[SequenceRequest]:
    extras: list[Sampling] = [
        {},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.8, "presence_penalty": 0.5},
        {},
        {"temperature": 1.0, "top_k": 9},
        {"top_logprobs": 2},
    ]
    return [tiny_request(index=i, max_tokens=16, **extra) for i, extra in enumerate(extras)]


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Path]:
    """Folders of MTP modules by dtype and count."""
    root = tmp_path_factory.mktemp("heads")
    cases = [(dtype, count) for dtype in DTYPES for count in (1, 2)]
    return {(d, n): write_mtp_folder(root / f"{d}-{n}", n, DTYPES[d]) for d, n in cases}


@pytest.fixture(scope="module")
def plain() -> dict[str, list[Outcome]]:
    return {d: run(tiny_deepseek_runner(d, drafter="none", prefix_cache=False), requests()) for d in DTYPES}


def runner_of(dtype: str, options: dict[str, object], heads: dict[tuple[str, int], Path]) -> ModelRunner:
    if options["drafter"] == "mtp":
        options = options | {"drafter_path": str(heads[dtype, int(str(options["mtp_modules"]))])}
    return tiny_deepseek_runner(dtype, **options)


def differing(got: Seq[Outcome], expected: Seq[Outcome]) -> list[int]:
    pairs = enumerate(zip(got, expected, strict=True))
    return [i for i, (g, e) in pairs if (g.token_ids, g.logit_bits) != (e.token_ids, e.logit_bits)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_tokens_and_logit_bits(
    dtype: str, variant: str, plain: dict[str, list[Outcome]], heads: dict[tuple[str, int], Path]
) -> None:
    options, how = VARIANTS[variant]
    runner = runner_of(dtype, options, heads)
    assert runner.bit_exact
    assert differing(run(runner, requests(), **how), plain[dtype]) == []
    again = run(runner, requests(), **how)  # now from the prefix cache
    assert differing(again, plain[dtype]) == []


def test_drafts_are_accepted_and_refused() -> None:
    """The comparison above means something only if rounds of both kinds occur."""
    outcomes = run(
        tiny_deepseek_runner("bf16", drafter="ngram", num_draft_tokens=4, tree="static", tree_width=3), requests()
    )
    rounds = [n for o in outcomes for n in o.accepted_per_round]
    assert 0 in rounds
    assert max(rounds) >= 1


class Oracle(Drafter):
    """Knows the answers and puts each right token second, so that paths off the spine are accepted and compacted."""

    name = "oracle"

    def __init__(self, answers: Seq[Outcome]) -> None:
        self.known = dict(zip((r.prompt_token_ids for r in requests()), (o.token_ids for o in answers), strict=True))

    def extend(self, items: Seq[ExtendItem]) -> None:
        """Keeps nothing."""

    def propose(self, seqs: Seq[Sequence], budgets: Seq[DraftBudget]) -> list[DraftTree]:
        """A wrong child of the root, then the right path of two."""
        trees = []
        for seq, budget in zip(seqs, budgets, strict=True):
            right = self.known[seq.request.prompt_token_ids][seq.num_output :][:2]
            pairs = [(-1, 3), *((i if i else -1, token) for i, token in enumerate(right))]
            trees.append(build_tree(seq.token_ids[-1], pairs, VOCAB, budget.max_nodes, budget.num_draft_tokens))
        return trees


def oracle_runner(dtype: str, answers: Seq[Outcome]) -> ModelRunner:
    runner = tiny_deepseek_runner(
        dtype, drafter="none", num_draft_tokens=3, tree="static", tree_width=4, prefix_cache=False
    )
    runner.drafter = Oracle(answers)
    return runner


@pytest.mark.parametrize("dtype", DTYPES)
def test_accepted_branches_are_compacted(dtype: str, plain: dict[str, list[Outcome]]) -> None:
    got = run(oracle_runner(dtype, plain[dtype]), requests(), batch=2)
    assert differing(got, plain[dtype]) == []
    assert max(n for o in got for n in o.accepted_per_round) == 2


def test_compaction_left_out_is_noticed(plain: dict[str, list[Outcome]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: latent rows of the accepted branch stay where the tree wrote them."""
    runner = oracle_runner("bf16", plain["bf16"])
    monkeypatch.setattr(runner.kv, "copy_slots", lambda *_: None)
    assert differing(run(runner, requests(), batch=2), plain["bf16"]) != []


def test_mtp_modules_have_latent_layers(heads: dict[tuple[str, int], Path]) -> None:
    runner = runner_of("bf16", {"drafter": "mtp", "mtp_modules": 2}, heads)
    layout = runner.kv.layout
    assert layout.text() == "bfloat16 target:mla:1x64*3 draft:mla:1x64*2"
    assert layout.token_bytes(LayerOwner.DRAFT) == 2 * 64 * 2
    assert fingerprint_of(runner).drafter_modules == 2


class TorchExperts(MoeMlp):
    """Mutant: a product by torch among the experts', whose bits depend on the number of rows."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        mix = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
        return super().__call__(x) + F.linear(x.float(), mix).to(x.dtype)


def test_a_layer_that_depends_on_its_neighbours_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The self-check at start sees it, and so does the comparison of bits."""
    monkeypatch.setattr("paceline.models.deepseek_v3.MoeMlp", TorchExperts)
    runner = tiny_deepseek_runner("fp32", drafter="none", prefix_cache=False)
    assert not runner.bit_exact
    whole = run(runner, requests())
    assert differing(run(runner, requests(), batch=6, chunk_tokens=3), whole) != []
