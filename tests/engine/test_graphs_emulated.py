"""Graphs against eager runs, with graphs emulated on the CPU: same tokens, same drafts, and no host wait inside."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Protocol
from unittest import mock

import pytest
import torch

from benchmarks.speculation.synthetic import Rates, SyntheticDrafts
from paceline.assembly import graph_build
from paceline.attention.base import Segment
from paceline.engine.colocated import ColocatedEngine
from paceline.engine.model_runner import ModelRunner, PrefillChunk
from paceline.layers import upload
from paceline.layers.graph_capture import Captured, Work
from paceline.models import moe, static_forward
from paceline.request import SequenceRequest
from paceline.sampling.device import draft_topk
from paceline.spec_decode.drafters import candidates, feature
from paceline.spec_decode.drafters.feature import FeatureDrafter
from paceline.spec_decode.sequence import Sequence
from tests.support.asked import Sampling
from tests.support.exactness import run
from tests.support.host_reads import host_reads, marked
from tests.support.recording import HostWaits, RecordedCapture, plain_torch
from tests.support.tiny_deepseek import tiny_deepseek_runner, write_mtp_folder
from tests.support.tiny_model import primary_of, tiny_prefill_runner, tiny_request, tiny_runner
from tests.support.untrained_heads import write_tiny_head

SMALL: dict[str, object] = {
    "attention": "torch",
    "max_running": 4,
    "max_model_len": 96,
    "kv_cache_tokens": 1024,
    "num_draft_tokens": 3,
}


class Make(Protocol):
    """Makes a tiny model's runner."""

    def __call__(self, dtype: str, /, **options: object) -> ModelRunner: ...


@pytest.fixture(autouse=True)
def as_on_a_gpu() -> Iterator[None]:
    with plain_torch():
        yield


def requests(count: int = 5) -> list[SequenceRequest]:
    """Some greedy, some sampled; lengths differ, so that batches shrink."""
    return [tiny_request(index=i, max_tokens=9 + 3 * i, temperature=0.9 * (i % 2)) for i in range(count)]


def with_graphs(capture: RecordedCapture, make: Make = tiny_runner, /, **options: object) -> ModelRunner:
    with (
        mock.patch("paceline.assembly.build.wants_graphs", return_value=True),
        mock.patch.object(graph_build, "CudaCapture", return_value=capture),
    ):
        return make("fp32", **(SMALL | options))


def without(make: Make = tiny_runner, /, **options: object) -> ModelRunner:
    return make("fp32", **(SMALL | options))


def drafter_of(runner: ModelRunner) -> FeatureDrafter:
    drafter = primary_of(runner)
    assert isinstance(drafter, FeatureDrafter)
    return drafter


@pytest.mark.parametrize(
    ("drafter", "tree"),
    [
        *(("none", "chain"), ("eagle", "chain")),
        *((drafter, tree) for drafter in ("ngram", "eagle3", "mtp") for tree in ("chain", "static", "dynamic")),
    ],
)
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
            for temperature in (0.9, 0.0):  # mutant: a greedy batch keeps the temperatures of the one before
                run(runner, [tiny_request(index=7, temperature=temperature)], batch=1)
    assert seen["graph"] == seen["eager"]
    assert max(len(tokens) for tokens in seen["graph"]) == 4


def test_deepseek_with_its_own_module(tmp_path: Path) -> None:
    """MLA, experts and a reused MTP module."""
    capture = RecordedCapture()
    folder = write_mtp_folder(tmp_path / "heads", 1, torch.float32)
    options: dict[str, object] = {"drafter": "mtp", "drafter_path": str(folder)}
    with mock.patch.object(
        moe, "SeparateExperts", lambda take, prefix, count, _: moe.GroupedExperts(take, prefix, count)
    ):
        graphed = with_graphs(capture, tiny_deepseek_runner, **options)
        plain = without(tiny_deepseek_runner, **options)
    found, expected = run(graphed, requests(3), batch=3), run(plain, requests(3), batch=3)
    assert [o.token_ids for o in found] == [o.token_ids for o in expected]
    assert capture.replays > 10


def test_experts_that_count_their_rows_cannot_be_captured() -> None:
    with pytest.raises(HostWaits):
        with_graphs(RecordedCapture(), tiny_deepseek_runner, drafter="none")


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


def test_a_shape_that_cannot_be_captured_runs_eagerly() -> None:
    """A workspace too small for it, or no memory: the other shapes have their graphs."""

    class Refusing(RecordedCapture):
        tried = 0

        def __call__(self, work: Work) -> Captured:
            self.tried += 1
            if self.tried == 1:
                raise RuntimeError("Buffer overflow when allocating memory for batch_prefill_tmp_v")
            return super().__call__(work)

    capture = Refusing()
    runner = with_graphs(capture, drafter="none")
    assert runner.graphs is not None
    assert len(runner.graphs.buckets) == capture.tried - 1 > 0
    tokens = [o.token_ids for o in run(runner, requests(), batch=5)]
    assert tokens == [o.token_ids for o in run(without(drafter="none"), requests(), batch=5)]


def test_no_graphs_on_the_cpu_or_on_a_prefill_node() -> None:
    plain = without(drafter="none")
    assert plain.graphs is None
    assert plain.kv.num_pages == plain.allocator.num_pages
    with mock.patch("paceline.assembly.build.wants_graphs", return_value=True):
        assert tiny_prefill_runner("fp32", drafter="none", **SMALL).graphs is None


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


ON_DEVICE: dict[str, dict[str, object]] = {
    "chain": {},
    "one draft": {"num_draft_tokens": 1},
    "greedy drafts": {"draft_sampling": "greedy"},
    "moving length": {"adaptive": "window"},
    "another drafter beside": {"drafters": "ngram,lookahead"},
}


def sampled_requests() -> list[SequenceRequest]:
    """All that a request may ask of a round without its tokens; they end in different rounds, by length and by stop."""
    extras: list[Sampling] = [
        {},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.8, "logit_bias": {5: 4.0, 9: -100.0}},
        {"temperature": 1.0, "top_k": 9, "top_logprobs": 2},
        {"temperature": 1.0, "min_tokens": 6, "stop_token_ids": (5, 9, 11, 21, 33, 40, 41, 42)},
        {"temperature": 1.2, "min_p": 0.02},
    ]
    return [tiny_request(index=i, max_tokens=8 + 3 * i, **extra) for i, extra in enumerate(extras)]


def eagle(folder: Path, **options: object) -> dict[str, object]:
    write_tiny_head(folder, "eagle3")
    return {"drafter": "eagle3", "drafter_path": str(folder)} | options


def answers(runner: ModelRunner, asked: list[SequenceRequest]) -> list[tuple[Any, ...]]:
    """Without anybody looking at logits, which would keep rounds on the host."""
    done = ColocatedEngine(runner, chunk_tokens=50, max_running=4).generate(asked)
    assert runner.allocator.check_integrity() == []
    return [(d.token_ids, d.logprobs, d.finish_reason, d.stats.accepted_per_round) for d in done]


def nothing_to_read(graphs: object, seqs: list[Sequence], depths: list[int]) -> list[list[int]]:
    """In place of ``draft_chains``: only asked where every sequence is at its last token."""
    assert not any(depths)
    return [[] for _ in seqs]


@pytest.mark.parametrize("name", ON_DEVICE)
def test_rounds_that_never_read_their_drafts(name: str, tmp_path: Path) -> None:
    """Tokens, log-probabilities and accepted lengths are those of rounds on the host, where every draft is read."""
    options = eagle(tmp_path, **ON_DEVICE[name])
    outcomes = []
    for runner in (with_graphs(RecordedCapture(), **options), without(**options)):
        runner.samples_on_device = runner.graphs is not None
        read = mock.patch.object(feature, "draft_chains", side_effect=nothing_to_read)
        with read if runner.graphs is not None else nullcontext():
            outcomes.append(answers(runner, sampled_requests()))
    assert outcomes[0] == outcomes[1]
    assert max(max(rounds) for *_, rounds in outcomes[0]) >= 1


def test_a_penalty_reads_the_drafts(tmp_path: Path) -> None:
    """The rounds of the batch it is in: what it subtracts depends on a node's path."""
    options = eagle(tmp_path)
    asked = [*sampled_requests()[:3], tiny_request(index=9, temperature=0.8, presence_penalty=0.7, max_tokens=9)]
    runner = with_graphs(RecordedCapture(), **options)
    runner.samples_on_device = True
    drafter = drafter_of(runner)
    with mock.patch.object(drafter, "propose", side_effect=drafter.propose) as proposed:
        found = answers(runner, asked)
    assert 0 < proposed.call_count < max(len(rounds) for *_, rounds in found)
    assert found == answers(without(**options), asked)


@pytest.mark.parametrize("depth", [1, 3])
def test_a_chain_round_reads_the_device_once(depth: int, tmp_path: Path) -> None:
    """And twice where the drafts are read first, so that the count is seen to count."""
    runner = with_graphs(RecordedCapture(), **eagle(tmp_path, num_draft_tokens=depth))
    runner.samples_on_device = True
    drafter, decode, counts = drafter_of(runner), runner.decode, list[int]()

    def counted(seqs):  # type: ignore[no-untyped-def]
        for seq in seqs:
            for tensor in (seq.draft.proposal_ids, seq.draft.proposal_probs, seq.draft.hidden):
                marked(tensor)
        with host_reads() as reads, mock.patch.object(candidates, "perturbed_topk", draft_topk):
            results = decode(seqs)  # with the drafter's candidates chosen as on a GPU
        counts.append(reads.count)
        return results

    assert runner.graphs is not None
    assert drafter.graphs is not None
    captured = [graph.captured for graph in runner.graphs._graphs.values()]
    captured += [graph._captured for graph in drafter.graphs._extends.values()]
    captured += [loop for _, loop in drafter.graphs._chains.values()]
    for graph in captured:
        for output in graph.outputs:
            marked(output)
    with mock.patch.object(runner, "decode", counted):
        answers(runner, requests(3))
        assert len(counts) > 5
        assert set(counts) == {1}
        counts.clear()
        with mock.patch.object(drafter, "propose_unread", return_value=None):
            answers(runner, requests(3))
        assert max(counts) == 2


@pytest.mark.parametrize("sampling", ["coupled", "greedy"])
def test_the_drafter_goes_on_before_the_verdict_is_read(sampling: str, tmp_path: Path) -> None:
    """Its extend is launched over all rows of the chains, and what it leaves is what an extend of the accepted rows
    leaves. Mutants: the last row's output in place of the accepted one's; noise of another position; the new token in
    another place."""
    asked = [tiny_request(index=i, max_tokens=40, temperature=0.9 * (i % 2)) for i in range(3)]
    plain = answers(without(drafter="none"), asked)
    known = {request.request_id: tuple(tokens) for request, (tokens, *_) in zip(asked, plain, strict=True)}
    runner = with_graphs(RecordedCapture(), **eagle(tmp_path, draft_sampling=sampling))
    runner.samples_on_device = True
    drafter, left = drafter_of(runner), list[list[tuple[Any, ...]]]()
    for ahead in (True, False):
        seqs = [runner.new_sequence(request) for request in asked]
        for seq in seqs:
            seq.table.ensure(seq.num_prefill + 40)
        runner.prefill([PrefillChunk(seq, 0, seq.num_prefill) for seq in seqs])
        truth = SyntheticDrafts(runner.drafter, known, Rates((0.7, 0.7, 0.7)), 1, runner.vocab_size)
        seen: list[tuple[Any, ...]] = []
        with (
            mock.patch.object(drafter, "extend", side_effect=drafter.extend) as extends,
            nullcontext() if ahead else mock.patch.object(drafter, "extend_ahead", return_value=None),
        ):
            for _ in range(4):
                results = runner.decode(seqs)
                drafts = [(seq.draft.proposal_ids.tolist(), seq.draft_rows) for seq in seqs if seq.draft is not None]
                seen.append((drafts, [result.round.num_accepted for result in results]))
            assert extends.call_count == (0 if ahead else 4)
        truth.restore()
        left.append(seen)
        for seq in seqs:
            runner.release(seq)
    assert left[0] == left[1]
    assert len({accepted for _, rounds in left[0] for accepted in rounds}) > 2


@pytest.mark.parametrize("drafter", ["none", "eagle3"])
def test_what_a_round_sends_does_not_grow_with_its_context(drafter: str, tmp_path: Path) -> None:
    """Page tables lie on the device: a sequence's pages cross in its first round there, then its numbers alone. Mutant:
    the host works batches out (columns and masks of every position are sent)."""
    options = eagle(tmp_path) if drafter == "eagle3" else {"drafter": "none"}
    runner = with_graphs(RecordedCapture(), **options)
    runner.samples_on_device = True
    seqs = [runner.new_sequence(tiny_request(index=i, max_tokens=60)) for i in range(2)]
    for seq in seqs:
        seq.table.ensure(90)
    runner.prefill([PrefillChunk(seq, 0, seq.num_prefill) for seq in seqs])
    plain, sent = upload.pinned, list[int]()

    def counting(array, device):  # type: ignore[no-untyped-def]
        sent[-1] += array.nbytes
        return plain(array, device)

    with (
        mock.patch.object(upload, "pinned", counting),
        mock.patch.object(static_forward, "pinned", counting),
        mock.patch("paceline.attention.placed.staged", wraps=upload.staged) as tables,
    ):
        for _ in range(10):
            sent.append(0)
            runner.decode(seqs)
    assert tables.call_count == 1
    assert len(set(sent[1:])) == 1, sent
    assert sent[1] < (700 if drafter == "none" else 2600)


def test_a_draft_outside_the_vocabulary_is_dropped(tmp_path: Path) -> None:
    """It came with a hand-off, say: the round is the one without it, on the device as on the host."""
    options = eagle(tmp_path, num_draft_tokens=1)
    rounds = []
    for runner in (with_graphs(RecordedCapture(), **options), without(**options)):
        runner.samples_on_device = runner.graphs is not None
        seqs = [runner.new_sequence(request) for request in requests(3)]
        for seq in seqs:
            seq.table.ensure(seq.num_prefill + 16)
        runner.prefill([PrefillChunk(seq, 0, seq.num_prefill) for seq in seqs])
        for seq, token in zip(seqs, (-1, runner.vocab_size, 2**31 + 7), strict=True):
            assert seq.draft is not None
            seq.draft.proposal_ids[0, 0] = token
        rounds.append([(r.token_ids, r.round.num_draft_tokens, r.round.num_accepted) for r in runner.decode(seqs)])
    assert rounds[0] == rounds[1]
    assert [drafted for _, drafted, _ in rounds[0]] == [0, 0, 0]


def test_exchanged_drafts_are_not_read_either(tmp_path: Path) -> None:
    """A benchmark's synthetic acceptance meets the rounds that it measures."""
    options, asked = eagle(tmp_path), requests(3)
    plain = answers(without(drafter="none"), asked)
    runner = with_graphs(RecordedCapture(), **options)
    runner.samples_on_device = True
    known = {request.request_id: tuple(tokens) for request, (tokens, *_) in zip(asked, plain, strict=True)}
    drafts = SyntheticDrafts(runner.drafter, known, Rates((1.0, 1.0, 0.0)), 0, runner.vocab_size)
    with mock.patch.object(feature, "draft_chains", side_effect=nothing_to_read):
        found = answers(runner, asked)
    drafts.restore()
    assert drafts.exchanged > 3
    assert [tokens for tokens, *_ in found] == [tokens for tokens, *_ in plain]
    assert {accepted for *_, rounds in found for accepted in rounds[:-1]} == {2}
