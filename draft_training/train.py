"""The training loop: batches in, checkpoints, history and a finished head out. CPU or CUDA, one process.

A run is bounded by steps or by minutes; its learning rate warms up, stays, and falls to nothing over the last part.
``state.pt`` (written aside, then renamed) holds everything a resumed run needs; a run that is resumed with a new
bound goes on from there with a new schedule.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from random import Random
from typing import Any

import torch

from draft_training.batch import Batch, collate, first_column
from draft_training.corpus import Corpus, share_of
from draft_training.features import FeatureMaker, FeatureStore, SampleRows
from draft_training.heads import TargetParts, TrainableHead
from draft_training.objective import Acceptance, acceptance_of, labels_of, loss_of
from paceline.errors import ConfigError

SHARDS_AT_ONCE = 3  # samples are shuffled among so many shards
EVAL_BATCH = 12


@dataclass(frozen=True)
class TrainConfig:
    """How long and how fast."""

    minutes: float = 30.0  # of this run
    steps: int = 1_000_000  # of this run; whichever ends first
    tokens_per_step: int = 512
    draft_steps: int = 0  # trained in this run; 0: all of the head's. The first ones carry most, and cost least
    prompts: bool = False  # train on the prompts' tokens too: more text, of another kind, with the target's own view
    shares: Mapping[str, float] = field(default_factory=dict)  # of a source's samples, by prefix of its name
    learning_rate: float = 6e-4
    warmup_steps: int = 50
    decay_share: float = 0.3  # last part of the run, in which the learning rate falls to nothing
    step_decay: float = 0.85  # weight of each further draft step in the loss
    clip: float = 0.5
    eval_every: int = 600
    save_every_s: float = 300.0
    seed: int = 7


@dataclass
class Progress:
    """Where training stands; part of the checkpoint."""

    step: int = 0
    tokens: int = 0  # seen and trained on
    epoch: int = 0
    seconds: float = 0.0
    history: list[dict[str, Any]] = field(default_factory=list)


class MixedPrecision:
    """bf16 weights for the forward, float32 ones for the optimizers.

    Muon (Jordan et al. 2024) for matrices between hidden rows, at AdamW's update size: it needs about half of AdamW's
    tokens here. AdamW for the rest: norms, biases and a scoring matrix of the head's own.
    """

    def __init__(self, head: TrainableHead, learning_rate: float) -> None:
        self.head = head
        self.masters = [p.detach().clone().float() for p in head.parameters()]
        head.to(torch.bfloat16)
        names = [name for name, _ in head.named_parameters()]
        hidden = [m.dim() == 2 and "lm_head" not in name for name, m in zip(names, self.masters, strict=True)]
        matrices = [m for m, yes in zip(self.masters, hidden, strict=True) if yes]
        others = [m for m, yes in zip(self.masters, hidden, strict=True) if not yes]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr=learning_rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
        ]
        if others:
            betas = (0.9, 0.95)
            self.optimizers.append(
                torch.optim.AdamW(others, lr=learning_rate, betas=betas, weight_decay=0.0, fused=True)
            )

    def step(self, learning_rate: float, clip: float) -> float:
        """Apply the gradients; returns their norm before clipping."""
        for master, parameter in zip(self.masters, self.head.parameters(), strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        norm = torch.nn.utils.clip_grad_norm_(self.masters, clip, foreach=True)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate
            optimizer.step()
        self._copy_back()
        return float(norm)

    def _copy_back(self) -> None:
        with torch.no_grad():
            for master, parameter in zip(self.masters, self.head.parameters(), strict=True):
                parameter.copy_(master)

    def state(self) -> dict[str, Any]:
        """What the checkpoint keeps."""
        return {"masters": self.masters, "optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint of the same head."""
        with torch.no_grad():
            for master, saved in zip(self.masters, state["masters"], strict=True):
                master.copy_(saved)
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self._copy_back()


@dataclass(frozen=True)
class Data:
    """One corpus file and the target's features over it."""

    corpus: Corpus
    train: FeatureStore
    held_out: FeatureStore


def shared_beginning(corpora: Sequence[Corpus]) -> int:
    """Tokens that all prompts begin with: the chat template's, worth no training."""
    prompts = [sample.prompt_ids for corpus in corpora for sample in corpus.train]
    pairs = zip(min(prompts), max(prompts), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


class Trainer:
    """One head on some corpora."""

    def __init__(
        self,
        head: TrainableHead,
        target: TargetParts,
        data: Sequence[Data],
        maker: Callable[[], FeatureMaker],
        out: Path,
        config: TrainConfig,
        device: torch.device,
    ) -> None:
        """maker: makes the features that are missing."""
        self.head, self.config, self.device, self.out = head.to(device), config, device, out
        self.target, self.data = target.to(device), data
        self._maker = maker
        self._made: FeatureMaker | None = None
        self.mixed = MixedPrecision(self.head, config.learning_rate)
        self.progress = Progress()
        self.hidden_size = target.embedding.shape[1]
        out.mkdir(parents=True, exist_ok=True)
        if self._state_path.exists():
            self._resume()
        self._held_out: list[Batch] | None = None
        self._framing = shared_beginning([one.corpus for one in data]) if config.prompts else None

    @property
    def _state_path(self) -> Path:
        return self.out / "state.pt"

    def _resume(self) -> None:
        state = torch.load(self._state_path, map_location=self.device, weights_only=True)  # noqa: TID251 - tensors alone
        self.mixed.load(state["mixed"])
        self.progress = Progress(**state["progress"])

    def save(self) -> None:
        """Write the checkpoint, whole or not at all."""
        aside = self._state_path.with_suffix(".part")
        torch.save({"mixed": self.mixed.state(), "progress": vars(self.progress)}, aside)
        aside.rename(self._state_path)
        lines = [json.dumps(entry) for entry in self.progress.history]
        (self.out / "history.jsonl").write_text("\n".join(lines) + "\n")

    # ---- data

    def _read(self, store: FeatureStore, shard: int) -> list[SampleRows]:
        if not store.path(shard).exists():
            if self._made is None:
                self._made = self._maker()
            store.make(shard, self._made)
        return store.read(shard)

    def _batches(self) -> Iterator[Batch]:
        """Endless. The order depends on the seed and on the step it begins at, so a resumed run has another one.

        Raises ConfigError where the corpus is too small for one step.
        """
        while True:
            batches = 0
            random = Random(f"{self.config.seed}/{self.progress.epoch}/{self.progress.step}")
            shards = [(data, i) for data in self.data for i in range(data.train.num_shards)]
            random.shuffle(shards)
            for start in range(0, len(shards), SHARDS_AT_ONCE):
                some = shards[start : start + SHARDS_AT_ONCE]
                samples = [rows for data, i in some for rows in self._shard(data, i, random)]
                random.shuffle(samples)
                for batch in self._groups(samples):
                    batches += 1
                    yield batch
            if batches == 0:
                few = f"the corpus has fewer than {self.config.tokens_per_step} tokens to train on"
                raise ConfigError("tokens_per_step", f"{few}: make more answers, or lower this")
            self.progress.epoch += 1

    def _shard(self, data: Data, shard: int, random: Random) -> list[SampleRows]:
        """Those samples of a shard that this epoch has."""
        shares = self.config.shares
        kept = [random.random() < share_of(sample.source, shares) for sample in data.train.of_shard(shard)]
        return [rows for rows, keep in zip(self._read(data.train, shard), kept, strict=True) if keep]

    def _groups(self, samples: Sequence[SampleRows]) -> Iterator[Batch]:
        group: list[SampleRows] = []
        size = 0
        for sample in samples:
            group.append(sample)
            size += len(sample.token_ids) - 1 - first_column(sample, self._framing)
            if size >= self.config.tokens_per_step:
                yield collate(group, self.hidden_size, self._framing).to(self.device)
                group, size = [], 0

    # ---- judging

    def evaluate(self) -> Acceptance:
        """Greedy acceptance on the held-out greedy answers."""
        if self._held_out is None:
            self._held_out = [batch for data in self.data for batch in self._greedy_answers(data)]
        total = Acceptance(0, [0] * self.head.num_steps)
        for batch in self._held_out:
            found = acceptance_of(self.head, batch, self.target)
            total.starts += found.starts
            total.accepted = [a + b for a, b in zip(total.accepted, found.accepted, strict=True)]
        return total

    def _greedy_answers(self, data: Data) -> Iterator[Batch]:
        rows = [r for i in range(data.held_out.num_shards) for r in self._read(data.held_out, i)]
        greedy = [r for r, s in zip(rows, data.corpus.held_out, strict=True) if s.greedy]
        for start in range(0, len(greedy), EVAL_BATCH):
            yield collate(greedy[start : start + EVAL_BATCH], self.hidden_size).to(self.device)

    # ---- the loop

    def run(self, report: Callable[[Progress, float], None] = lambda progress, share: None) -> Acceptance:
        """Train until a bound is reached; ``report`` is called after every step with the share done."""
        start, first, config = time.monotonic(), self.progress.step, self.config
        before, saved = self.progress.seconds, start
        self._record(self.evaluate(), [], 0.0)
        for batch in self._batches():
            now = time.monotonic()
            share = max((self.progress.step - first) / config.steps, (now - start) / 60 / config.minutes)
            if share >= 1.0:
                break
            losses, norm = self._step(batch, self._rate(self.progress.step - first, share))
            self.progress.step += 1
            self.progress.tokens += sum(batch.column_counts)
            self.progress.seconds = before + time.monotonic() - start
            if self.progress.step % config.eval_every == 0:
                self._record(self.evaluate(), losses, norm)
            if now - saved > config.save_every_s:
                self.save()
                saved = now
            report(self.progress, share)
        found = self.evaluate()
        self._record(found, [], 0.0)
        self.save()
        return found

    def _rate(self, steps: int, share: float) -> float:
        config = self.config
        warm = min(1.0, (steps + 1) / config.warmup_steps)
        left = min(1.0, (1.0 - share) / config.decay_share)
        return config.learning_rate * min(warm, left)

    def _step(self, batch: Batch, learning_rate: float) -> tuple[list[float], float]:
        labels = labels_of(batch, self.target)
        count = min(self.config.draft_steps or self.head.num_steps, self.head.num_steps)
        loss, parts = loss_of(self.head, batch, self.target, labels, self.config.step_decay, count)
        torch.autograd.backward(loss)
        return parts, self.mixed.step(learning_rate, self.config.clip)

    def _record(self, found: Acceptance, losses: list[float], norm: float) -> None:
        entry = {
            "step": self.progress.step,
            "tokens": self.progress.tokens,
            "seconds": round(self.progress.seconds),
            "acceptance_length": round(found.length, 4),
            "accepted_per_position": [round(x, 4) for x in found.per_position],
            "loss": [round(x, 4) for x in losses],
            "grad_norm": round(norm, 3),
        }
        self.progress.history.append(entry)
