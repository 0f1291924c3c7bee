"""What crosses besides target KV: hidden rows in place of draft KV, or nothing (algorithms.md H2, H4)."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from paceline.config import NodeConfig
from paceline.engine.model_runner import ModelRunner
from paceline.errors import PairingRefused
from paceline.kvcache.layout import LayerOwner
from paceline.request import SequenceRequest, SpeculationParams
from paceline.spec_decode.sequence import Sequence
from tests.support.asked import Asked
from tests.support.exactness import run
from tests.support.node_pair import pair
from tests.support.tiny_model import tiny_prefill_runner, tiny_request, tiny_runner
from tests.support.untrained_heads import write_tiny_head

HIDDEN = 64  # of the tiny target
CASES: dict[str, dict[str, object]] = {
    "mtp": {"drafter": "mtp", "num_draft_tokens": 3},
    "mtp x3": {"drafter": "mtp", "mtp_modules": 3, "num_draft_tokens": 3},
    "mtp sampled": {"drafter": "mtp", "num_draft_tokens": 3, "draft_sampling": "sampled"},
    "eagle": {"drafter": "eagle", "num_draft_tokens": 3},
    "eagle3": {"drafter": "eagle3", "num_draft_tokens": 4},
    "eagle3 raw": {"drafter": "eagle3", "num_draft_tokens": 4, "handoff_rows": "raw"},
    "eagle3 dynamic": {"drafter": "eagle3", "num_draft_tokens": 3, "tree": "dynamic", "tree_width": 3},
    "medusa": {"drafter": "medusa", "num_draft_tokens": 3, "tree": "static"},
    "draft model": {"drafter": "draft_model", "num_draft_tokens": 3},
    "ngram": {"drafter": "ngram"},
}
WIDTHS = {"eagle3 raw": 3 * HIDDEN, "draft model": 0, "ngram": 0}


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Untrained heads of every kind, and a draft model."""
    folder = tmp_path_factory.mktemp("heads")
    for name in ("eagle", "eagle3", "medusa", "draft_model"):
        write_tiny_head(folder / name, name)
    return folder


def options_of(case: str, heads: Path, handoff: str) -> dict[str, object]:
    folder = heads / str(CASES[case]["drafter"])
    path = {"drafter_path": str(folder)} if folder.exists() else {}
    return {"handoff": handoff} | CASES[case] | path


def node_config(**options: object) -> NodeConfig:
    return NodeConfig.model_validate({"model": "tiny", "prefill_chunk_tokens": 5, "max_running": 8} | options)


def runners(options: dict[str, object]) -> tuple[ModelRunner, ModelRunner]:
    """Those of a prefill and of a decode node; unequal pages."""
    prefill = tiny_prefill_runner("bf16", page_size=16, **options)
    return prefill, tiny_runner("bf16", page_size=8, **options)


def requests() -> list[SequenceRequest]:
    extras: list[Asked] = [
        {},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.9, "frequency_penalty": 0.4},
        {"max_tokens": 1},
        {"temperature": 1.0, "stop_token_ids": tuple(range(3, 60))},
    ]
    return [tiny_request(index=i, **extra) for i, extra in enumerate(extras)]


@pytest.mark.parametrize("case", CASES)
async def test_hidden_rows_give_the_rounds_of_one_process(case: str, heads: Path) -> None:
    options = options_of(case, heads, "hidden_states")
    together = run(tiny_runner("bf16", **options), requests())
    prefill, decode = runners(options)
    assert len(prefill.kv.layout.layer_range(LayerOwner.DRAFT)) == 0, "a prefill node that sends rows has no draft KV"
    async with pair(node_config(**options), prefill, decode) as nodes:
        for _ in range(2):  # the second time decode has a part of the prompts, and prefill all of them
            apart = await nodes.run(requests(), concurrent=3)
            for (outcome, _answer), expected in zip(apart, together, strict=True):
                assert outcome == expected
            await nodes.all_released()


@pytest.mark.parametrize("case", CASES)
async def test_wire_bytes_equal_the_formula(case: str, heads: Path) -> None:
    """H4: rows x width for the hidden rows, nothing of the draft, no draft state."""
    options = options_of(case, heads, "hidden_states") | {"prefix_cache": False}
    prefill, decode = runners(options)
    async with pair(node_config(**options), prefill, decode) as nodes:
        request = tiny_request(max_tokens=4)
        answer = await nodes.generate(request)
        assert answer.handed_off is not None
        sent, rows = answer.handed_off.bytes, len(request.prompt_token_ids)
        assert sent.target_kv == rows * prefill.kv.layout.token_bytes(LayerOwner.TARGET)
        assert sent.draft_kv == 0
        assert sent.hidden == rows * WIDTHS.get(case, HIDDEN) * 2


@pytest.mark.parametrize("case", ["eagle3", "mtp x3", "medusa", "draft model", "ngram"])
async def test_nothing_crosses_and_decode_drafts_from_tokens(case: str, heads: Path) -> None:
    options = options_of(case, heads, "none")
    expected = run(tiny_runner("bf16", drafter="none"), requests())
    prefill, decode = runners(options)
    async with pair(node_config(**options), prefill, decode) as nodes:
        for _ in range(2):
            apart = await nodes.run(requests(), concurrent=3)
            for (outcome, answer), plain in zip(apart, expected, strict=True):
                assert outcome.token_ids == plain.token_ids
                assert outcome.logit_bits == plain.logit_bits
                assert answer.handed_off is not None
                assert answer.handed_off.bytes.draft_kv == answer.handed_off.bytes.hidden == 0
            await nodes.all_released()
        assert nodes.decode_node.shell.status().held == 0


async def test_a_request_that_needs_no_rows_gets_none(heads: Path) -> None:
    options = options_of("eagle3", heads, "hidden_states") | {"drafters": "ngram,none"}
    prefill, decode = runners(options)
    async with pair(node_config(**options), prefill, decode) as nodes:
        plain = tiny_request(max_tokens=6)
        named = SpeculationParams(drafter="ngram")
        asked = SequenceRequest("named", plain.prompt_token_ids, plain.params, speculation=named)
        answer = await nodes.generate(asked)
        assert answer.handed_off is not None
        assert answer.handed_off.bytes.hidden == 0
        assert tuple(answer.token_ids) == run(tiny_runner("bf16", drafter="none"), [plain])[0].token_ids


async def test_draft_prefill_is_cut_and_rounds_go_on_between(heads: Path) -> None:
    """A long prompt's hidden rows are digested five at a time while another stream decodes."""
    options = options_of("eagle3", heads, "hidden_states")
    prefill, decode = runners(options)
    steps: list[tuple[str, int]] = []
    digest, rounds = decode.digest, decode.decode

    def digested(seq: Sequence, start: int, end: int, rows: torch.Tensor) -> None:
        steps.append((seq.request.request_id, end - start))
        digest(seq, start, end, rows)

    def decoded(seqs: list[Sequence]) -> object:
        steps.append(("round", len(seqs)))
        if sum(name == long.request_id for name, _ in steps) < 13:
            time.sleep(0.02)  # the other stream is not to end before the long prompt came, whatever pauses
        return rounds(seqs)

    decode.digest, decode.decode = digested, decoded  # type: ignore[method-assign, assignment]
    long = tiny_request([3 + i % 150 for i in range(64)], index=1, max_tokens=4)
    async with pair(node_config(**options), prefill, decode) as nodes:
        other = asyncio.create_task(nodes.generate(tiny_request(index=0, max_tokens=400)))
        while not steps or steps[-1][0] != "round":
            await asyncio.sleep(0.001)
        await nodes.generate(long)
        await other
    mine = [i for i, (name, _) in enumerate(steps) if name == long.request_id]
    assert [steps[i][1] for i in mine] == [5] * 12 + [4]
    assert all("round" in {name for name, _ in steps[a + 1 : b]} for a, b in pairwise(mine))


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ({"handoff": "draft_kv"}, {"handoff": "hidden_states"}),
        ({"handoff": "hidden_states"}, {"handoff": "none"}),
        ({"handoff": "hidden_states"}, {"handoff": "hidden_states", "handoff_rows": "raw"}),
    ],
)
async def test_modes_must_agree(prefill: dict[str, object], decode: dict[str, object], heads: Path) -> None:
    base = options_of("eagle3", heads, "draft_kv")
    sender = tiny_prefill_runner("bf16", **(base | prefill))
    async with pair(node_config(**base), sender, tiny_runner("bf16", **(base | decode))) as nodes:
        with pytest.raises(PairingRefused, match=r"handoff_mode|hidden_size"):
            await nodes.prefill_node.connect(nodes.decode_address)
