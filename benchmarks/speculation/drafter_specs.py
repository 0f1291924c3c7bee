"""``--drafters none,ngram:k=8,eagle3:tree=dynamic,width=4``: what to compare, and a runner for each on one target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import ValidationError

from paceline.assembly.build import assemble
from paceline.assembly.measure import measure_costs
from paceline.assembly.shipped import with_real_drafter
from paceline.config import NodeConfig
from paceline.engine.model_runner import ModelRunner, RunnerIdentity
from paceline.errors import ConfigError
from paceline.layers.build import kernel_set, set_threads
from paceline.models.base import TargetModel
from paceline.models.digest import weights_digest
from paceline.models.registry import DTYPES, load_target
from paceline.speculation import AUTO, DEFAULT

BASELINE = "none"
OPTIONS = {
    "k": "num_draft_tokens",
    "tree": "tree",
    "width": "tree_width",
    "nodes": "tree_nodes",
    "above": "expand_above",
    "path": "drafter_path",
    "modules": "mtp_modules",
    "acceptance": "acceptance",
    "sampling": "draft_sampling",
    "adaptive": "adaptive",
    "confidence": "min_confidence",
}
SPARE_SLOTS = 64  # tokens of the pool beyond what sequences and trees need: page ends, the self-check's probe
MIN_POOL_TOKENS = 256


@dataclass(frozen=True)
class DraftRun:
    """One item of ``--drafters``: a drafter with its options, and the text it is called by in the results."""

    label: str
    drafter: str
    options: tuple[tuple[str, str], ...] = ()  # NodeConfig's names, values as written

    def config(self, model: str, **shared: object) -> NodeConfig:
        """Its NodeConfig. Raises ConfigError naming the item."""
        values: dict[str, object] = {"model": model, "drafter": self.drafter} | dict(self.options) | shared
        try:
            return NodeConfig.model_validate(values)
        except ValidationError as error:
            first = error.errors()[0]
            field = f"{first['loc'][0]}: " if first["loc"] else ""
            raise ConfigError("drafters", f"{self.label!r}: {field}{first['msg']}") from None

    @property
    def adaptive(self) -> bool:
        """Whether the draft length follows the load, or what drafts are worth."""
        return self.drafter in (AUTO, DEFAULT) or (self.drafter != BASELINE and self.config("any").adaptive != "off")


def parse_drafters(text: str) -> list[DraftRun]:
    """The items of ``--drafters``; ``none`` is put first when missing, for it is what the others are compared with.

    A comma ends an item, unless what follows is an ``option=value`` without a drafter's name. Raises ConfigError.
    """
    items: list[str] = []
    for piece in (p.strip() for p in text.split(",")):
        if not piece:
            raise ConfigError("drafters", f"an empty item in {text!r}")
        if "=" in piece and ":" not in piece.partition("=")[0]:
            if not items:
                raise ConfigError("drafters", f"{piece!r} stands before any drafter")
            items[-1] += ("," if ":" in items[-1] else ":") + piece
        else:
            items.append(piece)
    runs = [_parse_item(item) for item in items]
    if BASELINE not in (run.label for run in runs):
        runs.insert(0, DraftRun(BASELINE, BASELINE))
    labels = [run.label for run in runs]
    for label in labels:
        if labels.count(label) > 1:
            raise ConfigError("drafters", f"{label!r} is listed twice")
    return runs


def _parse_item(item: str) -> DraftRun:
    name, _, rest = item.partition(":")
    options: dict[str, str] = {}
    for pair in rest.split(",") if rest else ():
        key, equals, value = pair.partition("=")
        if key not in OPTIONS or not equals or not value:
            raise ConfigError("drafters", f"{item!r}: {pair!r} is none of {', '.join(f'{o}=' for o in OPTIONS)}")
        if OPTIONS[key] in options:
            raise ConfigError("drafters", f"{item!r}: {key} is given twice")
        options[OPTIONS[key]] = value
    run = DraftRun(item, name, tuple(options.items()))
    run.config("any")  # refuses unknown names and values before anything is loaded
    return run


@dataclass(frozen=True)
class Target:
    """The model under test, loaded once and shared by every drafter's runner."""

    name: str
    dtype: str
    device: str
    threads: int
    model: TargetModel
    identity: RunnerIdentity

    @classmethod
    def load(cls, folder: Path, name: str, *, dtype: str, device: str, threads: int) -> Target:
        """Raises ConfigError naming the option that is wrong."""
        if dtype not in DTYPES:
            raise ConfigError("dtype", f"must be one of {', '.join(DTYPES)}, got {dtype!r}")
        if torch.device(device).type == "cuda" and not torch.cuda.is_available():
            raise ConfigError("device", "cuda needs a CUDA build of torch and a GPU")
        torch.set_num_threads(threads)
        set_threads(threads)
        model = load_target(folder, DTYPES[dtype], torch.device(device))
        return cls(name, dtype, device, threads, model, RunnerIdentity(name, weights_digest(folder), kernel_set()))

    def runner(self, run: DraftRun, *, batch: int, sequence_tokens: int, measured: bool = True) -> ModelRunner:
        """A runner of its own pool, large enough for ``batch`` sequences of ``sequence_tokens``. ``default`` and
        ``auto`` are those of a deployment.

        No prefix cache: every prompt is prefilled, as if it were new.
        """
        shared = {"dtype": self.dtype, "device": self.device, "threads": self.threads, "prefix_cache": False}
        config = with_real_drafter(run.config(self.name, **shared))
        # Twice the tree: a drafter may write slots of its own beside the target's (Drafter.draft_slots).
        each = sequence_tokens + 2 * (1 + config.nodes_budget + config.num_draft_tokens) + SPARE_SLOTS
        pool = max(MIN_POOL_TOKENS, batch * each)
        config = with_real_drafter(run.config(self.name, **shared, kv_cache_tokens=pool))
        runner = assemble(config, self.model, self.identity)
        if measured and (config.adaptive == "goodput" or config.drafter == AUTO):
            measure_costs(runner, batch)  # as a node does at start
        return runner

    def check(self, runs: Sequence[DraftRun]) -> None:
        """Assemble each run once, small: a missing head file is found before the first prompt, not after an hour."""
        for run in runs:
            self.runner(run, batch=1, sequence_tokens=1, measured=False)
