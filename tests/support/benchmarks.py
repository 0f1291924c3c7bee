"""What the benchmarks' tests share."""

from __future__ import annotations

from benchmarks.speculation.bench import Settings

SETTINGS = Settings(
    model="tiny",
    dtype="fp32",
    device="cpu",
    threads=1,
    prompts="tiny.jsonl",
    max_tokens=40,
    temperature=0.0,
    seed=3,
    turns="first",
    max_prompt_tokens=256,
)
