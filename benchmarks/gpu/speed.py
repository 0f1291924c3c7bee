"""Rows of the GPU benchmark that generate: speculation over plain decoding, plain decoding over transformers."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.bench import TINY, Bench, Figure, Unavailable, prompt, request, why
from benchmarks.gpu.clock import Clock, Sample
from benchmarks.gpu.shapes import RandomWeights
from benchmarks.speculation.drafter_specs import DraftRun, Target
from benchmarks.speculation.synthetic import SyntheticDrafts
from paceline.engine.model_runner import ModelRunner
from paceline.errors import InvalidRequest
from paceline.request import SequenceRequest
from paceline.serving.chunking import plan_chunks
from paceline.spec_decode.heads.shipped import shipped_heads
from paceline.text.tokenizer import Tokenizer

PREFILL_ROWS = 8192
WARM_UP_TOKENS = 16
DRAFT_TOKENS = 4
SMOLLM2 = "smollm2-135m-instruct"
LENGTH_TOLERANCE = 0.35  # of the acceptance length that the table of rates promises, at a few hundred rounds
MARGIN = 0.15  # log-probability between the best two tokens: where text may part in bf16 over kernels of other shapes
QUESTIONS = (
    "What is the capital of France?",
    "Explain in three sentences how a bicycle stays upright.",
    "Write a short story about a lighthouse keeper.",
    "List five fruits and one fact about each.",
    "What is 12 plus 30? Explain each step.",
    "Give me a recipe for pancakes.",
    "Translate to French: the weather is nice today.",
    "Why is the sky blue?",
)


@dataclass(frozen=True)
class Generated:
    """What a batch came to, decode rounds alone."""

    token_ids: dict[str, tuple[int, ...]]  # output by request id, the first token (prefill's) included
    seconds: float
    tokens: int  # of the rounds
    rounds: int
    sequence_rounds: int

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of the whole batch."""
        return self.tokens / self.seconds

    @property
    def acceptance_length(self) -> float:
        """Tokens of a round, the bonus counted."""
        return self.tokens / self.sequence_rounds


def generate(runner: ModelRunner, requests: Seq[SequenceRequest], clock: Clock) -> Generated:
    """All requests together until the first is done, so that every round has the whole batch."""
    seqs = [runner.new_sequence(asked) for asked in requests]
    for seq in seqs:
        seq.table.ensure(seq.num_prefill + seq.request.params.max_tokens + runner.spec_slots)
    while any(seq.num_computed < seq.num_prefill for seq in seqs):
        runner.prefill(plan_chunks([seq for seq in seqs if seq.num_computed < seq.num_prefill], PREFILL_ROWS))
    before, rounds, began = sum(seq.num_output for seq in seqs), 0, clock.sync()
    while all(seq.finish_reason is None for seq in seqs):
        runner.decode(seqs)
        rounds += 1
    seconds = clock.sync() - began
    tokens = sum(seq.num_output for seq in seqs) - before
    found = {seq.request.request_id: tuple(seq.output_token_ids) for seq in seqs}
    for seq in seqs:
        runner.release(seq)
    return Generated(found, seconds, tokens, rounds, rounds * len(seqs))


def warmed(runner: ModelRunner, requests: Seq[SequenceRequest], clock: Clock) -> Generated:
    """A short run first: kernels are compiled and graphs captured."""
    short = [request(i, asked.prompt_token_ids, WARM_UP_TOKENS) for i, asked in enumerate(requests)]
    generate(runner, short, clock)
    return generate(runner, requests, clock)


def same_so_far(got: Generated, plain: Generated) -> list[str]:
    """Requests whose text differs from the plain one, as far as both go."""
    pairs = [(name, tokens, plain.token_ids[name]) for name, tokens in got.token_ids.items()]
    return [name for name, a, b in pairs if a[: min(len(a), len(b))] != b[: min(len(a), len(b))]]


def synthetic_speedup(bench: Bench, shape: str, batch: int, context: int, max_tokens: int) -> Figure:
    """Tokens per second with an EAGLE-3-shaped head whose drafts are right at a table's rates, over plain decoding.

    Both runs prefill their prompts in full; the text of both must be equal."""
    batch, context = bench.batch(shape, batch), bench.tokens(shape, context)
    max_tokens = max_tokens // 4 if shape == TINY else max_tokens
    vocab = bench.spec(shape).vocab_size
    requests = [request(i, prompt(i, context, vocab), max_tokens) for i in range(batch)]
    plain_runner = bench.runner(shape, batch, context + max_tokens, 0)
    plain = warmed(plain_runner, requests, bench.clock)
    del plain_runner
    runner = bench.runner(shape, batch, context + max_tokens, DRAFT_TOKENS, "eagle3")
    rates, seed = bench.options.rates, bench.options.seed
    drafts = SyntheticDrafts(runner.drafter, plain.token_ids, rates, seed, vocab)
    ours = warmed(runner, requests, bench.clock)
    expected = rates.acceptance_length(DRAFT_TOKENS)
    facts: dict[str, float | str] = {
        "batch": batch,
        "context": context,
        "acceptance_length": ours.acceptance_length,
        "acceptance_length_of_table": expected,
        "plain_tokens_per_s": plain.tokens_per_s,
        "tokens_per_s": ours.tokens_per_s,
        "requests_equal": f"{batch - len(same_so_far(ours, plain))}/{batch}",
    }
    samples = {
        "plain round": Sample((plain.seconds / plain.rounds,)),
        "round": Sample((ours.seconds / ours.rounds,)),
    }
    measured = (
        f"{ours.tokens_per_s:.0f} over {plain.tokens_per_s:.0f} tokens/s, {ours.acceptance_length:.2f} tokens a round"
    )
    hints = why(runner, samples["round"].median, None, None)
    cost = samples["round"].median / samples["plain round"].median
    hints += (
        f"a round costs {cost:.2f} plain steps; at {expected:.2f} tokens a round that gives {expected / cost:.2f} x",
    )
    return Figure(
        ours.tokens_per_s / plain.tokens_per_s,
        measured,
        samples,
        facts,
        hints,
        True,
        _wrong(ours, plain, drafts, expected),
    )


def _wrong(ours: Generated, plain: Generated, drafts: SyntheticDrafts, expected: float) -> str:
    if different := same_so_far(ours, plain):
        return f"the text of {len(different)} requests differs from the plain run"
    if not drafts.exchanged:
        return "no draft was exchanged: the runner does not ask the drafter's propose"
    if ours.sequence_rounds >= 100 and abs(ours.acceptance_length - expected) > LENGTH_TOLERANCE:
        return f"{ours.acceptance_length:.2f} tokens a round where the table promises {expected:.2f}"
    return ""


# ---- the real model


def smollm2(bench: Bench, batch: int, max_tokens: int) -> Figure:
    """The real model with the EAGLE-3 heads that ship, over plain decoding; acceptance is the heads' own."""
    if not bench.options.smollm2:
        raise Unavailable("needs --smollm2 FOLDER")
    folder, head = Path(bench.options.smollm2), shipped_heads(SMOLLM2, "eagle3")
    if head is None:
        raise Unavailable("no EAGLE-3 heads ship beside the packages")
    bench.unload()
    device, dtype = bench.options.device, bench.options.dtype
    target = Target.load(folder, SMOLLM2, dtype=dtype, device=device, threads=torch.get_num_threads())
    prompts = _prompts(folder)
    requests = [request(i, prompts[i % len(prompts)], max_tokens) for i in range(batch)]
    longest = max(len(p) for p in prompts) + max_tokens
    attention = ("attention", bench.options.attention)
    heads = (("drafter_path", str(head)), attention)
    runs = [DraftRun("none", "none", (attention,)), DraftRun("eagle3", "eagle3", heads)]
    runners = [bench.watched(target.runner(run, batch=batch, sequence_tokens=longest)) for run in runs]
    plain, ours = (warmed(runner, requests, bench.clock) for runner in runners)
    far = [name for name in same_so_far(ours, plain) if _margin(runners[0], requests, name, ours, plain) > MARGIN]
    facts: dict[str, float | str] = {
        "batch": batch,
        "acceptance_length": ours.acceptance_length,
        "plain_tokens_per_s": plain.tokens_per_s,
        "tokens_per_s": ours.tokens_per_s,
        "requests_equal": f"{batch - len(same_so_far(ours, plain))}/{batch}",
    }
    samples = {"plain round": Sample((plain.seconds / plain.rounds,)), "round": Sample((ours.seconds / ours.rounds,))}
    measured = (
        f"{ours.tokens_per_s:.0f} over {plain.tokens_per_s:.0f} tokens/s, {ours.acceptance_length:.2f} tokens a round, "
        f"{facts['requests_equal']} texts equal"
    )
    wrong = f"{len(far)} texts part where the best two tokens are more than {MARGIN} apart" if far else ""
    hints = why(runners[1], samples["round"].median, None, None)
    return Figure(ours.tokens_per_s / plain.tokens_per_s, measured, samples, facts, hints, wrong=wrong)


def _prompts(folder: Path) -> list[list[int]]:
    """QUESTIONS as the model's chat, where it has a template."""
    tokenizer = Tokenizer.from_folder(folder)
    try:
        return [tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in QUESTIONS]
    except InvalidRequest:
        return [tokenizer.encode(text) for text in QUESTIONS]


def _margin(runner: ModelRunner, requests: Seq[SequenceRequest], name: str, ours: Generated, plain: Generated) -> float:
    """Log-probability between the plain run's best two tokens where the texts part, computed plainly again."""
    asked = next(each for each in requests if each.request_id == name)
    pairs = zip(ours.token_ids[name], plain.token_ids[name], strict=False)
    at = next(i for i, (a, b) in enumerate(pairs) if a != b)
    text = (*asked.prompt_token_ids, *plain.token_ids[name][:at])
    seq = runner.new_sequence(request(0, text, 1))
    try:
        seq.table.ensure(len(text) + 1)
        found = []
        runner.observe_logits = lambda seq, position, logits: found.append(
            logits.float().log_softmax(-1).topk(2).values
        )
        runner.prefill(plan_chunks([seq], len(text)))
    finally:
        runner.observe_logits = None
        seq.table.release()
    return float(found[0][0] - found[0][1])


# ---- transformers


def over_transformers(bench: Bench, shape: str, batch: int, context: int, max_tokens: int) -> Figure:
    """Plain decoding over transformers' generate on the same weights, prefill taken off both."""
    if not bench.options.transformers:
        raise Unavailable("switched off by --no-transformers")
    if importlib.util.find_spec("transformers") is None:
        raise Unavailable("transformers is not installed here")
    batch, context = bench.batch(shape, batch), bench.tokens(shape, context)
    max_tokens = max_tokens // 4 if shape == TINY else max_tokens
    requests = [request(i, prompt(i, context, bench.spec(shape).vocab_size), max_tokens) for i in range(batch)]
    runner = bench.runner(shape, batch, context + max_tokens, 0)
    ours = warmed(runner, requests, bench.clock)
    hints = why(runner, ours.seconds / ours.rounds, None, None)
    del runner
    bench.free()
    whole, first, theirs = _their_seconds(bench, shape, requests, max_tokens)
    rate = batch * (max_tokens - 1) / (whole.median - first.median)
    equal = sum(theirs[asked.request_id] == ours.token_ids[asked.request_id] for asked in requests)
    facts: dict[str, float | str] = {
        "batch": batch,
        "context": context,
        "tokens_per_s": ours.tokens_per_s,
        "transformers_tokens_per_s": rate,
        "texts_equal": f"{equal}/{batch}",
    }
    samples = {"our round": Sample((ours.seconds / ours.rounds,)), "generate": whole, "generate 1": first}
    measured = f"{ours.tokens_per_s:.0f} over {rate:.0f} tokens/s, {equal}/{batch} texts equal"
    return Figure(ours.tokens_per_s / rate, measured, samples, facts, hints)


def _their_seconds(
    bench: Bench, shape: str, requests: Seq[SequenceRequest], max_tokens: int
) -> tuple[Sample, Sample, dict[str, tuple[int, ...]]]:
    """Seconds of the whole answer and of its first token, and their text."""
    model = transformers_model(bench, shape)
    ids = torch.tensor([asked.prompt_token_ids for asked in requests], device=bench.clock.device)
    mask = torch.ones_like(ids)

    def run(num: int) -> Any:
        with torch.inference_mode():
            return model.generate(
                ids, attention_mask=mask, do_sample=False, max_new_tokens=num, min_new_tokens=num, pad_token_id=0
            )

    text = run(max_tokens)[:, ids.shape[1] :].tolist()
    whole = bench.clock.wall(lambda: run(max_tokens), warm_up=0, repeats=3)
    first = bench.clock.wall(lambda: run(1), warm_up=1, repeats=3)
    return whole, first, {asked.request_id: tuple(row) for asked, row in zip(requests, text, strict=True)}


def transformers_model(bench: Bench, shape: str) -> Any:
    """transformers' own model with the weights of the shape."""
    from transformers import AutoConfig, AutoModelForCausalLM

    spec = bench.spec(shape)
    rope = dict(spec.rope_scaling or {"rope_type": "default"}) | {"rope_theta": spec.rope_theta}
    config = AutoConfig.for_model(
        spec.family,
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        rms_norm_eps=spec.rms_norm_eps,
        rope_parameters=rope,
        max_position_embeddings=spec.max_position_embeddings,
        tie_word_embeddings=spec.tie_word_embeddings,
        eos_token_id=None,
        bos_token_id=None,
    )
    with torch.device(bench.clock.device):
        model = AutoModelForCausalLM.from_config(config, dtype=bench.dtype).eval()
    weights = RandomWeights(spec, bench.dtype, bench.clock.device, bench.options.seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    return model
