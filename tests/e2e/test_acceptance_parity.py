"""Rounds apart equal rounds together: every drafter, every mode of hand-off, prompts of 16 to 1,000 tokens.

Round by round: the drafted tree, how much of it was accepted, the tokens and their logit bits. Lengths lie at and
beside borders of pages (64 on the prefill node, 16 on the decode node) and of the chunks of 256 tokens.
Shipped heads follow 2,000 tokens of the real model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from paceline.assembly.build import assemble, build_runner
from paceline.config import NodeConfig
from paceline.engine.model_runner import ModelRunner, RunnerIdentity
from paceline.models.llama import LlamaModel
from paceline.request import SamplingParams, SequenceRequest
from paceline.spec_decode.drafters.draft_model import CATCH_UP_ROWS
from tests.support.exactness import run
from tests.support.needs import needs_kernels
from tests.support.node_pair import pair
from tests.support.prompts import prompt_requests
from tests.support.related_heads import MAX_LEN, kindred_target, write_kindred
from tests.support.round_log import RoundLog, Rounds, differing
from tests.support.tiny_model import VOCAB

LENGTHS = (16, 17, 63, 64, 65, 250)
ASKED = (*((length, t) for length in LENGTHS for t in (0.0, 1.0)), (1000, 1.0), (520, 0.0))  # tokens, temperature
CHUNK = 256
BUSY = 8  # requests in flight, of 14
CASES: dict[str, dict[str, object]] = {
    "ngram": {"drafter": "ngram", "num_draft_tokens": 8},
    "suffix": {"drafter": "suffix", "num_draft_tokens": 8},
    "trie": {"drafter": "trie", "tree": "static", "tree_width": 2},
    "lookahead": {"drafter": "lookahead", "tree": "static", "num_draft_tokens": 9, "tree_nodes": 55},
    "medusa": {"drafter": "medusa", "tree": "static", "tree_width": 2},
    "eagle": {"drafter": "eagle", "num_draft_tokens": 4},
    "eagle3": {"drafter": "eagle3", "num_draft_tokens": 4, "tree": "dynamic", "tree_width": 2, "tree_nodes": 8},
    "mtp": {"drafter": "mtp", "num_draft_tokens": 4},
    "mtp x3": {"drafter": "mtp", "mtp_modules": 3},
    "draft_model": {"drafter": "draft_model"},
}
WEIGHTLESS = ("ngram", "suffix", "trie", "lookahead")
BEHIND = ("eagle", "eagle3", "mtp", "mtp x3")  # draft rows of their own, made of the target's hidden rows
MODES: dict[str, dict[str, object]] = {
    "draft_kv": {"handoff": "draft_kv"},
    "hidden_states": {"handoff": "hidden_states"},
    "raw rows": {"handoff": "hidden_states", "handoff_rows": "raw"},
    "none": {"handoff": "none"},
}
Together = Callable[[str], dict[str, Rounds]]


@pytest.fixture(scope="module")
def target() -> LlamaModel:
    return kindred_target()


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kindred")
    for name in (*BEHIND, "medusa", "draft_model"):
        write_kindred(folder / name, name)
    return folder


@pytest.fixture(scope="module")
def together(target: LlamaModel, heads: Path) -> Together:
    """The one-process run of a case, once for all modes."""

    @cache
    def rounds_of(case: str) -> dict[str, Rounds]:
        torch.set_num_threads(1)
        runner = runner_of(target, config_of(case, heads))
        log = RoundLog(runner)
        return log.rounds(requests(), run(runner, requests(), batch=BUSY, chunk_tokens=CHUNK))

    return rounds_of


def config_of(case: str, heads: Path, **options: object) -> NodeConfig:
    """No prefix cache: every row of every prompt crosses."""
    shared: dict[str, object] = {
        "model": "kindred",
        "dtype": "bf16",
        "kv_cache_tokens": 10240,
        "max_model_len": MAX_LEN - 64,
        "num_draft_tokens": 3,
        "prefix_cache": False,
        "prefill_chunk_tokens": CHUNK,
        "max_running": BUSY,
    }
    path = {} if case in WEIGHTLESS else {"drafter_path": str(heads / case)}
    return NodeConfig.model_validate(shared | CASES[case] | path | options)


def runner_of(target: LlamaModel, config: NodeConfig, *, decodes: bool = True) -> ModelRunner:
    return assemble(config, target, RunnerIdentity("kindred", "seed-21", "test"), decodes=decodes)


def requests() -> list[SequenceRequest]:
    """As tenants of their own: what `suffix` learns of one must not reach another, since which of them ends first is
    left to the clock."""
    found = []
    for length, temperature in ASKED:
        name = f"{length} tokens, T={temperature:g}"
        params = SamplingParams(temperature=temperature, seed=length, max_tokens=32)
        found.append(SequenceRequest(name, tuple(prompt(length, int(temperature))), params, cache_salt=name))
    return found


def prompt(length: int, index: int) -> list[int]:
    """Runs of consecutive ids, two in five of them copied from before."""
    generator = torch.Generator().manual_seed(7 * length + index)
    ids: list[int] = []
    while len(ids) < length:
        at = int(torch.randint(3, VOCAB - 10, (1,), generator=generator))
        copied = torch.rand((), generator=generator) < 0.4 and len(ids) > 12
        ids += ids[at % (len(ids) - 6) :][:6] if copied else range(at, at + 5)
    return ids[:length]


async def apart(
    asked: list[SequenceRequest], config: NodeConfig, prefill: ModelRunner, decode: ModelRunner, concurrent: int = BUSY
) -> dict[str, Rounds]:
    log = RoundLog(decode)
    async with pair(config, prefill, decode) as nodes:
        answers = await nodes.run(asked, concurrent=concurrent)
        await nodes.all_released()
    return log.rounds(asked, [outcome for outcome, _ in answers])


async def handed_over(case: str, mode: str, target: LlamaModel, heads: Path) -> dict[str, Rounds]:
    config = config_of(case, heads, **MODES[mode])
    prefill = runner_of(target, config.model_copy(update={"page_size": 64}), decodes=False)
    return await apart(requests(), config, prefill, runner_of(target, config.model_copy(update={"page_size": 16})))


def accepted_at(rounds: dict[str, Rounds], temperature: str) -> list[int]:
    """Draft tokens accepted in each round at one temperature."""
    return [n for name, r in rounds.items() if name.endswith(temperature) for n in r.outcome.accepted_per_round]


@pytest.mark.parametrize("case", CASES)
async def test_together_drafts_are_right_and_wrong(case: str, together: Together) -> None:
    """What the comparisons below rest on: drafts of every drafter are accepted, refused, and cut in between."""
    rounds = together(case)
    for temperature in ("T=0", "T=1"):
        accepted = accepted_at(rounds, temperature)
        assert sum(accepted) >= 8
        assert 0 in accepted
        assert len(set(accepted)) >= 2
    if case not in WEIGHTLESS:
        assert all(r.accepted for r in rounds.values()), "each length says something of where its drafts came from"


@needs_kernels
@pytest.mark.parametrize(
    ("case", "mode"),
    [*((case, "draft_kv") for case in CASES), *((c, "hidden_states") for c in CASES if c not in WEIGHTLESS)],
)  # lookups have no state that crosses
async def test_rounds_equal_the_one_process_run(
    case: str, mode: str, target: LlamaModel, heads: Path, together: Together
) -> None:
    assert differing(together(case), await handed_over(case, mode, target, heads)) == []


@needs_kernels
async def test_raw_rows(target: LlamaModel, heads: Path, together: Together) -> None:
    """EAGLE-3 alone has rows that differ fused and raw."""
    assert differing(together("eagle3"), await handed_over("eagle3", "raw rows", target, heads)) == []


@needs_kernels
@pytest.mark.parametrize("case", ["suffix", "lookahead"])  # with and without a memory of other requests
async def test_without_state_lookups_have_the_same_rounds(
    case: str, target: LlamaModel, heads: Path, together: Together
) -> None:
    assert differing(together(case), await handed_over(case, "none", target, heads)) == []


@needs_kernels
@pytest.mark.parametrize("case", ["eagle3", "mtp x3"])
async def test_without_state_heads_give_way_to_ngram(
    case: str, target: LlamaModel, heads: Path, together: Together
) -> None:
    """The rounds are those of the n-gram drafter under this deployment's budget; the text is the drafter's own."""
    runner = runner_of(target, config_of(case, heads).model_copy(update={"drafter": "ngram", "drafter_path": ""}))
    log = RoundLog(runner)
    expected = log.rounds(requests(), run(runner, requests(), batch=BUSY, chunk_tokens=CHUNK))
    found = await handed_over(case, "none", target, heads)
    assert differing(expected, found) == []
    assert all(r.outcome.token_ids == together(case)[name].outcome.token_ids for name, r in found.items())
    assert sum(r.accepted for r in found.values()) > 0


async def test_without_state_medusa_is_back_after_a_round(target: LlamaModel, heads: Path, together: Together) -> None:
    """Its state is the last hidden row, which a round of n-grams brings as well as any other."""
    found = await handed_over("medusa", "none", target, heads)
    for name, rounds in found.items():
        assert [drafted.drafter for drafted in rounds.drafted[:2]] == ["ngram", "medusa"]
        same_from(1, together("medusa")[name], rounds)


async def test_without_state_a_draft_model_catches_up(target: LlamaModel, heads: Path, together: Together) -> None:
    """It needs tokens alone: a prompt that it reads in one round changes nothing; a longer one costs it rounds without
    a draft, and then it drafts what it drafts together at the same place of the text."""
    found = await handed_over("draft_model", "none", target, heads)
    expected = together("draft_model")
    short = [name for name in expected if int(name.split()[0]) < CATCH_UP_ROWS]
    assert differing({name: expected[name] for name in short}, found) == []
    for name in expected.keys() - set(short):
        drafted = [len(tree.token_ids) > 1 for tree in found[name].drafted]
        silent = drafted.index(True)
        assert 1 <= silent <= int(name.split()[0]) // CATCH_UP_ROWS
        same_from(silent, expected[name], found[name])


def same_from(start: int, together: Rounds, apart: Rounds) -> None:
    """The text is the same, and so are the trees from round ``start`` on where both runs have a round at one place."""
    assert apart.outcome.token_ids == together.outcome.token_ids
    theirs, ours = dict(list(apart.by_place().items())[start:]), together.by_place()
    both = theirs.keys() & ours.keys()
    assert len(both) >= 2
    assert {place: theirs[place] for place in both} == {place: ours[place] for place in both}
    assert apart.accepted > 0


@needs_kernels
@pytest.mark.real_model
@pytest.mark.timeout(600)
async def test_shipped_heads_after_2000_tokens(smollm2_folder: Path) -> None:
    """EAGLE-3 on the real model. The runs in one process come last, from the pages that the prefill node computed."""
    config = real_config(smollm2_folder)
    asked = long_requests(smollm2_folder)
    prefill = build_runner(config)
    assert prefill.drafter.name == "eagle3"

    def beside(config: NodeConfig, *, decodes: bool = True) -> ModelRunner:
        return assemble(config, prefill.model, prefill.identity, decodes=decodes)

    decode = config.model_copy(update={"page_size": 16})
    found = {"draft_kv": await apart(asked, config, prefill, beside(decode), concurrent=1)}
    rows, digesting = (c.model_copy(update={"handoff": "hidden_states"}) for c in (config, decode))
    sender = beside(rows, decodes=False)
    found["hidden_states"] = await apart(asked, rows, sender, beside(digesting), concurrent=1)
    log = RoundLog(prefill)
    together = log.rounds(asked, run(prefill, asked, chunk_tokens=CHUNK))
    accepted = [n for rounds in together.values() for n in rounds.outcome.accepted_per_round]
    assert {0, 1} <= set(accepted)  # heads have learnt from half as long texts at most
    assert {mode: differing(together, rounds) for mode, rounds in found.items()} == {
        "draft_kv": [],
        "hidden_states": [],
    }


def real_config(folder: Path) -> NodeConfig:
    return NodeConfig.model_validate(
        {
            "model": str(folder),
            "dtype": "bf16",
            "drafter": "eagle3",
            "num_draft_tokens": 4,
            "kv_cache_tokens": 4096,
            "max_model_len": MAX_LEN,
            "page_size": 64,
            "prefill_chunk_tokens": CHUNK,
            "head_check": False,
        }
    )


def long_requests(folder: Path) -> list[SequenceRequest]:
    """Questions in a conversation of exactly 2,000 tokens, at temperature 0 and 1."""
    short = prompt_requests(folder, 64)
    tokens = [token for request in short[::2] for token in request.prompt_token_ids]
    ends = tuple(short[0].prompt_token_ids)
    prompt_ids = (*(tokens * 10)[: 2000 - len(ends)], *ends)
    return [replace(request, prompt_token_ids=prompt_ids) for request in short[:2]]
