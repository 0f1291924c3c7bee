"""The JSON that ``paceline generate --json`` prints."""

from __future__ import annotations

from typing import Any

from paceline.client import Choice


def answer_json(choice: Choice) -> dict[str, Any]:
    """One choice with its numbers."""
    done = choice.completion
    speculation, timing = done.speculation, done.timing
    return {
        "text": choice.text,
        "token_ids": list(choice.token_ids),
        "finish_reason": str(done.finish_reason),
        "usage": {
            "prompt_tokens": done.usage.prompt_tokens,
            "completion_tokens": done.usage.completion_tokens,
            "cached_tokens": done.usage.cached_tokens,
        },
        "speculation": {
            "rounds": speculation.rounds,
            "draft_tokens": speculation.draft_tokens,
            "accepted_tokens": speculation.accepted_tokens,
            "acceptance_length": speculation.acceptance_length,
            "accepted_per_position": list(speculation.accepted_per_position),
            "rounds_by_drafter": dict(speculation.rounds_by_drafter),
            "draft_s": speculation.draft_s,
            "verify_s": speculation.verify_s,
            "lossless": speculation.lossless,
        },
        "timing": {
            "ttft_s": timing.ttft_s,
            "e2e_s": timing.e2e_s,
            "decode_tokens_per_s": timing.decode_tokens_per_s,
        },
        "nodes": {"prefill": done.nodes.prefill, "decode": done.nodes.decode},
        "seed": done.seed,
    }
