"""``python -m benchmarks.pictures.record``: keep the trace of one request, for the picture of the hand-off.

The same request is sent several times: a chat about the beginning of a real text, the licence of this repository. The
prefix cache is off, so each is a whole hand-off. Kept is the trace of the fastest, which the rest of the machine
disturbed least; the first opens the link and does not count. The file is what ``paceline trace`` writes, and says how
it was made.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path
from typing import Any

from benchmarks.pictures.data import HANDOFF_TRACE
from cluster.deployment import Deployment
from paceline.client import AsyncClient
from paceline.config import ServeConfig
from paceline.trace_file import chrome_trace

TEXT = Path(__file__).parents[2] / "LICENSE"
QUESTION = "What does this licence allow? Answer in two sentences."
MAX_TOKENS = 48
SETTLE_S = 1.0  # the last pages are released after the answer
COMMAND = "python -m benchmarks.pictures.record"


async def record(config: ServeConfig, characters: int, repeats: int) -> dict[str, Any]:
    """The trace of the fastest of ``repeats`` requests about ``characters`` characters of text, as a Chrome trace that
    tells its making."""
    turns = [{"role": "user", "content": f"{QUESTION}\n\n{TEXT.read_text(encoding='utf-8')[:characters]}"}]
    deployment = Deployment(config)
    await deployment.start()
    try:
        async with AsyncClient(deployment.front.grpc_address) as client:
            took: dict[str, float] = {}
            for i in range(repeats + 1):
                began = time.perf_counter()
                await client.chat(turns, max_tokens=MAX_TOKENS, temperature=0.0, request_id=f"handoff-{i}")
                took[f"handoff-{i}"] = time.perf_counter() - began
            del took["handoff-0"]
            await asyncio.sleep(SETTLE_S)
            found = await client.trace(min(took, key=lambda request_id: took[request_id]))
    finally:
        await deployment.stop(grace_s=5.0)
    drawn = chrome_trace(found)
    kept = f"the fastest of {repeats} requests"
    drawn["otherData"] |= {"made_by": COMMAND, "kept": kept, "model": config.model, "drafter": config.drafter}
    return drawn


def main() -> None:
    """Write the trace."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--drafter", default="eagle3")
    parser.add_argument("--characters", type=int, default=7500, help="of the text; 7500 are some 1,500 tokens")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=HANDOFF_TRACE)
    options = parser.parse_args()
    config = ServeConfig(
        model=options.model, drafter=options.drafter, prefix_cache=False, grpc="127.0.0.1:0", http="127.0.0.1:0"
    )
    trace = asyncio.run(record(config, options.characters, options.repeats))
    options.out.write_text(json.dumps(trace, indent=1) + "\n", encoding="utf-8")
    print(f"{options.out}: {len(trace['traceEvents'])} events")


if __name__ == "__main__":
    main()
