"""A file of prompts through the SDK: bounded concurrency, answers in the order of the prompts.

Input: a JSON object a line, {"prompt": "..."}. Output: the same objects with "answer" and "tokens", or "error".
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any

from paceline.client import AsyncClient, PacelineError


async def answer(client: AsyncClient, line: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """The line with its answer. One prompt that fails stops no other."""
    messages = [{"role": "user", "content": line["prompt"]}]
    try:
        done = await client.chat(messages, max_tokens=options.max_tokens, temperature=0.0)
    except PacelineError as error:
        return {**line, "error": str(error)}
    return {**line, "answer": done.text, "tokens": done.completion.usage.completion_tokens}


async def run(options: argparse.Namespace) -> None:
    """At most --concurrency prompts are with the router at once."""
    lines = [json.loads(text) for text in options.prompts.read_text(encoding="utf-8").splitlines() if text.strip()]
    places = asyncio.Semaphore(options.concurrency)
    async with AsyncClient(options.server, timeout=options.timeout) as client:

        async def in_turn(line: dict[str, Any]) -> dict[str, Any]:
            async with places:
                return await answer(client, line, options)

        tasks = [asyncio.create_task(in_turn(line)) for line in lines]
        with options.out.open("w", encoding="utf-8") as out:
            for task in tasks:  # the file grows in the order of the prompts, whichever is done first
                print(json.dumps(await task, ensure_ascii=False), file=out, flush=True)
    print(f"{options.out}: {len(lines)} answers")


def main() -> None:
    """Answer the prompts of a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path, help="JSON lines to read")
    parser.add_argument("out", type=Path, help="JSON lines to write")
    parser.add_argument("--server", default="127.0.0.1:50051", help="HOST:PORT of a router's gRPC")
    parser.add_argument("--concurrency", type=int, default=16, help="prompts at once")
    parser.add_argument("--max-tokens", type=int, default=128, help="longest answer")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one answer, its wait included")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
