"""The SDK: a whole answer with its numbers, then the same request as a stream. Needs `pip install paceline` alone."""

from __future__ import annotations

import argparse

from paceline.client import Client, Completion

QUESTION = "What is the capital of France, and what is it famous for?"


def main() -> None:
    """Ask the router at --server."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", default="127.0.0.1:50051", help="HOST:PORT of a router's gRPC")
    parser.add_argument("--max-tokens", type=int, default=64, help="longest answer")
    parser.add_argument("--seed", type=int, default=7, help="the same seed gives the same text")
    options = parser.parse_args()
    messages = [{"role": "user", "content": QUESTION}]
    with Client(options.server) as client:
        served = client.model_info()
        print(f"{served.model}, drafter {served.drafter}, {len(served.nodes)} nodes")
        done = client.generate(messages, max_tokens=options.max_tokens, seed=options.seed)
        print(done.text)
        print(numbers(done.completion))
        streamed = ""
        for chunk in client.stream(messages, max_tokens=options.max_tokens, seed=options.seed):
            streamed += chunk.text  # what one round committed, or some
    print(f"streamed, the same text: {streamed == done.text}")


def numbers(done: Completion) -> str:
    """What an answer took, in a line."""
    tokens, spec = done.usage.completion_tokens, done.speculation
    return (
        f"[{tokens} tokens in {spec.rounds} rounds, {spec.accepted_tokens} drafts accepted, "
        f"first token after {done.timing.ttft_s:.3f} s, {done.nodes.prefill} -> {done.nodes.decode}]"
    )


if __name__ == "__main__":
    main()
