"""``paceline demo``: the main job on one machine, start to end."""

from __future__ import annotations

import time

import psutil
from rich.console import Console
from rich.table import Table

from cluster.commands.console import errors
from cluster.commands.progress import start_progress
from cluster.deployment import Deployment
from paceline.config import ServeConfig

QUESTION = "What is the capital of France, and what is it famous for?"
MAX_TOKENS = 128


async def run_demo(config: ServeConfig) -> None:
    """Serve on free ports, ask one question through the SDK, print the answer and the numbers."""
    from paceline.client import AsyncClient

    console = Console(highlight=False)
    # A standby would import its libraries while the only request runs.
    local = config.model_copy(update={"grpc": "127.0.0.1:0", "http": "127.0.0.1:0", "standby": False})
    began = time.monotonic()
    with start_progress(errors, lines=local.log_level in ("debug", "info")) as tell:
        deployment = Deployment(local, tell)
        await deployment.start()
    try:
        front = deployment.front
        console.print(
            f"ready in {time.monotonic() - began:.1f} s: grpc {front.grpc_address}, http {front.http_address}"
        )
        console.print(f"\n[bold]{QUESTION}[/bold]")
        public = front.public_tls
        async with AsyncClient(front.grpc_address, tls=public.path / "ca.pem" if public else False) as client:
            completion = None
            messages = [{"role": "user", "content": QUESTION}]
            async for chunk in client.stream(messages, max_tokens=MAX_TOKENS, temperature=0.0, seed=1):
                console.print(chunk.text, end="")
                completion = chunk.completion or completion
        console.print("\n")
        console.print(_table(completion, memory_pss()))
    finally:
        with console.status("stopping"):
            await deployment.stop(grace_s=local.drain_timeout_s)


def memory_pss() -> int:
    """Proportional set size of this process and all below it, bytes."""
    total = 0
    here = psutil.Process()
    for process in [here, *here.children(recursive=True)]:
        try:
            total += process.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return total


def _table(done, pss: int) -> Table:  # type: ignore[no-untyped-def]
    table = Table(show_header=False, title="what it took")
    speculation, timing, handoff = done.speculation, done.timing, done.handoff
    rows = [
        ("prompt / output tokens", f"{done.usage.prompt_tokens} / {done.usage.completion_tokens}"),
        ("time to first token", f"{timing.ttft_s * 1000:.0f} ms"),
        ("decode", f"{timing.decode_tokens_per_s:.1f} tokens/s"),
        ("acceptance length", f"{speculation.acceptance_length:.2f} tokens a round, the bonus counted"),
        ("handed over: target KV", f"{handoff.target_kv:,} bytes"),
        ("handed over: draft KV", f"{handoff.draft_kv:,} bytes"),
        ("handed over: hidden rows", f"{handoff.hidden:,} bytes"),
        ("handed over: meta", f"{handoff.meta:,} bytes"),
        ("served by", f"{done.nodes.prefill} -> {done.nodes.decode}"),
        ("memory of all processes (PSS)", f"{pss / 1e9:.2f} GB"),
    ]
    for row in rows:
        table.add_row(*row)
    return table
