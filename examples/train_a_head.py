"""Train a draft head: the target answers prompts, a head learns from the answers, and `paceline serve` drafts with it.

The defaults are for a look, not for a head that pays: a minute of work, some steps. docs/guides/training.md says more.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path


def paceline(*words: object) -> None:
    """Run a command of the `paceline` beside this Python; its failure ends the script."""
    command = [str(Path(sys.executable).with_name("paceline")), *map(str, words)]
    print("$", " ".join(["paceline", *command[1:]]), flush=True)
    if code := subprocess.run(command, check=False).returncode:
        sys.exit(code)


def main() -> None:
    """A corpus, a head, and how to serve it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for corpus, checkpoint and head")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="the target")
    parser.add_argument("--head", default="eagle3", help="eagle3, eagle, mtp, mtp3 or medusa")
    parser.add_argument("--prompts", type=Path, help='JSON lines {"prompt": "..."}; the model makes some if not given')
    parser.add_argument(
        "--answers", type=int, default=24, help="prompts that the model makes itself, without --prompts"
    )
    parser.add_argument("--answer-tokens", type=int, default=48, help="longest answer")
    parser.add_argument("--steps", type=int, default=10, help="optimiser steps")
    parser.add_argument("--tokens-per-step", type=int, default=256, help="tokens that one step trains on")
    parser.add_argument("--held-out", type=int, default=4, help="answers to measure on")
    parser.add_argument("--threads", type=int, default=0, help="cores to compute on; 0: all, 1 where others use them")
    options = parser.parse_args()
    corpus, run = options.out / "answers.jsonl", options.out / options.head
    made = ("--prompts", options.prompts) if options.prompts else ("--self-made", options.answers)
    length = ("--max-answer-tokens", options.answer_tokens)
    target = ("--model", options.model, "--threads", options.threads)
    paceline("make-corpus", *target, *made, *length, "--out", corpus)
    limits = ("--steps", options.steps, "--tokens-per-step", options.tokens_per_step, "--held-out", options.held_out)
    paceline("train-drafter", options.head, *target, "--corpus", corpus, "--out", run, *limits)
    print(f"serve it: paceline serve --model {options.model} --drafter {options.head} --drafter-path {run / 'head'}")


if __name__ == "__main__":
    main()
