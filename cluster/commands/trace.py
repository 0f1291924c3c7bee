"""``paceline trace``: a request's timeline as a file that Perfetto opens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cluster.commands.reach import ApiKeyFile, TlsCa, UseTls, key_in

errors = Console(stderr=True, highlight=False)


def trace(
    request_id: Annotated[str, typer.Argument(help="Id of one of the latest requests, e.g. req-0f3a...")],
    router: Annotated[str, typer.Option(help="HOST:PORT of a router's gRPC.")] = "127.0.0.1:50051",
    tls: UseTls = False,
    tls_ca: TlsCa = None,
    api_key_file: ApiKeyFile = None,
    out: Annotated[Path | None, typer.Option(help="File to write. Not given: the trace is printed.")] = None,
) -> None:
    """Write the timeline of a request, on the router and all nodes, for ui.perfetto.dev (Chrome trace JSON)."""
    from paceline.client import Client
    from paceline.trace_file import chrome_trace

    with Client(router, tls=tls_ca or tls, api_key=key_in(api_key_file)) as client:
        found = client.trace(request_id)
    text = json.dumps(chrome_trace(found), indent=1)
    if found.silent:
        errors.print(f"[yellow]incomplete[/yellow] no answer from {', '.join(found.silent)}", soft_wrap=True)
    if found.dropped:
        errors.print(f"[yellow]incomplete[/yellow] {found.dropped} events were beyond what is kept", soft_wrap=True)
    if out is None:
        typer.echo(text)
        return
    out.write_text(text + "\n", encoding="utf-8")
    nodes = len({event.node for event in found.events})
    typer.echo(f"{out}: {len(found.events)} events of {nodes} processes")
