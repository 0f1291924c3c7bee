"""Graphs against eager runs, with graphs emulated on the CPU: same tokens, same drafts, and no host wait inside."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

from paceline.attention.base import Segment
from paceline.engine import graph_build
from paceline.engine.model_runner import ModelRunner
from paceline.models import moe
from paceline.request import SequenceRequest
from paceline.spec_decode.drafters.feature import FeatureDrafter
from support.exactness import run
from support.heads import write_tiny_head
from support.recording import HostWaits, RecordedCapture, plain_torch
from support.tiny import primary_of, tiny_request, tiny_runner
from support.tiny_deepseek import tiny_deepseek_runner, write_mtp_folder

SMALL = {"attention": "torch", "max_running": 4, "max_model_len": 96, "kv_cache_tokens": 1024, "num_draft_tokens": 3}


@pytest.fixture(autouse=True)
def as_on_a_gpu() -> Iterator[None]:
    with plain_torch():
        yield


def requests(count: int = 5, **params: object) -> list[SequenceRequest]:
    """Some greedy, some sampled; lengths differ, so that batches shrink."""
    return [
        tiny_request(index=i, max_tokens=9 + 3 * i, **({"temperature": 0.9 * (i % 2)} | params)) for i in range(count)
    ]


def with_graphs(capture: RecordedCapture, deepseek: bool = False, **options: object) -> ModelRunner:
    make = tiny_deepseek_runner if deepseek else tiny_runner
    with (
        mock.patch("paceline.engine.build.wants_graphs", return_value=True),
        mock.patch.object(graph_build, "CudaCapture", return_value=capture),
    ):
        return make("fp32", **(SMALL | options))


def without(deepseek: bool = False, **options: object) -> ModelRunner:
    return (tiny_deepseek_runner if deepseek else tiny_runner)("fp32", **(SMALL | options))


def drafter_of(runner: ModelRunner) -> FeatureDrafter:
    drafter = primary_of(runner)
    assert isinstance(drafter, FeatureDrafter)
    return drafter


@pytest.mark.parametrize("tree", ["chain", "static", "dynamic"])
@pytest.mark.parametrize("drafter", ["none", "ngram", "eagle", "eagle3", "mtp"])
def test_engine_tokens_and_rounds(drafter: str, tree: str, tmp_path: Path) -> None:
    options: dict[str, object] = {"drafter": drafter, "tree": tree}
    if drafter.startswith("eagle"):
        write_tiny_head(tmp_path, drafter)
        options["drafter_path"] = str(tmp_path)
    capture = RecordedCapture()
    graphed, plain = with_graphs(capture, **options), without(**options)
    captured = capture.captures
    found, expected = run(graphed, requests(), batch=4), run(plain, requests(), batch=4)
    assert [o.token_ids for o in found] == [o.token_ids for o in expected]
    assert [o.accepted_per_round for o in found] == [o.accepted_per_round for o in expected]
    assert capture.captures == captured, "nothing is captured while serving"
    assert capture.replays > 10
    assert graphed.allocator.num_free == plain.allocator.num_free


@pytest.mark.parametrize("sampling", ["coupled", "greedy"])
def test_the_draft_loop_drafts_what_the_eager_loop_drafts(sampling: str, tmp_path: Path) -> None:
    """Trees compared round by round, for sequences that end in different rounds."""
    write_tiny_head(tmp_path, "eagle3")
    options = {"drafter": "eagle3", "drafter_path": str(tmp_path), "draft_sampling": sampling}
    seen: dict[str, list[tuple[int, ...]]] = {}
    for name, runner in (("graph", with_graphs(RecordedCapture(), **options)), ("eager", without(**options))):
        drafter, trees = drafter_of(runner), seen.setdefault(name, [])
        propose = drafter.propose

        def keeping(*args, propose=propose, trees=trees):  # type: ignore[no-untyped-def]
            made = propose(*args)
            trees.extend(tree.token_ids for tree in made)
            return made

        with mock.patch.object(drafter, "propose", keeping):
            run(runner, requests(), batch=3)
    assert seen["graph"] == seen["eager"]
    assert max(len(tokens) for tokens in seen["graph"]) == 4


def test_deepseek_with_its_own_module(tmp_path: Path) -> None:
    """MLA, experts and a reused MTP module."""
    capture = RecordedCapture()
    folder = write_mtp_folder(tmp_path / "heads", 1, torch.float32)
    options = {"deepseek": True, "drafter": "mtp", "drafter_path": str(folder)}
    with mock.patch.object(moe, "SeparateExperts", moe.GroupedExperts):
        graphed, plain = with_graphs(capture, **options), without(**options)
    found, expected = run(graphed, requests(3), batch=3), run(plain, requests(3), batch=3)
    assert [o.token_ids for o in found] == [o.token_ids for o in expected]
    assert capture.replays > 10


def test_experts_that_count_their_rows_cannot_be_captured() -> None:
    with pytest.raises(HostWaits):
        with_graphs(RecordedCapture(), deepseek=True, drafter="none")


def test_padding_touches_no_live_slot(tmp_path: Path) -> None:
    """Whatever a round with graphs writes besides the batch's own slots is in the scratch page."""
    write_tiny_head(tmp_path, "eagle3")
    runner = with_graphs(RecordedCapture(), drafter="eagle3", drafter_path=str(tmp_path))
    scratch = runner.kv.num_pages - 1
    assert runner.allocator.num_pages == scratch
    held = runner.allocator.allocate(8)
    for data in runner.kv.data:
        data[[ref.page for ref in held]] = 7.0
    run(runner, requests(3), batch=3)
    for data in runner.kv.data:
        assert bool((data[[ref.page for ref in held]] == 7.0).all())
        assert bool((data[scratch] != 0.0).any())
    runner.allocator.release(held)


@pytest.mark.parametrize(("mib", "some", "head"), [(0, 1, False), (2, 2, False), (4096, 6, True)])
def test_captures_stop_at_the_bound(mib: int, some: int, head: bool, tmp_path: Path) -> None:
    """Each capture claims 1 MiB. What has no graph runs eagerly, with the same tokens."""
    write_tiny_head(tmp_path, "eagle")
    options = {"drafter": "eagle", "drafter_path": str(tmp_path), "graph_memory_mib": mib}
    runner = with_graphs(RecordedCapture(bytes_each=1 << 20), **options)
    assert runner.graphs is not None
    assert len(runner.graphs.buckets) == some
    graphs = drafter_of(runner).graphs
    assert graphs is not None
    assert bool(graphs._extends) == bool(graphs._chains) == head
    tokens = [o.token_ids for o in run(runner, requests(3), batch=3)]
    assert tokens == [o.token_ids for o in run(without(**options), requests(3), batch=3)]


def test_no_graphs_on_the_cpu_or_on_a_prefill_node() -> None:
    plain = without(drafter="none")
    assert plain.graphs is None
    assert plain.kv.num_pages == plain.allocator.num_pages
    with mock.patch("paceline.engine.build.wants_graphs", return_value=True):
        assert tiny_runner("fp32", decodes=False, drafter="none", **SMALL).graphs is None


def test_outputs_are_the_callers() -> None:
    """A second replay leaves the rows of the first alone."""
    runner = with_graphs(RecordedCapture(), drafter="none")
    seqs = [runner.new_sequence(request) for request in requests(2)]
    slots = []
    for seq in seqs:
        seq.table.ensure(40)
        slots.append(seq.table.slots)
    assert runner.graphs is not None
    first = runner.graphs.forward([Segment.linear([5], 0, slots[0])])
    assert first is not None
    kept = first[0].clone()
    runner.graphs.forward([Segment.linear([9], 0, slots[1])])
    assert torch.equal(first[0], kept)
