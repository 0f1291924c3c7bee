"""One training job from options to files: what ``paceline train-drafter`` runs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from draft_training.corpus import Corpus, load_corpus
from draft_training.export import Seen, write_card, write_head
from draft_training.features import FeatureMaker, FeatureStore
from draft_training.objective import Acceptance
from draft_training.plot import draw_history
from draft_training.start import HeadOptions, Source, aux_layers_of, build_head
from draft_training.train import Data, Progress, TrainConfig, Trainer
from paceline.layers.build import set_threads
from paceline.models.digest import weights_digest
from paceline.models.hub import resolve_model
from paceline.models.registry import load_target

MAX_SAMPLE_TOKENS = 1024
# What a head is called, its size, and over how many of the most frequent tokens it is trained. All but EAGLE-3 draft
# over the target's whole vocabulary: the cut only spares them the rare tokens' part of the loss.
HEADS: dict[str, tuple[HeadOptions, int]] = {
    "eagle3": (HeadOptions("eagle3", num_steps=5, intermediate_size=1024), 6400),
    "eagle": (HeadOptions("eagle1", num_steps=4), 8192),
    "mtp": (HeadOptions("mtp", num_steps=4), 8192),
    "mtp3": (HeadOptions("mtp", num_steps=3, intermediate_size=608, chained=True), 8192),
    "medusa": (HeadOptions("medusa", num_steps=4, medusa_blocks=3), 8192),
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
    held_out: int = 200  # of each corpus file
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
    longest = min(MAX_SAMPLE_TOKENS, spec.max_model_len)
    corpora = [load_corpus(path, spec.vocab_size, longest, job.held_out) for path in job.corpus]
    token_ids = _vocabulary(job, corpora, job.draft_vocab or most_frequent)
    aux_layers = aux_layers_of(spec.num_layers)
    head = build_head(source, options, token_ids)
    device = torch.device(job.device)

    def maker() -> FeatureMaker:
        return FeatureMaker(load_target(folder, torch.bfloat16, device), aux_layers, MAX_SAMPLE_TOKENS)

    identity = f"{weights_digest(folder)} {aux_layers}"
    data = [Data(c, *(FeatureStore(job.cache, part, identity) for part in (c.train, c.held_out))) for c in corpora]
    trainer = Trainer(head, source.parts(token_ids), data, maker, job.out, job.train, device)
    found = trainer.run(report)
    draw_history(trainer.progress.history, job.out / "history.png")
    write_head(job.out / "head", head, source, source.shape(options.intermediate_size), token_ids, aux_layers)
    samples = {path.name: len(corpus.train) for path, corpus in zip(job.corpus, corpora, strict=True)}
    seen = Seen(samples, job.held_out * len(corpora), dict(job.train.shares), job.train.prompts)
    write_card(job.out / "head", job.head, Path(job.model).name, seen, trainer.progress)
    return found


def _vocabulary(job: Job, corpora: Sequence[Corpus], count: int) -> tuple[int, ...]:
    """The tokens trained on: those of the first run in ``job.out``, whatever corpora a resumed one adds."""
    path = job.out / "token_ids.json"
    if not path.exists():
        counts: Counter[int] = Counter()
        for corpus in corpora:
            counts.update(corpus.token_counts(job.train.shares))
        job.out.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(sorted(token for token, _ in counts.most_common(count))))
    return tuple(json.loads(path.read_text()))
