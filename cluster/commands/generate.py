"""``paceline generate``: the client SDK on the command line, with every option that it has."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer

from cluster.commands.reach import ApiKeyFile, TlsCa, UseTls, key_in
from paceline.client import ChatOptions, Client, GenerateOptions

DEFAULT_MAX_TOKENS = 128  # so that a model that does not end its text does not fill its context
# What the command line takes for each type of an SDK option; lists are options that may be repeated.
_COMMAND_TYPES: Mapping[Any, Any] = {
    int | None: int,
    float | None: float,
    bool | None: bool,
    str | None: str,
    str | Sequence[str] | None: list[str],
    Sequence[int] | None: list[int],
    Mapping[int, float] | None: list[str],
    Sequence[str] | None: list[str],
}
# Options of programs, or of which the command has a form of its own.
NOT_FLAGS = frozenset({*ChatOptions.__annotations__, "response_format", "grammar"})
# Headings of the help, and the options below each; the others stand below "Options".
PANELS: Mapping[str, Sequence[str]] = {
    "Connection": ("server", "timeout", "retries", "tls", "tls_ca", "api_key_file"),
    "Form of the answer": ("json_schema", "grammar", "regex", "choice"),
    "Length": (
        *("max_tokens", "min_tokens", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos"),
        *("truncate_prompt_tokens", "truncation_side"),
    ),
    "Sampling": (
        *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
        *("logit_bias", "bad_words", "seed", "n"),
    ),
    "Tokens": ("skip_special_tokens", "top_logprobs", "prompt_logprobs"),
    "Speculation": ("num_draft_tokens", "tree_width", "drafter", "tree", "prediction"),
    "Request": ("model", "request_id", "tenant", "priority"),
}


def sdk_parameters() -> list[inspect.Parameter]:
    """One command-line option for every option of the SDK's requests but NOT_FLAGS, with the SDK's words for it."""
    hints = get_type_hints(GenerateOptions, include_extras=True)
    return [_parameter(name, *get_args(hint)) for name, hint in hints.items() if name not in NOT_FLAGS]


def _parameter(name: str, kind: Any, text: str) -> inspect.Parameter:
    command_type: Any = _COMMAND_TYPES[kind]
    flag = f"--{name.replace('_', '-')}"
    option = typer.Option(flag + (f"/--no-{flag[2:]}" if command_type is bool else ""))
    option.help = text + (" May be repeated." if command_type in (list[str], list[int]) else "")
    default = DEFAULT_MAX_TOKENS if name == "max_tokens" else None
    annotation = Annotated[command_type | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def with_sdk_options(run: Callable[..., None]) -> Callable[..., None]:
    """The command with the SDK's options in the place of its ``**options``."""
    own = [p for p in inspect.signature(run, eval_str=True).parameters.values() if p.kind is not p.VAR_KEYWORD]
    signature = inspect.Signature([_in_panel(p) for p in (*own, *sdk_parameters())])
    run.__signature__ = signature  # type: ignore[attr-defined]
    return run


def _in_panel(parameter: inspect.Parameter) -> inspect.Parameter:
    panel = next((title for title, names in PANELS.items() if parameter.name in names), None)
    if panel is None:
        return parameter
    kind, shared = get_args(parameter.annotation)
    option = copy(shared)  # other commands have it too
    option.rich_help_panel = panel
    return parameter.replace(annotation=Annotated[kind, option])


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
    json_schema: Annotated[
        Path | None, typer.Option(help="The answer is JSON of the JSON Schema in this file.")
    ] = None,
    grammar: Annotated[
        Path | None, typer.Option(help="The answer is a text of the context-free grammar in this file: Lark, or GBNF.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
    **options: Any,
) -> None:
    """Generate text from a running deployment. A single choice is streamed unless --json."""
    from cluster.commands.generate_json import generation_json

    messages = [{"role": "system", "content": system}] if system is not None else []
    messages.append({"role": "user", "content": prompt})
    asked: Any = messages if chat or system is not None else prompt
    try:
        given = _sdk_options(options | _from_files(json_schema, grammar))
        with Client(
            server, timeout=timeout, retries=retries, tls=tls_ca or tls, api_key=key_in(api_key_file)
        ) as client:
            if not as_json and options.get("n") in (None, 1):
                _stream(client, asked, given)
                return
            done = client.generate(asked, **given)
    except OSError as error:
        raise typer.BadParameter(f"--tls-ca: {error}") from None
    except (TypeError, ValueError, OverflowError) as error:  # what no field of a request can hold
        raise typer.BadParameter(str(error)) from None
    if as_json:
        typer.echo(json.dumps(generation_json(done), ensure_ascii=False, indent=2, allow_nan=False))
        return
    for choice in done.choices:
        typer.echo(f"[{choice.index}] {choice.text}")


def _stream(client: Client, asked: Any, options: GenerateOptions) -> None:
    for chunk in client.stream(asked, **options):
        typer.echo(chunk.text, nl=False)
        sys.stdout.flush()
    typer.echo()


def _sdk_options(given: Mapping[str, Any]) -> GenerateOptions:
    options = {name: value for name, value in given.items() if value is not None and value != []}
    if "logit_bias" in options:
        options["logit_bias"] = dict(_bias(item) for item in options["logit_bias"])
    return options  # type: ignore[return-value]  # the command's signature is made of its fields


def _from_files(json_schema: Path | None, grammar: Path | None) -> dict[str, Any]:
    """The options that stand in files. ValueError for a file that cannot be read, or is not what it should be."""
    try:
        schema = None if json_schema is None else json.loads(json_schema.read_text(encoding="utf-8"))
        text = None if grammar is None else grammar.read_text(encoding="utf-8")
    except (OSError, RecursionError) as error:
        raise ValueError(str(error)) from None
    except ValueError as error:
        raise ValueError(f"{json_schema if grammar is None else grammar}: {error}") from None
    if json_schema is not None and not isinstance(schema, dict):
        raise ValueError(f"--json-schema: {json_schema} has no JSON object")
    return {"response_format": schema, "grammar": text}


def _bias(item: str) -> tuple[int, float]:
    token_id, sign, bias = item.partition("=")
    if not sign:
        raise ValueError(f"--logit-bias takes TOKEN_ID=BIAS, got {item!r}")
    return int(token_id), float(bias)
