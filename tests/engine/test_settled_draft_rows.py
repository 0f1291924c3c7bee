"""Draft rows that are called settled in the midst of a prompt are what they are at its end: they may be sent."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.engine.model_runner import ModelRunner, PrefillChunk
from paceline.kvcache.layout import LayerOwner
from paceline.request import SequenceRequest
from paceline.spec_decode.sequence import Sequence
from tests.support.tiny_model import tiny_request, tiny_runner
from tests.support.untrained_heads import write_tiny_head

CASES: dict[str, tuple[dict[str, object], int]] = {  # options; rows of a chunk that settle with the next one
    "eagle3": ({"drafter": "eagle3"}, 0),
    "mtp": ({"drafter": "mtp"}, 0),
    "mtp x3": ({"drafter": "mtp", "mtp_modules": 3}, 2),
    "draft model": ({"drafter": "draft_model"}, 0),
}
CHUNK = 5


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("heads")
    for name in ("eagle3", "draft_model"):
        write_tiny_head(folder / name, name)
    return folder


def draft_rows(runner: ModelRunner, seq: Sequence, num_rows: int) -> torch.Tensor:
    """[layers, num_rows, width]"""
    layers = runner.kv.layout.layer_range(LayerOwner.DRAFT)
    width = runner.kv.layout.layers[layers.start].row_elems
    return runner.kv.gather(layers, seq.table.slots[:num_rows]).view(len(layers), num_rows, width)


def prefill(runner: ModelRunner, request: SequenceRequest) -> tuple[Sequence, list[torch.Tensor]]:
    """What was settled before the first chunk and after each of them."""
    seq = runner.new_sequence(request)
    seq.table.ensure(seq.num_prefill + 1)
    seen = [draft_rows(runner, seq, runner.settled_draft_rows(seq)).clone()]
    for start in range(seq.num_computed, seq.num_prefill, CHUNK):
        runner.prefill([PrefillChunk(seq, start, min(start + CHUNK, seq.num_prefill))])
        seen.append(draft_rows(runner, seq, runner.settled_draft_rows(seq)).clone())
    return seq, seen


@pytest.mark.parametrize("case", CASES)
def test_settled_rows_stay(case: str, heads: Path) -> None:
    options, behind = CASES[case]
    folder = heads / str(options["drafter"])
    path = {"drafter_path": str(folder)} if folder.exists() else {}
    runner = tiny_runner("bf16", page_size=4, **options, **path)
    request = tiny_request(index=1, max_tokens=4)
    seq, seen = prefill(runner, request)
    whole, count = seen[-1], seq.num_prefill
    assert count > 2 * CHUNK
    chunk_ends = range(CHUNK, count, CHUNK)
    assert [rows.shape[1] for rows in seen] == [0, *(end - behind for end in chunk_ends), count]
    for rows in seen:
        assert torch.equal(rows, whole[:, : rows.shape[1]])
    runner.release(seq)
    again, seen = prefill(runner, request)
    assert again.cached_tokens > 0
    assert seen[0].shape[1] == again.cached_tokens  # of the cache, all are
    assert torch.equal(seen[0], whole[:, : again.cached_tokens])
    runner.release(again)
