"""A model with a sliding window: drafters, chunks, prefix cache and hand-off change no bit of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline.assembly.build import assemble
from paceline.engine.model_runner import ModelRunner, RunnerIdentity
from paceline.models.llama import LlamaModel
from paceline.request import SequenceRequest
from tests.support.exactness import Outcome, run
from tests.support.needs import needs_kernels
from tests.support.node_pair import pair
from tests.support.tiny_model import tiny_config, tiny_request, tiny_runner, tiny_spec, tiny_weights
from tests.support.untrained_heads import write_tiny_head

pytestmark = needs_kernels

WINDOWS = (7, 0)  # shorter than the prompts, and than the trees are deep with what they continue
VARIANTS: dict[str, tuple[dict[str, object], dict[str, int]]] = {
    "ngram": ({"drafter": "ngram", "num_draft_tokens": 8}, {"chunk_tokens": 5}),
    "ngram tree": ({"drafter": "ngram", "num_draft_tokens": 4, "tree": "static", "tree_width": 3}, {"batch": 4}),
    "suffix": ({"drafter": "suffix", "num_draft_tokens": 8}, {"batch": 3}),
    "trie tree": ({"drafter": "trie", "num_draft_tokens": 6, "tree": "static", "tree_nodes": 12}, {"batch": 2}),
    "lookahead": ({"drafter": "lookahead", "num_draft_tokens": 9, "tree": "static", "tree_nodes": 55}, {}),
    "mtp": ({"drafter": "mtp", "num_draft_tokens": 4}, {"chunk_tokens": 7}),
    "mtp dynamic": ({"drafter": "mtp", "num_draft_tokens": 4, "tree": "dynamic", "tree_width": 3}, {"batch": 3}),
    "mtp x3": ({"drafter": "mtp", "mtp_modules": 3, "num_draft_tokens": 3, "tree": "static"}, {}),
    "eagle": ({"drafter": "eagle"}, {"batch": 3}),
    "eagle3 dynamic": ({"drafter": "eagle3", "tree": "dynamic", "tree_width": 3}, {"batch": 4}),
    "medusa tree": ({"drafter": "medusa", "num_draft_tokens": 3, "tree": "static"}, {"batch": 3}),
    "draft model": ({"drafter": "draft_model", "num_draft_tokens": 5}, {"batch": 3}),
}
HEADS = ("eagle", "eagle3", "medusa", "draft_model")


def windowed(options: Mapping[str, object], *, decodes: bool = True) -> ModelRunner:
    """A runner over the tiny model, whose first layer slides; pages of 4, so that the cache holds prompts."""
    config = tiny_config("bf16", {"page_size": 4} | dict(options))
    spec = replace(tiny_spec(), windows=WINDOWS)
    model = LlamaModel(spec, tiny_weights(spec, torch.bfloat16), torch.bfloat16, torch.device("cpu"))
    return assemble(config, model, RunnerIdentity("tiny", "windowed", "test"), decodes=decodes)


def requests() -> list[SequenceRequest]:
    return [tiny_request(index=i, temperature=0.7 * (i % 2)) for i in range(4)]


def same(got: list[Outcome], expected: list[Outcome]) -> list[bool]:
    pairs = zip(got, expected, strict=True)
    return [(g.token_ids, g.logit_bits) == (e.token_ids, e.logit_bits) for g, e in pairs]


@pytest.fixture(scope="module")
def plain() -> list[Outcome]:
    return run(windowed({"drafter": "none", "prefix_cache": False}), requests())


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("heads")
    for name in HEADS:
        write_tiny_head(folder / name, name)
    return folder


def test_the_window_counts(plain: list[Outcome]) -> None:
    everything = run(tiny_runner("bf16", drafter="none", prefix_cache=False), requests())
    assert not any(same(plain, everything))


@pytest.mark.parametrize("variant", VARIANTS)
def test_drafters_and_the_prefix_cache_change_nothing(variant: str, plain: list[Outcome], heads: Path) -> None:
    options, how = VARIANTS[variant]
    if options["drafter"] in HEADS:
        options = options | {"drafter_path": str(heads / str(options["drafter"]))}
    runner = windowed(options)
    assert runner.bit_exact
    assert same(run(runner, requests(), **how), plain) == [True] * 4
    assert runner.prefix is not None
    before = runner.prefix.hit_tokens
    assert same(run(runner, requests(), batch=4), plain) == [True] * 4  # now from the cache, side by side
    assert runner.prefix.hit_tokens > before


@pytest.mark.parametrize("handoff", ["draft_kv", "hidden_states"])
async def test_apart_as_together(handoff: str, plain: list[Outcome]) -> None:
    options = {"drafter": "mtp", "num_draft_tokens": 3, "handoff": handoff, "prefill_chunk_tokens": 5}
    config = tiny_config("bf16", {"page_size": 4} | options)
    async with pair(config, windowed(options, decodes=False), windowed(options)) as nodes:
        answers = await nodes.run(requests(), concurrent=2)
        await nodes.all_released()
    assert same([outcome for outcome, _ in answers], plain) == [True] * 4
