"""``python -m benchmarks.prediction``: what a request gains whose answer is known in part (Predicted Outputs).

Each question is answered once. Then it is asked again with a prediction: that answer, in which every so many tokens are
others, as in a file that was edited. All ways take turns in one run, and every text must be the same.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.common.console import step
from paceline.assembly.build import build_runner
from paceline.config import NodeConfig
from paceline.engine.colocated import ColocatedEngine
from paceline.models.hub import resolve_model
from paceline.request import SamplingParams, SequenceRequest, SpeculationParams
from paceline.text.tokenizer import Tokenizer

OUTPUT_TOKENS = 192
QUESTIONS = (
    "Write a Python class for a bank account with deposit, withdraw and a list of past transactions.",
    "Explain how photosynthesis works to a child, in two paragraphs.",
    "Write a formal letter to a landlord about a broken heating, and ask for a repair within a week.",
)
EDITED = {"right": 0, "1 of 40 tokens edited": 40, "1 of 10 tokens edited": 10, "all wrong": 1}
NO_PREDICTION, PLAIN = "no prediction", "no speculation"


@dataclass(frozen=True)
class Figures:
    """One way to ask, over all questions."""

    way: str
    tokens_per_s: float
    ratio: float  # to the same deployment without a prediction, median of the repetitions
    tokens_per_round: float


class Asked:
    """The questions on one engine."""

    def __init__(self, model: str, threads: int) -> None:
        """model: a name or folder; threads: of the engine."""
        folder = resolve_model(model)
        tokenizer = Tokenizer.from_folder(folder)
        config = NodeConfig(model=str(folder), drafter="default", threads=threads, kv_cache_tokens=8192)
        self.engine = ColocatedEngine(build_runner(config), max_running=1)
        self.requests = []
        for number, question in enumerate(QUESTIONS):
            prompt = tuple(tokenizer.apply_chat_template([{"role": "user", "content": question}]))
            stop = tuple(tokenizer.eos_token_ids)
            params = SamplingParams(temperature=0.0, seed=number, max_tokens=OUTPUT_TOKENS, stop_token_ids=stop)
            self.requests.append(SequenceRequest(str(number), prompt, params))
        self.answers = self._texts(self.requests)

    def seconds(self, way: str, turn: int) -> tuple[float, float]:
        """Seconds for all questions, and tokens per round. Raises RuntimeError where a text differs.

        Each turn of a way is a tenant of its own: no drafter and no prefix cache knows the earlier answers.
        """
        requests = [
            replace(request, speculation=self._speculation(way, answer), cache_salt=f"{way} {turn}")
            for request, answer in zip(self.requests, self.answers, strict=True)
        ]
        began, texts, rounds = time.perf_counter(), [], 0
        for request in requests:
            (done,) = self.engine.generate([request])
            texts.append(tuple(done.token_ids))
            rounds += done.stats.rounds + 1
        spent = time.perf_counter() - began
        if texts != self.answers:
            raise RuntimeError(f"{way}: a text differs from the one without a prediction")
        return spent, sum(map(len, texts)) / rounds

    def _texts(self, requests: list[SequenceRequest]) -> list[tuple[int, ...]]:
        return [tuple(done.token_ids) for request in requests for done in self.engine.generate([request])]

    @staticmethod
    def _speculation(way: str, answer: tuple[int, ...]) -> SpeculationParams:
        if way == PLAIN:
            return SpeculationParams(num_draft_tokens=0)
        if way == NO_PREDICTION:
            return SpeculationParams()
        every = EDITED[way]
        wrong = [token + 1 if every and i % every == every - 1 else token for i, token in enumerate(answer)]
        return SpeculationParams(prediction_token_ids=tuple(wrong))


def measure(model: str, threads: int, repeats: int) -> list[Figures]:
    """All ways, in turns; the first turn warms up."""
    ways = [NO_PREDICTION, PLAIN, *EDITED]
    parts = 1 + (repeats + 1) * len(ways)
    step(0, parts, "loading the model, and its answers")
    asked = Asked(model, threads)
    turns: list[dict[str, tuple[float, float]]] = []
    for turn in range(repeats + 1):
        turns.append({})
        for number, way in enumerate(ways):
            step(1 + turn * len(ways) + number, parts, way)
            turns[turn][way] = asked.seconds(way, turn)
    del turns[0]
    tokens = sum(map(len, asked.answers))
    return [
        Figures(
            way,
            tokens / statistics.median(turn[way][0] for turn in turns),
            statistics.median(turn[NO_PREDICTION][0] / turn[way][0] for turn in turns),
            turns[-1][way][1],
        )
        for way in ways
    ]


def main() -> None:
    """Measure, print, and keep the figures."""
    parser = argparse.ArgumentParser(prog="benchmarks.prediction", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    rows = measure(options.model, options.threads, options.repeats)
    table = Table(title="answers that are known in part")
    for column in ("way", "tokens/s", "ratio", "tokens per round"):
        table.add_column(column)
    for row in rows:
        table.add_row(row.way, f"{row.tokens_per_s:.0f}", f"{row.ratio:.2f}", f"{row.tokens_per_round:.2f}")
    Console().print(table)
    if options.json is not None:
        settings = {"model": options.model, "threads": options.threads, "repeats": options.repeats}
        options.json.write_text(json.dumps({"settings": settings, "ways": [asdict(r) for r in rows]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
