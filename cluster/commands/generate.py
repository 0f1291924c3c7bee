"""``paceline generate``: the client SDK on the command line, with its options as flags."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import Annotated, Any

import typer

from cluster.commands.generate_options import about_flags, given_flags, sdk_options, with_sdk_options
from cluster.commands.reach import ApiKeyFile, TlsCa, UseTls, key_in
from paceline.client import Client, GenerateOptions, ToolCall
from paceline.client.chats import CHAT_OPTIONS
from paceline.errors import InvalidRequest
from paceline.results import ToolCallPart, joined


@with_sdk_options
def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt, or the user's message with --chat.")],
    *,
    server: Annotated[
        list[str], typer.Option(help="HOST:PORT of a router's gRPC. Repeat it for routers to fail over to.")
    ] = ["127.0.0.1:50051"],  # noqa: B006  (typer reads the default)
    timeout: Annotated[float, typer.Option(help="Seconds for the whole request.")] = 600.0,
    retries: Annotated[int, typer.Option(help="Times in a row that a stream that broke is asked for again.")] = 8,
    tls: UseTls = False,
    tls_ca: TlsCa = None,
    api_key_file: ApiKeyFile = None,
    chat: Annotated[bool, typer.Option("--chat", help="Apply the model's chat template.")] = False,
    system: Annotated[str | None, typer.Option(help="System message ahead of the prompt; implies --chat.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
    **options: Any,
) -> None:
    """Generate text from a running deployment. A single choice is streamed unless --json."""
    from cluster.commands.generate_json import generation_json

    flags = given_flags(options)
    messages = [{"role": "system", "content": system}] if system is not None else []
    messages.append({"role": "user", "content": prompt})
    in_chat = chat or system is not None or not flags.keys().isdisjoint(CHAT_OPTIONS)
    asked: Any = messages if in_chat else prompt
    try:
        given = sdk_options(flags)
        with Client(
            server, timeout=timeout, retries=retries, tls=tls_ca or tls, api_key=key_in(api_key_file)
        ) as client:
            if not as_json and flags.get("n", 1) == 1:
                _stream(client, asked, given)
                return
            done = client.generate(asked, **given)
    except InvalidRequest as error:
        raise about_flags(error, flags) from None
    except OSError as error:
        raise typer.BadParameter(f"--tls-ca: {error}") from None
    except (TypeError, ValueError, OverflowError) as error:  # what no field of a request can hold
        raise typer.BadParameter(str(error)) from None
    if as_json:
        typer.echo(json.dumps(generation_json(done), ensure_ascii=False, indent=2, allow_nan=False))
        return
    for choice in done.choices:
        typer.echo(f"[{choice.index}] {choice.text}")
        _print_calls(choice.tool_calls)


def _stream(client: Client, asked: Any, options: GenerateOptions) -> None:
    calls: list[ToolCallPart] = []
    for chunk in client.stream(asked, **options):
        typer.echo(chunk.text, nl=False)
        sys.stdout.flush()
        calls += chunk.tool_calls
    typer.echo()
    _print_calls(joined(calls))


def _print_calls(calls: Iterable[ToolCall]) -> None:
    """A line for each call of a tool, behind the text."""
    for call in calls:
        typer.echo(f"{call.name} {call.arguments}")
