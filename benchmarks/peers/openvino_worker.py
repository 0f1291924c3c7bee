"""OpenVINO GenAI in a process of its own, which its own environment runs: reads a job as JSON on stdin, writes times on
stdout.

A job is ``{"model", "threads", "slots", "context", "precision", "drafting", "draft_tokens", "ignore_eos", "groups":
[[[text, max_tokens], ...], ...]}``. What it drafts with is "prompt lookup", the folder of an EAGLE-3 head, or nothing.
The requests of a group are asked side by side, group after group. The answer is ``[[{"stamps", "tokens",
"prompt_tokens"}, ...], ...]``: seconds after the group began at which tokens came, and how many each request had.

The pipeline that batches continuously serves single requests too. Its steps are driven by hand, so that each token has
a time, as behind a server.
"""

from __future__ import annotations

import json
import sys
import time
from importlib import import_module
from typing import Any

PROMPT_LOOKUP, NGRAM_TOKENS = "prompt lookup", 3  # at most, as the others match
CACHE_GB = 1  # of keys and values: more than all slots fill


def main() -> None:
    """See the module docstring."""
    job = json.load(sys.stdin)
    genai, openvino = import_module("openvino_genai"), import_module("openvino")
    has_bf16 = "BF16" in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    precision = job["precision"] if has_bf16 else "f32"
    scheduler = genai.SchedulerConfig()
    scheduler.max_num_seqs, scheduler.cache_size = job["slots"], CACHE_GB
    scheduler.enable_prefix_caching = False  # no prompt may be in a cache from another run
    scheduler.max_num_batched_tokens = job["slots"] * job["context"]  # no prompt waits for a step of its own
    properties = {
        "INFERENCE_NUM_THREADS": job["threads"],
        "INFERENCE_PRECISION_HINT": precision,
        "PERFORMANCE_HINT": "LATENCY",
        "KV_CACHE_PRECISION": "bf16" if precision == "bf16" else "f16",  # 16 bits, as the others keep
    }
    if precision == "f32":  # with which it may round inputs to int8: as many elements a scale as Paceline's w8a8
        properties["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = "64"
    config = genai.GenerationConfig(ignore_eos=job["ignore_eos"], do_sample=False)
    if job["drafting"]:
        config.num_assistant_tokens = job["draft_tokens"]
    if job["drafting"] == PROMPT_LOOKUP:
        config.max_ngram_size = NGRAM_TOKENS
        properties |= {"prompt_lookup": True}
    elif job["drafting"]:
        properties |= {"draft_model": genai.draft_model(job["drafting"], "CPU", **properties)}
    pipeline = genai.ContinuousBatchingPipeline(job["model"], scheduler, "CPU", properties)
    tokenizer = pipeline.get_tokenizer()
    json.dump([timed(pipeline, tokenizer, config, group) for group in job["groups"]], sys.stdout)


def timed(pipeline: Any, tokenizer: Any, config: Any, group: list[tuple[str, int]]) -> list[dict[str, Any]]:
    """Ask the requests of a group at once and note when each token comes."""
    began = time.perf_counter()
    handles, found = [], []
    for number, (text, max_tokens) in enumerate(group):
        chat = tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)
        ids = tokenizer.encode(chat, add_special_tokens=False).input_ids
        config.max_new_tokens = max_tokens  # the pipeline copies it
        handles.append(pipeline.add_request(number, ids, config))
        found.append({"stamps": [], "tokens": 0, "prompt_tokens": ids.shape[1]})
    while pipeline.has_non_finished_requests():
        pipeline.step()
        at_s = time.perf_counter() - began
        for handle, one in zip(handles, found, strict=True):
            if handle.can_read():
                tokens = sum(len(output.generated_ids) for output in handle.read().values())
                one["stamps"].append(at_s)
                one["tokens"] += tokens
    return found


if __name__ == "__main__":
    main()
