"""The exactness matrix on the real model: batches that mix draft length, temperature, tree and prompt, the plain
answers they must equal, and deployments of every drafter around one loaded target.

A batch is made of cells. A request may ask for less than its deployment has (K, tree, drafter), so one deployment with
K=8 and dynamic trees answers them all; a second one, ``chain``, has no room for trees.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import torch
from tokenizers import Tokenizer

from paceline.assembly.build import assemble, build_runner
from paceline.assembly.selfcheck import ProbedBits
from paceline.config import NodeConfig
from paceline.engine.model_runner import ModelRunner, PrefillChunk
from paceline.request import SamplingParams, SequenceRequest, SpeculationParams
from paceline.spec_decode.sequence import Sequence
from paceline.spec_decode.stats import SpecStats
from tests.support.exactness import LogitBits, Outcome, run
from tests.support.real_weights import Weights
from tests.support.worker_memory import give_back

LENGTHS = (8, 3, 1, 0)  # K of requests; the deployments draft 8
TREES = ("chain", "static", "dynamic")
TEMPERATURES = (0.0, 1.0)
TREE_NODES = 10  # draft tokens of the largest tree
MAX_TOKENS = 24
EOS = 2
COUNTING = "one two three four five six seven eight nine ten\n"
CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
PROMPTS = {  # one goes on copying itself, one ends by itself, one is ordinary
    "copy": COUNTING * 3 + "one two",
    "list": CHAT.format("Copy this list twice: pear, apple, fig, pear, apple, fig."),
    "planets": CHAT.format("Name the planets of the solar system."),
}


@dataclass(frozen=True)
class Case:
    """A deployment's drafter."""

    drafter: str
    head: str = ""  # weights to give, see real_weights
    options: Mapping[str, object] = field(default_factory=dict)
    named: tuple[str, ...] = ()  # drafters that the requests name in turn
    right_sometimes: bool = True  # its drafts are known to be accepted now and then, whatever the clock says


CASES: dict[str, Case] = {
    "none": Case("none", right_sometimes=False),
    "ngram": Case("ngram"),
    "suffix": Case("suffix"),
    "trie": Case("trie"),
    "lookahead": Case("lookahead"),
    "medusa": Case("medusa", "medusa"),
    "eagle": Case("eagle", "eagle", right_sometimes=False),
    "eagle3": Case("eagle3", "eagle3"),
    "eagle3, greedy drafts": Case(
        "eagle3", "eagle3", {"draft_sampling": "greedy", "expand_above": 0.05}, right_sometimes=False
    ),
    "mtp": Case("mtp", "mtp", right_sometimes=False),
    "mtp x3": Case("mtp", "mtp x3", {"mtp_modules": 3}, right_sometimes=False),
    "draft model": Case("draft_model", "draft_model"),
    "auto": Case("auto", "eagle3", right_sometimes=False),  # what it drafts depends on measured seconds
    "several": Case(
        "mtp",
        "mtp",
        {"drafters": "ngram,suffix,trie,lookahead,none"},
        ("ngram", "mtp", "suffix", "trie", "lookahead", "mtp", "none"),
    ),
}


@dataclass(frozen=True)
class Cell:
    """One request of a batch."""

    prompt: str
    temperature: float
    num_draft_tokens: int
    tree: str = "chain"
    drafter: str = ""
    max_tokens: int = MAX_TOKENS

    @property
    def name(self) -> str:
        """Request id."""
        return f"{self.prompt} T={self.temperature:g} K={self.num_draft_tokens} {self.tree} {self.drafter}"


def full_cross(case: Case, max_tokens: int) -> list[Cell]:
    """K x tree x temperature; K=0 has no tree."""
    shapes = [(k, tree) for k in LENGTHS for tree in (TREES if k else TREES[:1])]
    return _cells(case, [(k, tree, t) for k, tree in shapes for t in TEMPERATURES], max_tokens)


def half_cross(case: Case, parity: int, max_tokens: int) -> list[Cell]:
    """K x tree, temperatures in turn; the other half has the other ``parity``. K=0 at both."""
    shapes = [(k, tree) for k in LENGTHS[:-1] for tree in TREES]
    cells = [(k, tree, TEMPERATURES[(i + parity) % 2]) for i, (k, tree) in enumerate(shapes)]
    return _cells(case, [*cells, *((0, "chain", t) for t in TEMPERATURES)], max_tokens)


def chain_cross(case: Case, max_tokens: int) -> list[Cell]:
    """K x temperature."""
    return _cells(case, [(k, "chain", t) for k in LENGTHS for t in TEMPERATURES], max_tokens)


def _cells(case: Case, shapes: Iterable[tuple[int, str, float]], max_tokens: int) -> list[Cell]:
    """Every second request copies, the others take turns; named drafters take turns."""
    names = ("copy", "list", "copy", "copy", "planets")
    return [
        Cell(
            names[i % len(names)],
            temperature,
            k,
            tree,
            case.named[i % len(case.named)] if case.named else "",
            max_tokens,
        )
        for i, (k, tree, temperature) in enumerate(shapes)
    ]


@dataclass(frozen=True)
class Answer:
    """What one cell came to."""

    outcome: Outcome
    stats: SpecStats


@dataclass
class Tally:
    """Draft tokens of a batch, and accepted paths that did not lie in a row."""

    drafted: int = 0
    accepted: int = 0
    refused: int = 0  # depths that were drafted and not reached
    off_spine: int = 0


class Watch:
    """Every sequence that a runner finishes, and how often it compacted an accepted path."""

    def __init__(self, runner: ModelRunner) -> None:
        self.sequences: dict[str, Sequence] = {}
        self.compactions = 0
        release, copy = runner.release, runner.kv.copy_slots

        def released(seq: Sequence) -> None:
            self.sequences[seq.request.request_id] = seq
            release(seq)

        def copied(layers: range, source: torch.Tensor, dest: torch.Tensor) -> None:
            self.compactions += layers.start == 0  # the target's rows, not a drafter's own
            copy(layers, source, dest)

        runner.release = released  # type: ignore[method-assign]
        runner.kv.copy_slots = copied  # type: ignore[method-assign]

    def answers(self, cells: Seq[Cell], outcomes: Seq[Outcome]) -> list[Answer]:
        """Outcomes with their counts."""
        return [Answer(o, self.sequences[c.name].stats) for c, o in zip(cells, outcomes, strict=True)]


class Matrix:
    """One loaded target of a dtype, and its plain answers: no drafts, no prefix cache, one request at a time."""

    def __init__(self, target: Path, dtype: str) -> None:
        self.target, self.dtype = target, dtype
        tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
        self.prompts = {n: tuple(tokenizer.encode(t, add_special_tokens=False).ids) for n, t in PROMPTS.items()}
        self.config = NodeConfig.model_validate(
            {
                "model": str(target),
                "dtype": dtype,
                "drafter": "none",
                "num_draft_tokens": max(LENGTHS),
                "kv_cache_tokens": 3072,
                "max_model_len": 512,
                "page_size": 4,  # most of a prompt is found in the prefix cache
                "prefix_cache": False,
            }
        )
        self.first = build_runner(self.config.model_copy(update={"kv_cache_tokens": 640}))  # one request at a time
        assert self.first.bit_exact
        plain = [Cell(prompt, t, 0) for prompt in PROMPTS for t in TEMPERATURES]
        answers = run(self.first, [self.request(cell) for cell in plain])
        self.plain = {(c.prompt, c.temperature): a for c, a in zip(plain, answers, strict=True)}

    def request(self, cell: Cell) -> SequenceRequest:
        """The seed follows from the prompt, not from the cell: a cell must answer as the plain request does."""
        seed = 300 + list(PROMPTS).index(cell.prompt)
        params = SamplingParams(
            temperature=cell.temperature, seed=seed, max_tokens=cell.max_tokens, stop_token_ids=(EOS,)
        )
        asked = SpeculationParams(cell.num_draft_tokens, None, cell.drafter or None, cell.tree)
        return SequenceRequest(cell.name, self.prompts[cell.prompt], params, speculation=asked)

    def config_of(self, case: Case, weights: Weights, **options: object) -> NodeConfig:
        """A deployment of the case, with the prefix cache on."""
        given: dict[str, object] = {"drafter": case.drafter, "prefix_cache": True, "tree_nodes": TREE_NODES}
        if case.head:
            given["drafter_path"] = str(weights.folder(case.head))
        return NodeConfig.model_validate(self.config.model_dump() | given | dict(case.options) | options)

    def runner(self, config: NodeConfig) -> ModelRunner:
        """A deployment around the loaded target, which was probed for bit-exactness once, in ``first``."""
        with mock.patch("paceline.assembly.build.probe_bits", return_value=ProbedBits(True, "")):
            return assemble(config, self.first.model, self.first.identity)

    def together(self, runner: ModelRunner, cells: Seq[Cell]) -> tuple[list[Answer], Tally]:
        """Answers of the cells decoded in one process, side by side, the prompts from the prefix cache."""
        decode_all(runner, [self.request(Cell(prompt, 0.0, 1, max_tokens=2)) for prompt in PROMPTS])
        watch, bits, requests = Watch(runner), LogitBits(runner), [self.request(cell) for cell in cells]
        decode_all(runner, requests)
        assert runner.allocator.check_integrity() == []
        outcomes = []
        for request in requests:
            seq = watch.sequences[request.request_id]
            tokens = tuple(seq.output_token_ids)
            outcomes.append(Outcome(tokens, bits.of(request, len(tokens)), tuple(seq.stats.accepted_per_round)))
        answers = watch.answers(cells, outcomes)
        return answers, tally(answers, watch)

    def differing(self, cells: Seq[Cell], answers: Seq[Answer]) -> list[str]:
        """Cells whose tokens or logit bits are not those of the plain answer, as far as they were asked to go."""
        wrong = []
        for cell, answer in zip(cells, answers, strict=True):
            plain, got = self.plain[cell.prompt, cell.temperature], answer.outcome
            expected = plain.token_ids[: cell.max_tokens], plain.logit_bits[: cell.max_tokens]
            if (got.token_ids, got.logit_bits) != expected:
                wrong.append(cell.name)
        return wrong


def decode_all(runner: ModelRunner, requests: Seq[SequenceRequest]) -> None:
    """All requests at once: one prefill forward, then rounds over those that go on."""
    running = [runner.new_sequence(request) for request in requests]
    for seq in running:
        seq.table.ensure(seq.num_prefill + seq.request.params.max_tokens + runner.spec_slots)
    runner.prefill([PrefillChunk(seq, seq.num_computed, seq.num_prefill) for seq in running])
    while running:
        for seq in [seq for seq in running if seq.finish_reason is not None]:
            running.remove(seq)
            runner.release(seq)
        if running:
            runner.decode(running)


def tally(answers: Seq[Answer], watch: Watch) -> Tally:
    """The sum over a batch."""
    found = Tally(off_spine=watch.compactions)
    for answer in answers:
        stats = answer.stats
        found.drafted += stats.draft_tokens
        found.accepted += stats.accepted_tokens
        found.refused += sum(stats.drafted_per_position) - stats.accepted_tokens
    return found


def over_budget(cells: Seq[Cell], answers: Seq[Answer], named: bool = False) -> list[str]:
    """Cells that drafted more, deeper or wider than they asked for, or by another drafter than they named."""
    wrong = []
    for cell, answer in zip(cells, answers, strict=True):
        stats, k = answer.stats, cell.num_draft_tokens
        deep = len(stats.drafted_per_position) > k
        many = stats.draft_tokens > stats.rounds * (TREE_NODES if k and cell.tree != "chain" else k)
        wide = cell.tree == "chain" and stats.draft_tokens != sum(stats.drafted_per_position)
        other = named and set(stats.rounds_by_drafter) - {cell.drafter}
        if deep or many or wide or other:
            wrong.append(cell.name)
    return wrong


_loaded: dict[tuple[Path, str], Matrix] = {}


def matrix(target: Path, dtype: str) -> Matrix:
    """One at a time, kept until another is asked for or ``unload`` is called: two would fill a worker."""
    if (target, dtype) not in _loaded:
        unload()
        _loaded[target, dtype] = Matrix(target, dtype)
    return _loaded[target, dtype]


def unload() -> None:
    """Give back the target, its pages and what deployments around it have left."""
    if _loaded:
        _loaded.clear()
        gc.unfreeze()  # the end of a file has frozen what it found
        give_back()
