"""The SDK's options of a request as flags of ``paceline generate``."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer

from paceline.client import GenerateOptions
from paceline.client.chats import CHAT_OPTIONS
from paceline.client.convert import generate_request
from paceline.errors import InvalidRequest

DEFAULT_MAX_TOKENS = 128  # so that a model that does not end its text does not fill its context
# What the command line takes for each type of an SDK option; lists are options that may be repeated.
_COMMAND_TYPES: Mapping[Any, Any] = {
    int | None: int,
    float | None: float,
    bool | None: bool,
    str | None: str,
    str | Sequence[str] | None: list[str],
    str | Mapping[str, Any] | None: str,
    Sequence[int] | None: list[int],
    Mapping[int, float] | None: list[str],
    Sequence[str] | None: list[str],
}
LEFT_OUT = frozenset({"continue_final_message"})  # the command's last turn is the user's
# Flags of a form of their own: the SDK's option that each of them makes, and what the command line takes.
OWN_FORMS: Mapping[str, tuple[str, Any]] = {
    "json_schema": (
        "response_format",
        Annotated[Path | None, typer.Option(help="The answer is JSON of the JSON Schema in this file.")],
    ),
    "json_object": (
        "response_format",
        Annotated[bool | None, typer.Option("--json-object", help="The answer is JSON: any object.")],
    ),
    "grammar": (
        "grammar",
        Annotated[
            Path | None,
            typer.Option(help="The answer is a text of the context-free grammar in this file: Lark, or GBNF."),
        ],
    ),
    "tools": (
        "tools",
        Annotated[
            Path | None,
            typer.Option(
                help="What the model may call: a JSON list in this file, as the OpenAI API has it. Implies --chat."
            ),
        ],
    ),
    "template_values": (
        "template_values",
        Annotated[
            str | None,
            typer.Option(
                help='More values for the chat template, a JSON object: {"enable_thinking": false}. Implies --chat.'
            ),
        ],
    ),
}
_FORMATS = ("json_schema", "json_object", "grammar", "regex", "choice")
# Headings of the help, and the options below each; the others stand below "Options".
PANELS: Mapping[str, Sequence[str]] = {
    "Connection": ("server", "timeout", "retries", "tls", "tls_ca", "api_key_file"),
    "Chat": (
        *("chat", "system", "reasoning_effort", "template_values", "tools", "tool_choice", "parallel_tool_calls"),
    ),
    "Form of the answer": _FORMATS,
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
_ANY_CHAT = ({"role": "user", "content": ""},)  # a prompt that goes with every option


def flag_of(name: str) -> str:
    """How a parameter of the command is written: ``--top-k``."""
    return f"--{name.replace('_', '-')}"


def sdk_parameters() -> list[inspect.Parameter]:
    """The flags of OWN_FORMS, and one for every other option of the SDK's requests, with the SDK's words for it."""
    others = LEFT_OUT | {option for option, _ in OWN_FORMS.values()}
    hints = get_type_hints(GenerateOptions, include_extras=True)
    return [
        *(_keyword(name, taken) for name, (_, taken) in OWN_FORMS.items()),
        *(_parameter(name, *get_args(hint)) for name, hint in hints.items() if name not in others),
    ]


def _parameter(name: str, kind: Any, text: str) -> inspect.Parameter:
    command_type: Any = _COMMAND_TYPES[kind]
    flag = flag_of(name)
    option = typer.Option(flag + (f"/--no-{flag[2:]}" if command_type is bool else ""))
    option.help = text + (" May be repeated." if command_type in (list[str], list[int]) else "")
    option.help += " Implies --chat." if name in CHAT_OPTIONS else ""
    default = DEFAULT_MAX_TOKENS if name == "max_tokens" else None
    return _keyword(name, Annotated[command_type | None, option], default)


def _keyword(name: str, annotation: Any, default: Any = None) -> inspect.Parameter:
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


def given_flags(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the command's parameters that were given."""
    return {name: value for name, value in values.items() if value is not None and value != []}


def sdk_options(flags: Mapping[str, Any]) -> GenerateOptions:
    """The SDK's options that ``flags`` ask for. ValueError, which names the flag, for what no request can hold."""
    formats = [flag_of(name) for name in _FORMATS if name in flags]
    if len(formats) > 1:
        raise ValueError(f"one of {', '.join(map(flag_of, _FORMATS))} at a time, got {' and '.join(formats)}")
    options: dict[str, Any] = {}
    for name, value in flags.items():
        try:
            option = {_option_of(name): _READ[name](value) if name in _READ else value}
            generate_request(_ANY_CHAT, option)
        except (TypeError, ValueError, OverflowError, RecursionError, OSError) as error:
            raise ValueError(f"{flag_of(name)}: {error}") from None
        options |= option
    return options  # type: ignore[return-value]  # the command's signature is made of its fields


def about_flags(error: InvalidRequest, flags: Mapping[str, Any]) -> InvalidRequest:
    """The error of a router with the flag in the place of the field, where the field is one of ``flags``."""
    names = {"grammar" if name in _FORMATS else _option_of(name): name for name in flags}
    for word in re.finditer(r"\w+", error.field):
        if word[0] in names:
            return InvalidRequest(flag_of(names[word[0]]) + error.field[word.end() :], error.message, error.code)
    return error


def _option_of(name: str) -> str:
    return OWN_FORMS[name][0] if name in OWN_FORMS else name


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: {error}") from None


def _json(text: str, kind: type) -> Any:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"is not JSON: {error}") from None
    if not isinstance(value, kind):
        raise ValueError(f"wants a JSON {'list' if kind is list else 'object'}")
    return value


def _bias(item: str) -> tuple[int, float]:
    token_id, _, bias = item.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError:
        raise ValueError(f"wants TOKEN_ID=BIAS, got {item!r}") from None


# How the values of flags become values of the SDK's options, where they are not the same.
_READ: Mapping[str, Callable[[Any], Any]] = {
    "json_schema": lambda file: _json(_text(file), dict),
    "json_object": lambda given: "json_object",
    "grammar": _text,
    "tools": lambda file: _json(_text(file), list),
    "template_values": lambda text: _json(text, dict),
    "logit_bias": lambda items: dict(map(_bias, items)),
}
