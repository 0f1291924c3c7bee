"""Runners over the real model, and its plain answers."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

from paceline.assembly.build import assemble, build_runner
from paceline.config import NodeConfig
from paceline.engine.model_runner import ModelRunner
from tests.support.exactness import Outcome, run
from tests.support.prompts import one_temperature_each, prompt_requests
from tests.support.worker_memory import give_back

NUM_PROMPTS, NUM_TOKENS = 12, 20


class Engines:
    """Runners over one loaded target, and its plain answers, made when they are asked for: no drafts, no prefix
    cache."""

    def __init__(self, folder: Path, dtype: str, batch: int) -> None:
        options = {"model": str(folder), "dtype": dtype, "drafter": "none", "threads": 1, "kv_cache_tokens": 5120}
        self.config = NodeConfig.model_validate(options)
        self.first = build_runner(self.config.model_copy(update={"kv_cache_tokens": 256, "max_model_len": 0}))
        self.requests = one_temperature_each(prompt_requests(folder, NUM_TOKENS))[:NUM_PROMPTS]
        self._batch = batch

    @cached_property
    def plain(self) -> list[Outcome]:
        """The answers that every variant must give."""
        return run(self.variant(prefix_cache=False), self.requests, batch=self._batch)

    def variant(self, **options: object) -> ModelRunner:
        """A runner with other options around the same weights."""
        config = NodeConfig.model_validate(self.config.model_dump() | options)
        return assemble(config, self.first.model, self.first.identity, self.first.grammars)

    def unload(self) -> None:
        """Give back the target and all pages; plain answers that were made stay."""
        del self.first
        give_back()
