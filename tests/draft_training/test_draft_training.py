"""Training draft heads: masks against inference, resuming, files that the engine loads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from draft_training.batch import Batch, collate
from draft_training.corpus import Corpus, Sample, load_corpus
from draft_training.export import Seen, write_card, write_head
from draft_training.features import FeatureMaker, FeatureStore, SampleRows
from draft_training.heads import TrainableHead
from draft_training.objective import acceptance_of, labels_of, loss_of
from draft_training.plot import draw_history
from draft_training.start import HeadOptions, Source, build_head
from draft_training.train import Data, TrainConfig, Trainer, shared_beginning
from paceline.attention.base import ForwardBatch, Segment
from paceline.attention.torch_paged import TorchAttention
from paceline.errors import ConfigError
from paceline.kvcache.layout import KvLayout
from paceline.kvcache.pool import KvPool
from paceline.models.base import ForwardContext
from paceline.models.llama import LlamaModel
from paceline.spec_decode.heads.base import DraftHead
from paceline.spec_decode.heads.detect import load_head, read_head
from paceline.spec_decode.heads.mtp import MtpHead, load_mtp
from tests.support.tiny_model import tiny_spec, tiny_weights

torch.set_num_threads(1)
AUX = (0, 1, 2)
KINDS = {
    "eagle3": HeadOptions("eagle3", 3, 48),
    "eagle1": HeadOptions("eagle1", 3),
    "mtp": HeadOptions("mtp", 3),
    "mtp3": HeadOptions("mtp", 3, 48, chained=True),
    "medusa": HeadOptions("medusa", 3, medusa_blocks=2),
}


def target() -> LlamaModel:
    spec = tiny_spec()
    return LlamaModel(spec, tiny_weights(spec, torch.float32), torch.float32, torch.device("cpu"))


def source() -> Source:
    spec = tiny_spec()
    bag = tiny_weights(spec, torch.float32)
    tensors = {name: bag.take(name) for name in list(bag._left)}
    prefix = f"model.layers.{spec.num_layers - 1}."
    layer = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
    embedding = tensors["model.embed_tokens.weight"]
    return Source(spec, embedding, embedding, tensors["model.norm.weight"], layer)


def samples(count: int, seed: int = 0) -> list[Sample]:
    generator = torch.Generator().manual_seed(seed)

    def ids(low: int, high: int) -> tuple[int, ...]:
        length = int(torch.randint(low, high, (), generator=generator))
        return tuple(torch.randint(3, 199, (length,), generator=generator).tolist())

    return [Sample(ids(4, 9), ids(9, 20)) for _ in range(count)]


def batch_of(some: list[Sample]) -> Batch:
    return collate(list(FeatureMaker(target(), AUX, 64).rows(some)), 64)


def trained(kind: str, ids: range = range(199)) -> TrainableHead:
    return build_head(source(), KINDS[kind], ids)


def test_columns_are_the_rows_that_predict_the_answer() -> None:
    rows = SampleRows(torch.arange(10), 4, torch.zeros(10, 8))
    batch = collate([rows, rows], 4)
    # row 3 = (t_4, h_3) predicts t_5, which h_4 predicts; the last label row, 8, predicts t_9
    assert batch.columns.tolist() == [3, 4, 5, 6, 7, 8, 13, 14, 15, 16, 17, 18]
    assert batch.following[3] == 4
    assert batch.following[9] == 0
    # two tokens of template: row 1 = (t_2, h_1) is the first to predict past them; never later than the answer's first
    assert collate([rows], 4, framing=2).columns.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert collate([rows], 4, framing=9).columns.tolist() == [3, 4, 5, 6, 7, 8]


def test_the_template_before_all_prompts_is_not_trained_on() -> None:
    answer = tuple(range(50, 60))
    some = Corpus(tuple(Sample((1, 2, 3, at, 4), answer) for at in (30, 7, 9)), ())
    assert shared_beginning([some]) == 3
    assert shared_beginning([some, Corpus((Sample((1, 2, 5, 6), answer),), ())]) == 2


@pytest.mark.parametrize("kind", ["eagle3", "eagle1", "mtp"])
def test_training_steps_equal_drafting_with_the_serving_head(kind: str, tmp_path: Path) -> None:
    """Training-time test (C7): column c at step s computes what the serving head computes on a chain of s drafts."""
    head, model, some = trained(kind), target(), samples(3)
    batch, parts = batch_of(some), source().parts(range(199))
    write_head(tmp_path, head, source(), source().shape(KINDS[kind].intermediate_size), tuple(range(199)), AUX)
    stored = read_head(tmp_path, torch.float32, first_layer=2).tensors
    for name, parameter in zip(head.tensors(), head.parameters(), strict=True):  # what bf16 files keep
        parameter.data.copy_(stored[name])
    outputs = head.steps(batch, parts, head.num_steps)
    serving = _serving_head(tmp_path, model)
    at = 0
    for sample, columns in zip(some, batch.column_counts, strict=True):
        start = sum(batch.row_counts[: some.index(sample)])
        rows = (batch.aux if kind == "eagle3" else batch.final)[start : start + len(sample.token_ids)]
        i = len(sample.prompt_ids) - 1 + 2  # the third column
        for s, step in enumerate(_drafted(serving, model, sample, rows, i)):
            torch.testing.assert_close(outputs[s][at + 2], step[0], rtol=2e-4, atol=2e-4)
        at += columns


def _drafted(serving: DraftHead, model: LlamaModel, sample: Sample, rows: torch.Tensor, i: int) -> list[torch.Tensor]:
    """Outputs of the serving head: row i over true rows 0..i, then two drafted rows fed the actual tokens."""
    layout = KvLayout((*model.kv_layers, *serving.kv_layers), torch.float32)
    kv, slots = KvPool(layout, 8, 16, torch.device("cpu")), torch.arange(128, dtype=torch.int32)

    def forward(token_ids: list[int], hidden: torch.Tensor, position: int) -> torch.Tensor:
        built = ForwardBatch.build([Segment.linear(token_ids, position, slots)])
        return serving.forward(built.token_ids, hidden, ForwardContext.build(built, kv, TorchAttention()))

    steps = [forward(list(sample.token_ids[1 : i + 2]), serving.fuse(rows[: i + 1]), 0)[-1:]]
    for s in range(2):
        steps.append(forward([sample.token_ids[i + 2 + s]], steps[-1], i + 1 + s))
    return steps


def _serving_head(folder: Path, model: LlamaModel) -> DraftHead:
    if read_head(folder, torch.float32, first_layer=2).kind == "mtp":
        modules, _ = load_mtp(str(folder), model, 1, model.rope_table())
        return MtpHead(model, modules[0])
    return load_head(folder, model, len(model.kv_layers))[0]


@pytest.mark.parametrize("kind", KINDS)
def test_later_tokens_do_not_reach_earlier_columns(kind: str) -> None:
    """A column of step s may see tokens up to t_{i+1+s} and hidden rows up to h_i; nothing later."""
    head, parts = trained(kind).double(), source().parts(range(199))
    parts = replace(parts, embedding=parts.embedding.double(), head=parts.head.double())
    batch = batch_of(samples(1, seed=5))
    batch = replace(batch, aux=batch.aux.double(), final=batch.final.double())
    before = head.steps(batch, parts, head.num_steps)
    column, row = 2, int(batch.columns[2])
    noisy = torch.zeros_like(batch.final)
    noisy[row + 1 :] = 1.0
    later = batch.following.clone()
    later[row + 3 :] = 7  # t_{i+4} and on
    disturbed = replace(batch, final=batch.final + noisy, aux=batch.aux + noisy.repeat(1, 3), following=later)
    after = head.steps(disturbed, parts, head.num_steps)
    for one, other in zip(before, after, strict=True):
        torch.testing.assert_close(one[column], other[column])
    assert not torch.equal(before[0][column + 1], after[0][column + 1])


def test_acceptance_counts_chains_that_are_right_so_far() -> None:
    """A Medusa head of zero blocks' effect is the target's own head: right exactly where the next token repeats."""
    batch, parts = batch_of(samples(2)), source().parts(range(199))
    head = trained("medusa")
    found = acceptance_of(head, batch, parts)
    rows, _ = batch.rows(1)
    alive = rows < batch.last
    assert found.starts == int(alive.sum())
    best = (batch.final[batch.columns] @ source().lm_head.T).argmax(-1)
    for step, accepted in enumerate(found.accepted):
        rows, exists = batch.rows(step + 1)
        alive = alive & exists & (rows < batch.last) & (best == batch.following[rows])
        assert accepted == int(alive.sum())


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_learns_resumes_and_is_read_back(kind: str, tmp_path: Path) -> None:
    corpus = Corpus(tuple(samples(12)), tuple(samples(4, seed=9)))
    stores = (FeatureStore(tmp_path / "features", part, "tiny") for part in (corpus.train, corpus.held_out))
    data = [Data(corpus, *stores)]
    config = TrainConfig(
        steps=6, minutes=5, tokens_per_step=60, prompts=kind == "mtp", learning_rate=3e-3, eval_every=3, warmup_steps=2
    )

    def trainer(folder: str) -> Trainer:
        parts = source().parts(range(0, 199, 1))
        parts = replace(parts, embedding=parts.embedding.bfloat16(), head=parts.head.bfloat16())
        return Trainer(
            trained(kind), parts, data, lambda: FeatureMaker(target(), AUX, 64),
            tmp_path / folder, config, torch.device("cpu"),
        )  # fmt: skip

    first = trainer("run")
    first.run()
    losses = [entry["loss"] for entry in first.progress.history if entry["loss"]]
    assert sum(losses[-1]) < sum(losses[0])
    again = trainer("run")
    assert again.progress.step == 6
    for a, b in zip(first.head.parameters(), again.head.parameters(), strict=True):
        assert torch.equal(a, b)
    again.run()
    assert again.progress.step == 12
    assert draw_history(again.progress.history, tmp_path / "history.png")
    assert (tmp_path / "history.png").read_bytes().startswith(b"\x89PNG")
    shape = source().shape(KINDS[kind].intermediate_size)
    write_head(tmp_path / "head", again.head, source(), shape, tuple(range(199)), AUX)
    write_card(tmp_path / "head", kind, "tiny", Seen({"a.jsonl": 12}, 4), again.progress)
    assert "tokens in 12 steps" in (tmp_path / "head" / "README.md").read_text()
    assert read_head(tmp_path / "head", torch.bfloat16, first_layer=2).kind == {"mtp3": "mtp"}.get(kind, kind)


def test_a_corpus_too_small_for_a_step_is_refused(tmp_path: Path) -> None:
    """Not looked through for ever."""
    corpus = Corpus(tuple(samples(3)), tuple(samples(2, seed=9)))
    stores = (FeatureStore(tmp_path / "features", part, "tiny") for part in (corpus.train, corpus.held_out))
    parts = source().parts(range(199))
    config = TrainConfig(steps=1, minutes=5, tokens_per_step=10_000)
    trainer = Trainer(
        trained("mtp"), parts, [Data(corpus, *stores)], lambda: FeatureMaker(target(), AUX, 64),
        tmp_path / "run", config, torch.device("cpu"),
    )  # fmt: skip
    with pytest.raises(ConfigError, match="fewer than 10000 tokens to train on") as caught:
        next(trainer._batches())
    assert caught.value.key == "tokens_per_step"


def test_labels_leave_out_what_is_not_trained_on() -> None:
    ids = range(0, 199, 2)
    batch, parts = batch_of(samples(2)), source().parts(ids)
    labels = labels_of(batch, parts)
    assert labels.trained.tolist() == [token % 2 == 0 for token in batch.following.tolist()]
    loss, per_step = loss_of(trained("eagle3", ids), batch, parts, labels, 0.8, 3)
    assert len(per_step) == 3
    weighted = sum(0.8**s * part for s, part in enumerate(per_step)) / (1 + 0.8 + 0.64)
    assert float(loss.detach()) == pytest.approx(weighted, rel=1e-5)


def test_bad_corpus_lines_are_named(tmp_path: Path) -> None:
    good = {"prompt_ids": [1, 2], "answer_ids": list(range(3, 20)), "temperature": 0.7}
    path = tmp_path / "corpus.jsonl"
    path.write_text("\n".join(json.dumps(good) for _ in range(5)))
    corpus = load_corpus(path, 199, held_out=2)
    assert (len(corpus.train), corpus.train[0].greedy) == (3, False)
    path.write_text(json.dumps(good) + "\n" + json.dumps(good | {"answer_ids": [900] * 9}))
    with pytest.raises(ConfigError, match=r"corpus\.jsonl:2 .*outside"):
        load_corpus(path, 199)
    path.write_text("{}")
    with pytest.raises(ConfigError, match="prompt_ids"):
        load_corpus(path, 199)
