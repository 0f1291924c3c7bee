"""``python -m benchmarks.grammar``: what masks cost, and what forced drafts are worth, on this machine.

Two parts, each in one run so that its ratios hold whatever else the machine does. ``masks`` times the library beside
xgrammar where that can be imported. ``text`` generates JSON of schemas with and without grammar, forced drafts and a
drafter.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common.console import step
from benchmarks.common.schemas import SCHEMAS, Json
from benchmarks.common.timing import median_s
from paceline.assembly.build import build_runner
from paceline.config import NodeConfig
from paceline.engine.colocated import ColocatedEngine
from paceline.engine.model_runner import ModelRunner
from paceline.grammar.compile import GrammarCompiler
from paceline.grammar.cursor import GrammarCursor
from paceline.models.hub import resolve_model
from paceline.request import Grammar, GrammarKind, SamplingParams, SequenceRequest, SpeculationParams
from paceline.text.tokenizer import Tokenizer

OUTPUT_TOKENS = 128


# Masks ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MaskFigures:
    """One library over one schema."""

    library: str
    schema: str
    vocab_size: int
    compile_ms: float  # median of fresh compilations
    mask_us: float  # median over the tokens of the value
    worst_mask_us: float
    forced: float  # share of the tokens that the mask left no choice about


Walk = Callable[[list[int]], Iterator[tuple[float, int]]]  # for each token, seconds of its mask and tokens in it


def masks(folder: Path, vocab_size: int) -> list[MaskFigures]:
    """Every schema in every library that is here."""
    tokenizer = Tokenizer.from_folder(folder)
    makers = {"llguidance": _llguidance(folder, vocab_size)}
    if importlib.util.find_spec("xgrammar") is not None:
        makers["xgrammar"] = _xgrammar(folder, vocab_size, tokenizer.eos_token_ids)
    figures = list[MaskFigures]()
    for name, (schema, value) in SCHEMAS.items():
        tokens = tokenizer.encode(json.dumps(value))
        for library, make in makers.items():
            step(len(figures), len(SCHEMAS) * len(makers), f"{library}: {name}")
            compile_s = median_s(lambda make=make, schema=schema: make(schema))  # type: ignore[misc]
            walked = [one for _ in range(5) for one in make(schema)(tokens)]
            times = [1e6 * seconds for seconds, _ in walked]
            forced = sum(count == 1 for _, count in walked) / len(walked)
            figures.append(
                MaskFigures(library, name, vocab_size, 1e3 * compile_s, statistics.median(times), max(times), forced)
            )
    return figures


def _llguidance(folder: Path, vocab_size: int) -> Callable[[Json], Walk]:
    warm = GrammarCompiler(folder, vocab_size)
    warm.compile(Grammar(GrammarKind.JSON_OBJECT))

    def make(schema: Json) -> Walk:
        grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))
        warm.forget()
        compiled = warm.compile(grammar)

        def walk(tokens: list[int]) -> Iterator[tuple[float, int]]:
            cursor = GrammarCursor(compiled)
            for at in range(len(tokens)):
                began = time.perf_counter()
                mask = cursor.allowed(tokens[:at]).mask
                yield time.perf_counter() - began, int(mask.sum())

        return walk

    return make


def _xgrammar(folder: Path, vocab_size: int, eos: tuple[int, ...]) -> Callable[[Json], Walk]:
    xgrammar: Any = importlib.import_module("xgrammar")
    from transformers import PreTrainedTokenizerFast

    backend: Any = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    info = xgrammar.TokenizerInfo.from_huggingface(backend, vocab_size=vocab_size, stop_token_ids=list(eos))

    def make(schema: Json) -> Walk:
        compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        compiled = compiler.compile_json_schema(json.dumps(schema), any_whitespace=False)

        def walk(tokens: list[int]) -> Iterator[tuple[float, int]]:
            matcher = xgrammar.GrammarMatcher(compiled)
            bits = xgrammar.allocate_token_bitmask(1, vocab_size)
            for token in tokens:
                began = time.perf_counter()
                matcher.fill_next_token_bitmask(bits)
                seconds = time.perf_counter() - began
                yield seconds, int(sum((word & 0xFFFFFFFF).bit_count() for word in bits[0].tolist()))
                if not matcher.accept_token(token):
                    raise RuntimeError(f"xgrammar refuses token {token} of a value of the schema")

        return walk

    return make


# Text -----------------------------------------------------------------------------------------------------------------


PLAIN = "plain, grammar"  # what every other way is compared with


@dataclass(frozen=True)
class TextFigures:
    """One way to generate, over all schemas. Rounds alone: prompts, and the first tokens that they bring, do not
    count."""

    way: str
    tokens: int
    tokens_per_s: float
    against_plain: float  # times the tokens/s of PLAIN
    tokens_per_round: float  # the bonus counted
    mask_share: float  # of the seconds of the rounds that went to masks


def text(model: str, threads: int, repeats: int) -> list[TextFigures]:
    """Plain and drafted, with and without grammar; the ways take turns within each repetition."""
    folder = resolve_model(model)
    step(0, 2, "loading the model")
    plain = build_runner(plain_config(folder, threads, "none"))
    step(1, 2, "loading the model, and drafters")
    auto = build_runner(plain_config(folder, threads, "auto"))
    ways = {
        "plain, no grammar": (plain, False, 0),
        PLAIN: (plain, True, 0),
        "forced drafts": (plain, True, None),
        "auto, no grammar": (auto, False, None),
        "auto, grammar": (auto, True, None),
    }
    runs: dict[str, list[TextFigures]] = {way: [] for way in ways}
    for repeat in range(repeats + 1):
        for number, (way, (runner, masked, depth)) in enumerate(ways.items()):
            step(repeat * len(ways) + number, (repeats + 1) * len(ways), way)
            one = _generate(way, runner, folder, masked=masked, depth=depth)
            if repeat:  # the first one warms up
                runs[way].append(one)
    middle = [sorted(some, key=lambda one: one.tokens_per_s)[len(some) // 2] for some in runs.values()]
    (base,) = [one.tokens_per_s for one in middle if one.way == PLAIN]
    return [replace(one, against_plain=one.tokens_per_s / base) for one in middle]


def plain_config(folder: Path, threads: int, drafter: str) -> NodeConfig:
    """Options of a runner."""
    return NodeConfig(model=str(folder), drafter=drafter, threads=threads, kv_cache_tokens=4096)


def _generate(way: str, runner: ModelRunner, folder: Path, *, masked: bool, depth: int | None) -> TextFigures:
    """One answer per schema, one after the other."""
    engine = ColocatedEngine(runner, max_running=1)
    began, tokens, rounds = time.perf_counter(), 0, 0
    with _timed(GrammarCursor, "allowed") as masks_s, _timed(ColocatedEngine, "_prefill") as prompts_s:
        for request in _requests(folder, masked=masked, depth=depth):
            (done,) = engine.generate([request])
            tokens, rounds = tokens + len(done.token_ids) - 1, rounds + done.stats.rounds
    seconds = time.perf_counter() - began - prompts_s[0]
    return TextFigures(way, tokens, tokens / seconds, 1.0, tokens / rounds, masks_s[0] / seconds)


def _requests(folder: Path, *, masked: bool, depth: int | None) -> list[SequenceRequest]:
    tokenizer = Tokenizer.from_folder(folder)
    requests = []
    for number, (schema, _) in enumerate(SCHEMAS.values()):
        question = f"Answer with JSON of this schema, and nothing else: {json.dumps(schema)}"
        prompt = tuple(tokenizer.apply_chat_template([{"role": "user", "content": question}]))
        params = SamplingParams(
            temperature=0.0, seed=number, max_tokens=OUTPUT_TOKENS, stop_token_ids=tokenizer.eos_token_ids
        )
        if masked:
            params = replace(params, grammar=Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)))
        asked = SpeculationParams(num_draft_tokens=depth)
        requests.append(SequenceRequest(f"{number}", prompt, params, speculation=asked))
    return requests


@contextmanager
def _timed(kind: type, name: str) -> Iterator[list[float]]:
    """Yields a list of one number: the seconds of every call of the method."""
    inner, spent = getattr(kind, name), [0.0]

    def timed(*args: Any) -> Any:
        began = time.perf_counter()
        try:
            return inner(*args)
        finally:
            spent[0] += time.perf_counter() - began

    setattr(kind, name, timed)
    try:
        yield spent
    finally:
        setattr(kind, name, inner)


# Output ---------------------------------------------------------------------------------------------------------------


def show(title: str, rows: list[MaskFigures] | list[TextFigures]) -> None:
    """Print a table."""
    table = Table(title=title)
    for column in asdict(rows[0]):
        table.add_column(column)
    for row in rows:
        table.add_row(*(f"{value:.3g}" if isinstance(value, float) else str(value) for value in asdict(row).values()))
    Console().print(table)


def main() -> None:
    """Run the parts asked for, and keep their figures."""
    parser = argparse.ArgumentParser(prog="benchmarks.grammar", description=__doc__)
    parser.add_argument("--only", choices=["masks", "text"], help="one part; both when not given")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--vocab-size", type=int, default=49152, help="width of the model's logits")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    figures: Json = {"settings": {"model": options.model, "threads": options.threads, "repeats": options.repeats}}
    if options.only != "text":
        rows = masks(resolve_model(options.model), options.vocab_size)
        show("masks", rows)
        figures["masks"] = [asdict(row) for row in rows]
    if options.only != "masks":
        made = text(options.model, options.threads, options.repeats)
        show("JSON of schemas", made)
        figures["text"] = [asdict(row) for row in made]
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
