"""transformers' ``generate`` at batch 1, in a process of its own: reads a job as JSON on stdin, writes times on stdout.

A job is ``{"model", "threads", "draft_tokens", "asks": [[text, max_tokens], ...]}``; the answer is a list of
``{"stamps": [...], "tokens": n}``, seconds after the request at which pieces came, and how many tokens they had.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any


class Clock:
    """A streamer that notes when tokens come."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.stamps: list[float] = []
        self.tokens = 0
        self._prompt = True

    def put(self, value: Any) -> None:
        """The prompt at first, then tokens."""
        if self._prompt:
            self._prompt = False
            return
        self.stamps.append(time.perf_counter() - self.began)
        self.tokens += value.numel()

    def end(self) -> None:
        """Nothing is kept."""


def main() -> None:
    """See the module docstring."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    job = json.load(sys.stdin)
    torch.set_num_threads(job["threads"])
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.bfloat16)
    drafting = {"prompt_lookup_num_tokens": job["draft_tokens"]} if job["draft_tokens"] else {}
    found = []
    for text, max_tokens in job["asks"]:
        clock = Clock()
        message = [{"role": "user", "content": text}]
        ids = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        with torch.inference_mode():
            model.generate(**ids, max_new_tokens=max_tokens, do_sample=False, streamer=clock, **drafting)
        found.append({"stamps": clock.stamps, "tokens": clock.tokens})
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
