"""``paceline quantize``: a folder of rounded weights, and a card that says what the rounding cost."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from paceline.assembly.build import build_runner
from paceline.assembly.calibrate import LENGTH, SEQUENCES, calibrated, check_family, in_sequences, own_text, smoothed
from paceline.assembly.selfcheck import logits_in_chunks
from paceline.config import NodeConfig
from paceline.engine.colocated import ColocatedEngine
from paceline.engine.model_runner import ModelRunner
from paceline.errors import ConfigError
from paceline.models.hub import resolve_model
from paceline.models.quantization.round_to_nearest import GROUP_SIZE
from paceline.models.smoothed import Factors
from paceline.models.write_quantised import FourBits, Written, check_source, write_quantised
from paceline.request import SamplingParams, SequenceRequest
from paceline.speculation import NONE
from paceline.text.tokenizer import Tokenizer

Progress = Callable[[str, float], None]
Method = Literal["nearest", "gptq", "smooth", "smooth-gptq"]
CALIBRATED = {
    "gptq": "rounded by GPTQ",
    "smooth": "smoothed and rounded to the nearest code",
    "smooth-gptq": "smoothed and rounded by GPTQ",
}  # and what cards say of them
HELD_TEXT = Path(__file__).with_name("held_text.txt")  # written for this card, under Paceline's own licence
MAX_TEXT_TOKENS, CHUNK = 768, 128
MAX_ANSWER_TOKENS = 32
PROMPTS = (
    "The capital of France is",
    "To boil an egg, first",
    "The three primary colours are",
    "In 1969, two people walked on the moon, and",
)


@dataclass(frozen=True)
class Job:
    """Options of a run."""

    model: str
    scheme: str
    output: Path
    method: Method = "nearest"
    calibration: Path | None = None  # None: text that the model writes itself
    text: Path = HELD_TEXT
    threads: int = 1
    group_size: int = GROUP_SIZE  # of schemes of 4 bits


@dataclass(frozen=True)
class _Seen:
    """What a model says to the texts of the card."""

    log_probs: torch.Tensor  # float32 [tokens, vocab_size], of the held text
    answers: list[list[int]]  # greedy, of PROMPTS


@dataclass(frozen=True)
class Cost:
    """What rounding changed."""

    perplexity_before: float
    perplexity_after: float
    divergence: float  # nats a token: KL from the model of floats to the rounded one, mean over the held text
    same_choices: float  # share of the held text's positions where both would choose the same token
    same_answers: float  # share of greedy tokens before the first difference, over PROMPTS
    tokens: int  # of the held text


def quantise(job: Job, progress: Progress) -> tuple[Written, Cost]:
    """Write ``job.output``, which must not exist. Raises ConfigError; nothing is left of a run that fails."""
    if job.output.exists():
        raise ConfigError("output", f"{job.output} exists already")
    _check_method(job)
    source = resolve_model(job.model, progress)
    check_source(source, job.scheme, job.group_size)
    if job.method in CALIBRATED:
        check_family(source)
    ids = _held_ids(job, source)
    try:
        job.output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=job.output.parent, prefix=f".{job.output.name}.tmp-") as scratch:
            folder = Path(scratch) / "folder"
            folder.mkdir()
            written = _written(job, source, folder, progress)
            before = _see(job, source, ids, progress, "measuring the model of floats")
            after = _see(job, folder, ids, progress, "measuring the rounded model")
            cost = compare(before, after, ids)
            (folder / "README.md").write_text(card(job, written, cost), encoding="utf-8")
            folder.rename(job.output)
    except OSError as error:
        raise ConfigError("output", f"{job.output} could not be written: {error}") from error
    return written, cost


def _check_method(job: Job) -> None:
    if "gptq" in job.method and not job.scheme.startswith("w4"):
        told = f"{job.method} makes codes of 4 bits (w4a8, w4a16), and the scheme is {job.scheme!r}"
        raise ConfigError("method", told)
    if job.calibration is not None and job.method not in CALIBRATED:
        raise ConfigError("calibration", f"method {job.method} does not calibrate ({', '.join(CALIBRATED)} do)")
    if job.calibration is not None and job.calibration.resolve() == job.text.resolve():
        raise ConfigError("calibration", "the text that measures cannot be the one that calibrates")


def _held_ids(job: Job, source: Path) -> list[int]:
    return _ids_of(job.text, "text", source, 2)[:MAX_TEXT_TOKENS]


def _ids_of(file: Path, option: str, source: Path, least: int) -> list[int]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(option, f"{file} cannot be read: {error}") from None
    ids = Tokenizer.from_folder(source).encode(text)
    if len(ids) < least:
        raise ConfigError(option, f"{file} has {len(ids)} tokens, fewer than {least}")
    return ids


def _written(job: Job, source: Path, folder: Path, progress: Progress) -> Written:
    codes, factors = dict[str, FourBits](), dict[str, Factors]()
    if job.method in CALIBRATED:
        sequences = _sequences(job, source, progress)
        if "smooth" in job.method:
            factors = smoothed(source, sequences, job.scheme, progress, job.group_size)
            gc.collect()  # one model at a time
        if "gptq" in job.method:
            codes = calibrated(source, sequences, progress, factors, job.group_size)
            gc.collect()
    return write_quantised(source, folder, job.scheme, progress, codes, factors, job.group_size)


def _sequences(job: Job, source: Path, progress: Progress) -> list[list[int]]:
    if job.calibration is not None:
        return in_sequences(_ids_of(job.calibration, "calibration", source, LENGTH))
    progress("writing text to calibrate on", 0.0)
    runner = _runner(job, source)
    sequences = own_text(runner)
    del runner
    gc.collect()  # one model at a time
    progress("writing text to calibrate on", 1.0)
    return sequences


def _runner(job: Job, folder: Path) -> ModelRunner:
    config = NodeConfig(model=str(folder), drafter=NONE, adaptive="off", threads=job.threads)
    return build_runner(config.model_copy(update={"head_check": False}))


def _see(job: Job, folder: Path, ids: list[int], progress: Progress, what: str) -> _Seen:
    progress(what, 0.0)
    runner = _runner(job, folder)
    ids = ids[: min(runner.limits.max_model_len, len(ids))]
    seen = _Seen(_log_probs(runner, ids), _answers(runner, Tokenizer.from_folder(folder)))
    del runner
    gc.collect()  # one model at a time
    progress(what, 1.0)
    return seen


def _log_probs(runner: ModelRunner, ids: list[int]) -> torch.Tensor:
    chunks = tuple(min(CHUNK, len(ids) - start) for start in range(0, len(ids), CHUNK))
    logits = logits_in_chunks(runner.model, runner.kv, runner.allocator, runner.attention, ids, chunks)
    return logits.cpu().log_softmax(dim=-1)


def _answers(runner: ModelRunner, tokenizer: Tokenizer) -> list[list[int]]:
    greedy = SamplingParams(temperature=0.0, seed=0, max_tokens=MAX_ANSWER_TOKENS)
    asked = [SequenceRequest(f"q{i}", tuple(tokenizer.encode(p)), greedy) for i, p in enumerate(PROMPTS)]
    return [list(done.token_ids) for done in ColocatedEngine(runner).generate(asked)]


def compare(before: _Seen, after: _Seen, ids: list[int]) -> Cost:
    """Figures of the card. ids: the held text."""
    old, new = before.log_probs, after.log_probs
    targets = torch.tensor(ids[1 : len(old)])

    def perplexity(log_probs: torch.Tensor) -> float:
        return float(-log_probs[:-1].gather(1, targets.unsqueeze(1)).mean()) if len(targets) else 0.0

    kept = [_common(a, b) for a, b in zip(before.answers, after.answers, strict=True)]
    return Cost(
        perplexity_before=float(torch.tensor(perplexity(old)).exp()),
        perplexity_after=float(torch.tensor(perplexity(new)).exp()),
        divergence=float((old.exp() * (old - new)).sum(dim=1).mean()),
        same_choices=float((old.argmax(dim=1) == new.argmax(dim=1)).float().mean()),
        same_answers=sum(kept) / max(1, sum(len(answer) for answer in before.answers)),
        tokens=len(old),
    )


def _common(first: list[int], second: list[int]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


def card(job: Job, written: Written, cost: Cost) -> str:
    """README.md of the folder."""
    change = cost.perplexity_after / cost.perplexity_before - 1.0
    groups = f" --group-size {job.group_size}" if job.group_size != GROUP_SIZE else ""
    command = f"paceline quantize {job.model} --scheme {job.scheme}{groups} --output {job.output}"
    how, norms = "rounded to the nearest code", "norms"
    if job.method in CALIBRATED:
        command += f" --method {job.method}" + (f" --calibration {job.calibration}" if job.calibration else "")
        seen = job.calibration.name if job.calibration else "text that it wrote itself"
        how = f"{CALIBRATED[job.method]}, calibrated on at most {SEQUENCES * LENGTH:,} tokens of {seen}"
    if "smooth" in job.method:
        norms = "norms but for factors"
    return f"""# {job.output.name}

{job.model} with its linear layers {how}, scheme `{job.scheme}`, in compressed-tensors' layout.

| | floats | rounded |
|---|---|---|
| bytes of the weights | {written.bytes_before:,} | {written.bytes_after:,} |
| perplexity on {cost.tokens} held tokens of {job.text.name} | {cost.perplexity_before:.3f} | \
{cost.perplexity_after:.3f} ({change:+.2%}) |

- {written.layers} layers were rounded. Embedding, LM head, {norms} and routers are as they were.
- KL from the model of floats, mean over the held text: {cost.divergence:.5f} nats a token.
- Both choose the same token at {cost.same_choices:.1%} of the held text's positions.
- Greedy answers to {len(PROMPTS)} prompts of {MAX_ANSWER_TOKENS} tokens are the same up to {cost.same_answers:.1%} of \
their tokens.

The model of floats was measured in bf16. The command:

```sh
{command}
```
"""
