"""What ``paceline bench`` does between its options and its outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from benchmarks import plots, tables
from benchmarks.speculation import bench as speculation
from benchmarks.speculation import sweep
from benchmarks.speculation.bench import Progress, Settings
from benchmarks.speculation.drafter_specs import DraftRun, Target, parse_drafters
from benchmarks.speculation.prompts import Encoder, Prompt, balanced, drop_long, lengthened, read_prompts
from paceline.errors import ConfigError
from paceline.models.config import ModelSpec
from paceline.request import SequenceRequest
from paceline.text.tokenizer import Tokenizer

MAX_BATCH = 1024


@dataclass(frozen=True)
class Outputs:
    """Files to write. Without ``plot`` it is drawn beside ``json``, where matplotlib is installed."""

    json: Path | None = None
    plot: Path | None = None
    markdown: Path | None = None

    def check(self) -> None:
        """Before an hour of work: raises ConfigError when one of them could not be written."""
        for key, path in (("json", self.json), ("plot", self.plot), ("markdown", self.markdown)):
            if path is not None and not path.absolute().parent.is_dir():
                raise ConfigError(key, f"{path.parent} is no folder")
        if self.plot is not None:
            plots.load_matplotlib()

    def write(self, results: str, grid: tables.Grid, draw: Callable[[Path], None], console: Console) -> None:
        """Print the table, write what was asked for."""
        console.print(tables.rich_table(grid))
        if self.json is not None:
            self.json.write_text(results + "\n", encoding="utf-8")
        if self.markdown is not None:
            self.markdown.write_text(tables.markdown(grid), encoding="utf-8")
        if self.plot is not None:
            draw(self.plot)
        elif self.json is not None:
            try:
                draw(self.json.with_suffix(".png"))
            except ConfigError as error:
                console.print(f"no plot: {error.message}")


@dataclass(frozen=True)
class Inputs:
    """Prompts and drafters, checked against the model's folder; nothing heavy is loaded yet."""

    folder: Path
    settings: Settings  # max_prompt_tokens is what fits the model
    runs: list[DraftRun]
    prompts: list[Prompt]
    dropped: dict[str, int]
    tokenizer: Tokenizer
    encoder: Encoder

    @classmethod
    def read(
        cls,
        folder: Path,
        settings: Settings,
        runs: list[DraftRun],
        prompts: list[Prompt],
        limit: int | None,
        chat: bool,
    ) -> Inputs:
        """``limit`` counts after the prompts that are too long have gone. Raises ConfigError."""
        room = ModelSpec.from_folder(folder).max_model_len - settings.max_tokens
        if room < 1:
            raise ConfigError("max_tokens", f"{settings.max_tokens} leaves no room for a prompt in this model")
        settings = replace(settings, max_prompt_tokens=min(settings.max_prompt_tokens, room))
        tokenizer = Tokenizer.from_folder(folder)
        encoder = Encoder(tokenizer, chat=chat, max_prompt_tokens=settings.max_prompt_tokens)
        kept, dropped = drop_long(prompts, encoder)
        chosen = balanced(kept, limit)
        if settings.context:
            chosen = lengthened(chosen, encoder, settings.context)
        return cls(folder, settings, runs, chosen, dict(dropped), tokenizer, encoder)

    def load(self) -> Target:
        """The target model."""
        s = self.settings
        return Target.load(self.folder, s.model, dtype=s.dtype, device=s.device, threads=s.threads)

    def requests(self) -> list[SequenceRequest]:
        """The first turn of each prompt."""
        found = []
        for number, prompt in enumerate(self.prompts):
            ids = self.encoder.encode(prompt.turns[:1], ())
            assert ids is not None  # drop_long has gone over them
            params = self.settings.params(self.tokenizer.eos_token_ids, number)
            found.append(SequenceRequest(prompt.prompt_id, ids, params))
        return found


def parse_inputs(drafters: str, prompts: Path) -> tuple[list[DraftRun], list[Prompt]]:
    """What can be wrong without the model. Raises ConfigError."""
    return parse_drafters(drafters), read_prompts(prompts)


def parse_batches(text: str) -> list[int]:
    """``1,2,4`` as numbers, rising. Raises ConfigError."""
    try:
        sizes = sorted({int(size) for size in text.split(",")})
    except ValueError:
        raise ConfigError("batches", f"must be numbers separated by commas, got {text!r}") from None
    if sizes[0] < 1 or sizes[-1] > MAX_BATCH:
        raise ConfigError("batches", f"must be between 1 and {MAX_BATCH}, got {text!r}")
    return sizes


def run_speculation(inputs: Inputs, progress: Progress) -> speculation.Report:
    """Load the target, assemble every drafter, compare them at batch 1."""
    target, s = inputs.load(), inputs.settings
    longest = s.max_prompt_tokens + s.max_tokens
    runners = {run.label: target.runner(run, batch=1, sequence_tokens=longest) for run in inputs.runs}
    encoder, ends = inputs.encoder, inputs.tokenizer.eos_token_ids
    return speculation.compare(
        inputs.prompts, runners, s, encoder.encode, encoder.decode, ends, inputs.dropped, progress
    )


def run_sweep(inputs: Inputs, batches: Sequence[int], progress: Progress) -> sweep.SweepReport:
    """Load the target once, assemble every drafter for every batch size."""
    requests = inputs.requests()
    if not requests:
        raise ConfigError("prompts", "every prompt is longer than --max-prompt-tokens")
    longest = max(len(r.prompt_token_ids) for r in requests) + inputs.settings.max_tokens
    target = inputs.load()
    target.check(inputs.runs)
    return sweep.sweep(
        inputs.runs,
        batches,
        requests,
        lambda run, batch: target.runner(run, batch=batch, sequence_tokens=longest),
        inputs.settings,
        inputs.dropped,
        progress,
    )
