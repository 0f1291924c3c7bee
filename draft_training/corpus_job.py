"""One corpus from options to a file: what ``paceline make-corpus`` runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from draft_training.answers import AnswerMaker, AnswerOptions, Made, read_prompts
from paceline.assembly.build import build_runner
from paceline.config import NodeConfig
from paceline.errors import ConfigError
from paceline.models.config import ModelSpec
from paceline.models.hub import resolve_model
from paceline.text.tokenizer import Tokenizer

PAGE = 16
PROBE_TOKENS = 128  # the start-up check of the kernels needs some room of its own


@dataclass(frozen=True)
class CorpusJob:
    """Options of a run."""

    model: str
    out: Path
    prompts: tuple[Path, ...] = ()
    self_made: int = 0
    max_answer_tokens: int = 256
    batch: int = 64
    seed: int = 0
    device: str = "cpu"
    threads: int = 1


def run_corpus_job(job: CorpusJob, report: Callable[[Made], None] = lambda made: None) -> Made:
    """Answer what ``job.out`` has no line for yet. Raises ConfigError naming the option."""
    prompts = [prompt for path in job.prompts for prompt in read_prompts(path)]
    if not prompts and not job.self_made:
        raise ConfigError("prompts", "there is nothing to answer: give a file of prompts, or --self-made")
    if job.device.partition(":")[0] not in ("cpu", "cuda"):
        raise ConfigError("device", f"{job.device!r} is neither cpu nor cuda")
    folder = resolve_model(job.model)
    options = answer_options(job, ModelSpec.from_folder(folder).max_model_len)
    tokenizer = Tokenizer.from_folder(folder)
    runner = build_runner(node_config(job, options, folder))
    return AnswerMaker(runner, tokenizer, tokenizer.eos_token_ids, options).run(prompts, job.out, report)


def answer_options(job: CorpusJob, max_model_len: int) -> AnswerOptions:
    """The job's, with prompts as long as the model's context leaves room for."""
    usual = AnswerOptions.max_prompt_tokens
    room = min(usual, max_model_len - job.max_answer_tokens)
    if room < 1:
        raise ConfigError("max_answer_tokens", f"{job.max_answer_tokens} fill the model's {max_model_len} tokens")
    return AnswerOptions(
        self_made=job.self_made,
        max_prompt_tokens=room,
        max_answer_tokens=job.max_answer_tokens,
        batch=job.batch,
        seed=job.seed,
    )


def node_config(job: CorpusJob, options: AnswerOptions, folder: Path) -> NodeConfig:
    """An engine without drafter: at this batch a verified draft token costs about as much as a decoded one."""
    pages_each = -(-options.max_tokens // PAGE) + 1  # a round writes a little past the last token
    return NodeConfig(
        model=str(folder),
        device=job.device,
        threads=job.threads,
        drafter="none",
        num_draft_tokens=0,
        page_size=PAGE,
        kv_cache_tokens=max(options.batch * pages_each * PAGE, PROBE_TOKENS),
        max_model_len=options.max_tokens,
        max_running=options.batch,
        prefix_cache=False,  # prompts share no more than the template's beginning
    )
