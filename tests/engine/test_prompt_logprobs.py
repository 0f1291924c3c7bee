"""Log-probabilities of a prompt's tokens: transformers' own within tolerance, and the same bits however made."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from paceline.assembly.build import build_runner
from paceline.config import NodeConfig
from paceline.engine import prompt_logprobs
from paceline.engine.colocated import ColocatedEngine
from paceline.engine.model_runner import ModelRunner
from paceline.request import SequenceRequest, TokenLogprobs
from paceline.sampling.logprobs import row_logprobs, token_logprobs
from paceline.serving.chunking import plan_chunks
from paceline.text.tokenizer import Tokenizer
from tests.support.needs import needs_kernels
from tests.support.tiny_chat import CHAT_VOCAB
from tests.support.tiny_checkpoint import write_tiny_llama
from tests.support.tiny_model import tiny_request, tiny_runner

LONG = [(17 * i + 3) % 199 for i in range(150)]
VARIANTS: dict[str, tuple[dict[str, object], int]] = {
    "chunks of 1": ({"drafter": "none"}, 1),
    "chunks of 7": ({"drafter": "mtp"}, 7),
    "chunks of 64": ({"drafter": "mtp", "page_size": 1}, 64),
    "mtp x3": ({"drafter": "mtp", "mtp_modules": 3, "num_draft_tokens": 3}, 50),
    "no prefix cache": ({"drafter": "ngram", "prefix_cache": False}, 149),
}


def requests(top: int = 3) -> list[SequenceRequest]:
    prompts = [None, LONG, [7], [7, 9], LONG[:65]]
    return [tiny_request(p, index=i, max_tokens=3, prompt_logprobs=top) for i, p in enumerate(prompts)]


def told(runner: ModelRunner, asked: list[SequenceRequest], chunk_tokens: int = 1000) -> list[list[TokenLogprobs]]:
    return [done.prompt_logprobs for done in ColocatedEngine(runner, chunk_tokens=chunk_tokens).generate(asked)]


@needs_kernels
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_bits_do_not_depend_on_chunks_pieces_or_cache(
    dtype: str, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = told(tiny_runner(dtype, drafter="none", prefix_cache=False), requests())
    assert [len(of_one) for of_one in expected] == [len(r.prompt_token_ids) - 1 for r in requests()]
    options, chunk_tokens = VARIANTS[variant]
    runner = tiny_runner(dtype, **options)
    ColocatedEngine(runner).generate([replace(r, params=replace(r.params, prompt_logprobs=None)) for r in requests()])
    for rows in (64, 5):  # of logits at once; the prompts are in the prefix cache
        monkeypatch.setattr(prompt_logprobs, "LOGITS_ROWS", rows)
        monkeypatch.setattr(prompt_logprobs, "SOFTMAX_ROWS", 1 + rows // 4)
        assert told(runner, requests(), chunk_tokens) == expected
    assert runner.allocator.check_integrity(runner.prefix.pages if runner.prefix else ()) == []


def test_several_prompts_in_a_step() -> None:
    """As nodes run them: chunks of more than one prompt in a forward."""
    expected = told(tiny_runner(drafter="none"), requests())
    runner = tiny_runner(drafter="mtp")
    plain = tiny_request(LONG[20:70], index=9)
    seqs = [runner.new_sequence(request) for request in (*requests(), plain)]
    got: list[list[TokenLogprobs]] = [[] for _ in seqs]
    for seq in seqs:
        seq.table.ensure(seq.num_prefill + 1)
    while open_seqs := [seq for seq in seqs if seq.num_computed < seq.num_prefill]:
        runner.prefill(plan_chunks(open_seqs, 60))
        for made, seq in zip(got, seqs, strict=True):
            first, entries = seq.take_prompt_logprobs()
            assert first == len(made) + 1 or not entries
            made += entries
    assert got == [*expected, []]


def test_a_replay_tells_of_the_prompt_alone() -> None:
    runner = tiny_runner(drafter="none")
    request = tiny_request(LONG[:20], max_tokens=9, prompt_logprobs=1)
    expected = told(runner, [request])
    for chunk_tokens in (3, 1000):
        assert told(runner, [replace(request, output_token_ids=(5, 6, 7, 8))], chunk_tokens) == expected


def test_no_more_rows_of_logits_are_held_than_said(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = tiny_runner(drafter="none")
    seen: list[int] = []
    logits = runner.model.logits

    def counting(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(hidden.shape[0])
        return logits(hidden)

    monkeypatch.setattr(runner.model, "logits", counting)
    told(runner, [tiny_request(LONG, max_tokens=1, prompt_logprobs=0)])
    assert seen == [1, 64, 64, 21]  # the first token, then the prompt


def test_a_request_that_does_not_ask_pays_nothing_and_uses_the_cache() -> None:
    runner = tiny_runner(drafter="none")
    told(runner, [tiny_request(LONG, max_tokens=1, prompt_logprobs=0)])
    (done,) = ColocatedEngine(runner).generate([tiny_request(LONG, max_tokens=1)])
    assert done.cached_tokens > 100  # what the one before it left
    assert done.prompt_logprobs == []


@pytest.mark.parametrize("top", [0, 1, 5, 50])
def test_rows_together_and_one_by_one(top: int) -> None:
    logits = torch.randn(21, 50, generator=torch.Generator().manual_seed(3))
    logits[4, 7] = logits[4, 9] = 9.0  # a tie
    tokens = [i * 13 % 50 for i in range(21)]
    assert row_logprobs(logits, tokens, top) == [token_logprobs(logits[i], tokens[i], top) for i in range(21)]


# -- transformers --------------------------------------------------------------------------------------------------


def check(entries: list[TokenLogprobs], expected: torch.Tensor, tokens: list[int], most: float) -> None:
    """expected: log-probabilities at every place but the last, float64 [len(tokens) - 1, V]."""
    assert len(entries) == len(tokens) - 1
    for row, entry, token_id in zip(expected, entries, tokens[1:], strict=True):
        assert entry.logprob == pytest.approx(float(row[token_id]), abs=most)
        assert list(entry.top_logprobs) == pytest.approx(row[list(entry.top_ids)].tolist(), abs=most)
        assert list(entry.top_logprobs) == pytest.approx(row.topk(len(entry.top_ids)).values.tolist(), abs=2 * most)


def reference(folder: Path, tokens: list[int]) -> torch.Tensor:
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([tokens])).logits[0, :-1]
    return torch.log_softmax(logits.double(), dim=1)


@pytest.mark.filterwarnings("ignore")  # transformers' own
def test_a_tiny_checkpoint_against_transformers(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path)
    tokens = [(17 * i * i + 5 * i + 3) % CHAT_VOCAB for i in range(90)]
    runner = build_runner(NodeConfig(model=str(tmp_path), drafter="none", dtype="fp32", kv_cache_tokens=512))
    (entries,) = told(runner, [tiny_request(tokens, max_tokens=1, prompt_logprobs=4)], 37)
    check(entries, reference(tmp_path, tokens), tokens, 1e-4)


@pytest.mark.real_model
@pytest.mark.filterwarnings("ignore")
def test_the_real_model_against_transformers(smollm2_folder: Path) -> None:
    tokens = Tokenizer.from_folder(smollm2_folder).encode("The river that flows through Paris is called the Seine.")
    expected = reference(smollm2_folder, tokens)
    dtypes: tuple[tuple[Literal["fp32", "bf16"], float], ...] = (
        ("fp32", 1e-3),
        ("bf16", 0.4),
    )  # its rounding, at the least likely of five
    for dtype, most in dtypes:
        gc.collect()  # two of this size at once fill a worker
        options = {"model": str(smollm2_folder), "drafter": "none", "dtype": dtype, "kv_cache_tokens": 512}
        runner = build_runner(NodeConfig.model_validate(options))
        (entries,) = told(runner, [tiny_request(tokens, max_tokens=1, prompt_logprobs=5)], 7)
        check(entries, expected, tokens, most)
        del runner
