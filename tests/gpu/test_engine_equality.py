"""The signature on a GPU: tokens never depend on drafter, tree, batch or layout. Some of the cases run on CPU as well.

In fp32 tokens are equal. In bf16 a row's bits may depend on how many rows the kernel had, so texts may part where the
two best tokens are next to equal, and nowhere else (algorithms.md J3).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from _pytest.mark import ParameterSet
from tokenizers import Tokenizer

from benchmarks.speculation.drafter_specs import DraftRun, Target
from benchmarks.speculation.synthetic import Rates, SyntheticDrafts
from kv_transfer.transports.loopback import loopback_pair
from paceline.engine.colocated import Completed
from paceline.request import SamplingParams, SequenceRequest
from paceline.spec_decode.heads.shipped import shipped_heads
from tests.support.device_runner import (
    DEVICES,
    GPU,
    NARROW,
    SMOLLM2_VARIABLE,
    WIDE,
    answers,
    device_runner,
    mixed_requests,
    smollm2_folder,
    texts,
    with_heads,
    write_heads,
)
from tests.support.tiny_model import tiny_request
from tests.support.two_engines import Decode, Prefill, apart

DRAFTERS: dict[str, dict[str, object]] = {
    "ngram": {"drafter": "ngram"},
    "suffix": {"drafter": "suffix", "num_draft_tokens": 8},
    "trie static": {"drafter": "trie", "num_draft_tokens": 6, "tree": "static", "tree_nodes": 12},
    "lookahead": {"drafter": "lookahead", "num_draft_tokens": 9, "tree": "static", "tree_nodes": 55},
    "mtp": {"drafter": "mtp"},
    "mtp static": {"drafter": "mtp", "tree": "static", "tree_width": 3},
    "mtp dynamic": {"drafter": "mtp", "tree": "dynamic", "tree_width": 3},
    "mtp x3 static": {"drafter": "mtp", "mtp_modules": 3, "num_draft_tokens": 3, "tree": "static", "tree_width": 2},
    "eagle": {"drafter": "eagle"},
    "eagle dynamic": {"drafter": "eagle", "tree": "dynamic", "tree_width": 3},
    "eagle3": {"drafter": "eagle3"},
    "eagle3 static": {"drafter": "eagle3", "tree": "static", "tree_width": 6, "tree_nodes": 24},
    "eagle3 dynamic": {"drafter": "eagle3", "tree": "dynamic", "tree_width": 3},
    "medusa static": {"drafter": "medusa", "num_draft_tokens": 3, "tree": "static"},
    "draft model": {"drafter": "draft_model"},
}
ON_A_CPU = ("ngram", "mtp x3 static", "eagle3 dynamic", "medusa static")  # test_exactness_tiny.py has the others
WIDE_DRAFTERS = ("ngram", "mtp static", "mtp dynamic", "eagle3", "eagle3 static", "eagle3 dynamic")
NODES = ("ngram", "mtp", "mtp x3 static", "eagle3", "eagle3 dynamic", "medusa static")
BF16_MARGIN = 0.15  # log-probability between the two best tokens
REAL = {
    "ngram": DraftRun("ngram", "ngram"),
    "ngram tree": DraftRun("ngram tree", "ngram", (("tree", "static"), ("tree_width", "3"))),
    "mtp static": DraftRun("mtp static", "mtp", (("tree", "static"), ("tree_width", "3"))),
    "eagle3": DraftRun("eagle3", "eagle3"),
    "eagle3 static": DraftRun("eagle3 static", "eagle3", (("tree", "static"), ("tree_width", "6"))),
    "eagle3 dynamic": DraftRun("eagle3 dynamic", "eagle3", (("tree", "dynamic"), ("tree_width", "3"))),
}


def on_devices(cases: Iterable[str]) -> list[ParameterSet]:
    """Devices and cases: all on a GPU."""
    on_a_cpu = [pytest.param("cpu", case) for case in cases if case in ON_A_CPU]
    return [*on_a_cpu, *(pytest.param("cuda", case, marks=GPU) for case in cases)]


@pytest.fixture(scope="module", params=[NARROW, WIDE])
def geometry(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: write_heads(tmp_path_factory.mktemp(kind), kind) for kind in (NARROW, WIDE)}


@pytest.fixture(scope="module", autouse=True)
def models_are_given_back() -> Iterator[None]:
    yield
    for kept in (plain, real_target, real_plain):
        kept.cache_clear()


@lru_cache
def plain(device: str, geometry: str, dtype: str = "fp32") -> list[Completed]:
    return answers(
        device_runner(device, geometry, dtype, drafter="none", prefix_cache=False), mixed_requests(), batch=1
    )


@pytest.mark.parametrize(("device", "case"), on_devices(DRAFTERS))
def test_drafts_change_no_token(device: str, case: str, heads: dict[str, Path]) -> None:
    runner = device_runner(device, NARROW, **with_heads(DRAFTERS[case], heads[NARROW]))
    done = answers(runner, mixed_requests())
    assert texts(done) == texts(plain(device, NARROW))
    assert sum(each.stats.draft_tokens for each in done) > 0


@pytest.mark.parametrize(("device", "case"), on_devices(WIDE_DRAFTERS))
def test_drafts_change_no_token_where_heads_are_wide(device: str, case: str, heads: dict[str, Path]) -> None:
    runner = device_runner(device, WIDE, **with_heads(DRAFTERS[case], heads[WIDE]))
    assert texts(answers(runner, mixed_requests())) == texts(plain(device, WIDE))


@pytest.mark.parametrize("device", DEVICES)
def test_batch_and_device_change_no_token(device: str, geometry: str) -> None:
    runner = device_runner(device, geometry, drafter="none")
    assert texts(answers(runner, mixed_requests(), batch=6)) == texts(plain(device, geometry))
    assert texts(plain(device, geometry)) == texts(plain("cpu", geometry))


@pytest.mark.parametrize("device", DEVICES)
def test_rounds_that_accept_and_refuse_change_no_token(device: str, heads: dict[str, Path]) -> None:
    """Untrained heads are hardly ever right; here they are, as often as a table says."""
    runner = device_runner(device, WIDE, **with_heads(DRAFTERS["eagle3"], heads[WIDE]))
    known = {r.request_id: d.token_ids for r, d in zip(mixed_requests(), plain(device, WIDE), strict=True)}
    drafts = SyntheticDrafts(runner.drafter, known, Rates((0.8, 0.7, 0.6, 0.5)), 3, runner.vocab_size)
    done = answers(runner, mixed_requests())
    assert texts(done) == texts(plain(device, WIDE))
    assert drafts.exchanged > 0
    accepted = [count for each in done for count in each.stats.accepted_per_round]
    assert 0 in accepted
    assert max(accepted) >= 3


@pytest.mark.parametrize(("device", "case"), on_devices(WIDE_DRAFTERS))
def test_bf16_parts_only_where_the_best_two_are_equal(device: str, case: str, heads: dict[str, Path]) -> None:
    asked = [tiny_request(index=i, max_tokens=20, top_logprobs=2) for i in range(4)]
    expected = answers(device_runner(device, WIDE, "bf16", drafter="none"), asked, batch=1)
    runner = device_runner(device, WIDE, "bf16", **with_heads(DRAFTERS[case], heads[WIDE]))
    for got, one in zip(answers(runner, asked), expected, strict=True):
        pairs = enumerate(zip(got.token_ids, one.token_ids, strict=True))
        parted = next((i for i, (a, b) in pairs if a != b), None)
        if parted is not None:
            assert not runner.bit_exact
            best = one.logprobs[parted].top_logprobs
            assert best[0] - best[1] < BF16_MARGIN


# ---- prefill and decode apart


@pytest.mark.parametrize("mode", ["draft_kv", "hidden_states"])
@pytest.mark.parametrize(("device", "case"), on_devices(NODES))
def test_apart_equals_together(device: str, case: str, mode: str, heads: dict[str, Path]) -> None:
    options = with_heads(DRAFTERS[case], heads[NARROW]) | {"handoff": mode}
    decode = Decode(device_runner(device, NARROW, page_size=8, **options))
    ends = loopback_pair()
    place = torch.device(device)
    receiver = decode.attach(ends[1], lambda ack: prefill.sender.acknowledge(ack), "loopback", place)
    prefill = Prefill(device_runner(device, NARROW, page_size=16, **options), ends[0], receiver.feed, place)
    try:
        assert apart(prefill, decode, mixed_requests()) == texts(plain(device, NARROW))
        assert len(decode.landed) == len(mixed_requests())
        if mode == "draft_kv":  # else the draft rows are computed where they are needed
            assert decode.landed == prefill.sent
    finally:
        prefill.close()
        decode.close()


# ---- the real model


@lru_cache
def real_target(device: str) -> Target:
    folder = smollm2_folder()
    if folder is None:
        pytest.skip(f"needs SmolLM2 (its folder in {SMOLLM2_VARIABLE})")
    return Target.load(folder, "smollm2-135m-instruct", dtype="fp32", device=device, threads=1)


def real_requests(device: str) -> list[SequenceRequest]:
    folder = smollm2_folder()
    assert folder is not None
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    questions = (
        "one two three four one two three",
        "The capital of France is",
        "Write a list of three fruits:",
        "def f(x):",
    )
    num, length = (4, 32) if device == "cuda" else (2, 6)
    return [
        SequenceRequest(
            f"q{i}",
            tuple(tokenizer.encode(text, add_special_tokens=False).ids),
            SamplingParams(temperature=float(i % 2), seed=40 + i, max_tokens=length),
        )
        for i, text in enumerate(questions[:num])
    ]


@lru_cache
def real_plain(device: str) -> list[list[int]]:
    runner = real_target(device).runner(DraftRun("none", "none"), batch=1, sequence_tokens=64)
    return texts(answers(runner, real_requests(device), batch=1))


@pytest.mark.real_model
@pytest.mark.parametrize(("device", "case"), on_devices(REAL))
def test_the_real_model(device: str, case: str) -> None:
    run = REAL[case]
    if run.drafter == "eagle3" and shipped_heads("smollm2-135m-instruct", "eagle3") is None:
        pytest.skip("no EAGLE-3 heads ship beside the packages")
    runner = real_target(device).runner(run, batch=4, sequence_tokens=64)
    assert texts(answers(runner, real_requests(device))) == real_plain(device)
