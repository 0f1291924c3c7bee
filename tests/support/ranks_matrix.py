"""The matrix of nodes of several ranks: tiny models, drafters, requests of all kinds, and what one rank answers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from paceline.engine.model_runner import ModelRunner
from paceline.models.config import ModelSpec
from paceline.request import SequenceRequest, SpeculationParams
from tests.support.adversaries import Adversary
from tests.support.exactness import Outcome, run
from tests.support.thread_ranks import family_spec, ranks_runner, ranks_spec
from tests.support.tiny_deepseek import write_mtp_folder
from tests.support.tiny_model import tiny_request
from tests.support.untrained_heads import write_tiny_head

SPECS: dict[str, ModelSpec] = {
    "8 KV heads": ranks_spec(8),
    "2 KV heads": ranks_spec(2),
    "1 KV head": ranks_spec(1),
    "latents and experts": family_spec("deepseek_v3"),
}
WHOLE = ("8 KV heads", "2 KV heads", "latents and experts")  # models of the whole matrix
FORMATS = ("bf16", "fp32")
DEGREES = (1, 2, 4, 8)
UNEQUAL = tuple((prefill, decode) for prefill in DEGREES for decode in DEGREES if prefill != decode)
LINKS = ("direct", "through-0")
PROMPT = 57
KNOWING = "right behind wrong"  # a drafter that knows the answers: whatever is accepted must be compacted
SHAPES: dict[str, tuple[SpeculationParams, ...]] = {  # what requests of a deployment ask for in turn
    "chain": (SpeculationParams(num_draft_tokens=0), SpeculationParams()),
    "dynamic": (
        SpeculationParams(num_draft_tokens=0),
        *(SpeculationParams(tree=tree) for tree in ("chain", "static", "dynamic")),
    ),
}


def drafters(model: str) -> tuple[str, ...]:
    """Those with state that a hand-off carries; "x2" has two MTP modules."""
    return ("mtp", "eagle", "eagle3", "medusa", "draft_model", *(["mtp x2"] if SPECS[model].mla else []))


def requests(tree: str = "dynamic") -> list[SequenceRequest]:
    """Four, without drafts, with chains and with trees, of temperature 0 and 1. tree: the deployment's."""
    shapes = SHAPES[tree]
    asked = [
        tiny_request(list(range(3 + i, 3 + PROMPT + i)), index=i, max_tokens=8, temperature=float(i % 2))
        for i in range(4)
    ]
    return [replace(request, speculation=shapes[i % len(shapes)]) for i, request in enumerate(asked)]


@dataclass
class OneRank:
    """Weights of drafters, and what a node of one rank answers to ``requests``; each is made when it is first asked
    for."""

    folder: Path
    answers: dict[tuple[object, ...], list[Outcome]] = field(default_factory=dict)

    def options(self, model: str, drafter: str, tree: str = "dynamic") -> dict[str, object]:
        """Options of a node with the drafter, for `ranks_runner`."""
        if drafter in ("none", KNOWING):
            return {"drafter": "none", "tree": tree}
        spec, name, modules = SPECS[model], drafter.split()[0], 2 if "x2" in drafter else 1
        place = self.folder / model / drafter
        if not place.exists():
            if name == "mtp" and spec.mla:
                write_mtp_folder(place, modules, torch.bfloat16, spec=spec)
            else:
                write_tiny_head(place, name, spec)
        found: dict[str, object] = {"drafter": name, "drafter_path": str(place), "head_check": False, "tree": tree}
        return found | ({"mtp_modules": modules} if name == "mtp" else {})

    def runner(
        self, degree: int, model: str, dtype: str, drafter: str, tree: str = "dynamic", **options: object
    ) -> ModelRunner:
        """A node's, of ``degree`` ranks; ``options`` as `ranks_runner` has them."""
        runner = ranks_runner(degree, SPECS[model], dtype, **self.options(model, drafter, tree) | options)
        if drafter == KNOWING:
            asked = zip(requests(tree), self.outcomes(model, dtype, "none", tree), strict=True)
            answers = {(one.prompt_token_ids, one.params.temperature): plain.token_ids for one, plain in asked}
            runner.drafter = Adversary(KNOWING, answers, SPECS[model].vocab_size)
        return runner

    def outcomes(
        self, model: str, dtype: str, drafter: str, tree: str = "dynamic", kv_dtype: str = "auto"
    ) -> list[Outcome]:
        """Those of ``requests(tree)``, run one after another."""
        key = (model, dtype, drafter, tree, kv_dtype)
        if key not in self.answers:
            runner = self.runner(1, model, dtype, drafter, tree, kv_dtype=kv_dtype)
            self.answers[key] = run(runner, requests(tree))
            runner.close()
        return self.answers[key]
