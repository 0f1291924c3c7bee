"""One training job from options to files: what ``paceline train-drafter`` runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from draft_training.corpus import Corpus, load_corpus
from draft_training.export import write_card, write_head
from draft_training.features import FeatureMaker, FeatureStore
from draft_training.objective import Acceptance
from draft_training.plot import draw_history
from draft_training.start import HeadOptions, Source, build_head
from draft_training.train import Progress, TrainConfig, Trainer
from paceline.layers.build import set_threads
from paceline.models.hub import resolve_model
from paceline.models.loader import weights_digest
from paceline.models.registry import load_target

MAX_SAMPLE_TOKENS = 1024
# What a head is called, its size, and over how many of the most frequent tokens it is trained. All but EAGLE-3 draft
# over the target's whole vocabulary: the cut only spares them the rare tokens' part of the loss.
HEADS: dict[str, tuple[HeadOptions, int]] = {
    "eagle3": (HeadOptions("eagle3", num_steps=5, intermediate_size=1024), 6400),
    "eagle": (HeadOptions("eagle1", num_steps=4), 12288),
    "mtp": (HeadOptions("mtp", num_steps=4), 12288),
    "mtp3": (HeadOptions("mtp", num_steps=3, intermediate_size=608, chained=True), 12288),
    "medusa": (HeadOptions("medusa", num_steps=4, medusa_blocks=3), 12288),
}


@dataclass(frozen=True)
class Job:
    """Options of a run."""

    head: str  # one of HEADS
    model: str
    corpus: tuple[Path, ...]
    out: Path  # checkpoint, history and plot; the finished head goes to out/head
    cache: Path  # features of the target over the corpus
    device: str = "cpu"
    threads: int = 1
    held_out: int = 200
    draft_vocab: int = 0  # 0: as HEADS says
    train: TrainConfig = field(default_factory=TrainConfig)


def run_job(job: Job, report: Callable[[Progress, float], None] = lambda progress, share: None) -> Acceptance:
    """Train, write the head with its card, draw the curve. Going on from job.out where a checkpoint lies there."""
    torch.set_num_threads(job.threads)
    set_threads(job.threads)
    folder = resolve_model(job.model)
    source = Source.from_folder(folder)
    spec = source.spec
    options, most_frequent = HEADS[job.head]
    corpus = load_corpus(job.corpus, spec.vocab_size, min(MAX_SAMPLE_TOKENS, spec.max_model_len), job.held_out)
    counts = corpus.token_counts()
    token_ids = tuple(sorted(token for token, _ in counts.most_common(job.draft_vocab or most_frequent)))
    aux_layers = (2, spec.num_layers // 2, spec.num_layers - 3)
    head = build_head(source, options, token_ids)
    device = torch.device(job.device)

    def maker() -> FeatureMaker:
        return FeatureMaker(load_target(folder, torch.bfloat16, device), aux_layers, MAX_SAMPLE_TOKENS)

    stores = _stores(job.cache, corpus, f"{weights_digest(folder)} {aux_layers}")
    trainer = Trainer(head, source.parts(token_ids), corpus, stores, maker, job.out, job.train, device)
    found = trainer.run(report)
    draw_history(trainer.progress.history, job.out / "history.png")
    write_head(job.out / "head", head, source, source.shape(options.intermediate_size), token_ids, aux_layers)
    about = {"corpus": [path.name for path in job.corpus], "samples": len(corpus.train), "held_out": job.held_out}
    write_card(job.out / "head", job.head, Path(job.model).name, about, trainer.progress)
    return found


def _stores(cache: Path, corpus: Corpus, identity: str) -> tuple[FeatureStore, FeatureStore]:
    return FeatureStore(cache, corpus.train, identity), FeatureStore(cache, corpus.held_out, identity)
