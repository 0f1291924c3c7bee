"""Options from three places that say the same things: command line, over ``PACELINE_*``, over a YAML file."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from typer.core import TyperCommand

from cluster.commands.other_flags import called_here, told_of_theirs
from cluster.yaml_text import parse_yaml
from paceline.config import ServeConfig
from paceline.engine_config import Group, choices_of
from paceline.errors import ConfigError
from paceline.role_options import ROLES, RoleOptions, role_option

PREFIX = "PACELINE_"
# Variables that are not options of a deployment.
OTHER_VARIABLES = {"PACELINE_HOME", "PACELINE_KERNELS", "PACELINE_API_KEY"}


def load_config(
    given: Mapping[str, Any], file: Path | None, environment: Mapping[str, str] | None = None
) -> ServeConfig:
    """The deployment's options. given: from the command line, None where not given.

    Raises ConfigError naming the first key that is unknown or wrong, and where it came from.
    """
    environment = os.environ if environment is None else environment
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    layers = (
        (f"{file}", _from_yaml(file)),
        ("environment", _from_environment(environment)),
        ("command line", {key: value for key, value in given.items() if value is not None}),
    )
    for name, layer in layers:
        for key, value in _flat(layer, name).items():
            if key not in ServeConfig.model_fields and role_option(key) is None:
                if told := called_here(f"--{key.replace('_', '-')}"):
                    raise ConfigError(key, f"unknown option in {name}. {told}")
                set_as = f"{PREFIX}{key.upper()}" if name == "environment" else key
                known = ", ".join(sorted(ServeConfig.model_fields))
                raise ConfigError(set_as, f"unknown option in {name}; known: {known}")
            values[key], origin[key] = value, name
    try:
        return ServeConfig.model_validate(_in_sections(values))
    except ValidationError as error:
        first = error.errors()[0]
        if not first["loc"]:  # options that do not go together
            raise ConfigError("config", _said(first["msg"])) from None
        key = "_".join(map(str, first["loc"]))
        raise ConfigError(
            key, f"{_said(first['msg'])} (from {origin.get(key, 'defaults')}: {first['input']!r})"
        ) from None


def shown(key: str) -> str:
    """How whoever set an option of ConfigError's knows it: as ``PACELINE_X`` or as ``--x``."""
    return key if key.startswith(PREFIX) else f"--{key.replace('_', '-')}"


def _said(message: str) -> str:
    """What a check of ours said, without pydantic's own words before it."""
    return message.removeprefix("Value error, ")


def _flat(layer: Mapping[str, Any], name: str) -> dict[str, Any]:
    """With the options of a section under their names outside of it: ``prefill_tp``. name: of the layer."""
    found: dict[str, Any] = {}
    for key, value in layer.items():
        if key not in ROLES:
            _put(found, key, value, name)
            continue
        if not isinstance(value, dict):
            raise ConfigError(key, f"in {name} must be a section, such as {key}: {{tp: 2}}")
        for option, inner in value.items():
            flat = f"{key}_{option}".replace("-", "_")
            if role_option(flat) is None:
                hint = f"; {flat} is an option of its own" if flat in ServeConfig.model_fields else ""
                known = ", ".join(sorted(RoleOptions.model_fields))
                raise ConfigError(flat, f"unknown option {option!r} in section {key} of {name}{hint}; known: {known}")
            _put(found, flat, inner, name)
    return found


def _put(found: dict[str, Any], key: str, value: Any, name: str) -> None:
    """Raises ConfigError where a layer has an option twice: nobody would know which one counts."""
    if key in found:
        raise ConfigError(key, f"is in {name} twice")
    found[key] = value


def _in_sections(values: Mapping[str, Any]) -> dict[str, Any]:
    """As ServeConfig takes them."""
    made: dict[str, Any] = {}
    for key, value in values.items():
        inner = role_option(key)
        if inner is None:
            made[key] = value
        else:
            made.setdefault(inner[0], {})[inner[1]] = value
    return made


def _from_yaml(file: Path | None) -> dict[str, Any]:
    if file is None:
        return {}
    if not file.is_file():
        raise ConfigError("config", f"{file} does not exist")
    try:
        content = parse_yaml(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError("config", f"{file} is not YAML: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError("config", f"{file} must hold a mapping of options")
    found: dict[str, Any] = {}
    for key, value in content.items():
        _put(found, str(key).replace("-", "_"), value, str(file))
    return found


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    names = (name for name in environment if name.startswith(PREFIX) and name not in OTHER_VARIABLES)
    return {name.removeprefix(PREFIX).lower(): environment[name] for name in names}


@dataclass(frozen=True)
class Option:
    """One option of a deployment, as help and the configuration page show it."""

    name: str  # of the field and of the YAML key
    group: str
    kind: type
    default: str
    values: str  # choices or range; empty: any
    description: str  # one line

    @property
    def flag(self) -> str:
        """Its name on the command line, e.g. ``--tree-width``, or ``--standby/--no-standby``; ``--decode-OPTION`` for
        those of a section."""
        dashed = self.name.replace("_", "-")
        if self.is_section:
            return f"--{dashed}-OPTION"
        return f"--{dashed}/--no-{dashed}" if self.kind is bool else f"--{dashed}"

    @property
    def is_section(self) -> bool:
        """Whether it holds options of nodes of one role."""
        return self.kind is RoleOptions

    @property
    def metavar(self) -> str:
        """What follows the flag; nothing after one that is on or off."""
        return {int: "INT", float: "FLOAT", bool: ""}.get(self.kind, "TEXT" if not self.values else "")

    @property
    def variable(self) -> str:
        """Its name in the environment, e.g. ``PACELINE_TREE_WIDTH``."""
        return PREFIX + self.name.upper() + ("_OPTION" if self.is_section else "")


def serve_options() -> list[Option]:
    """Every field of ServeConfig, in order; those of a group follow each other."""
    options, group = [], ""
    for name, info in ServeConfig.model_fields.items():
        group = next((mark.title for mark in info.metadata if isinstance(mark, Group)), group)
        kind = info.annotation if isinstance(info.annotation, type) and not choices_of(info) else str
        description = " ".join((info.description or "").split())
        values = ", ".join(RoleOptions.model_fields) if kind is RoleOptions else _values(info)
        options.append(Option(name, group, kind, _default(info.default), values, description))
    return options


def _default(value: object) -> str:
    if isinstance(value, RoleOptions):
        return "empty"
    return json.dumps(value) if isinstance(value, bool) else "empty" if value == "" else f"{value}"


def _values(info: FieldInfo) -> str:
    """Choices, or the range that ``Field`` gives."""
    if choices := choices_of(info):
        return ", ".join(choices)
    bounds = {}
    for mark in info.metadata:
        for kind in ("ge", "gt", "le", "lt"):
            if hasattr(mark, kind):
                bounds[kind] = f"{getattr(mark, kind):g}"
    if "ge" in bounds and "le" in bounds:
        return f"{bounds['ge']} to {bounds['le']}"
    words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    return ", ".join(f"{word} {bounds[kind]}" for kind, word in words.items() if kind in bounds)


def serve_parameters(only: Container[str] | None = None) -> list[inspect.Parameter]:
    """One command-line option for every field of ServeConfig and every option of a section, or for those of
    ``only``."""
    return [
        _parameter(single)
        for option in serve_options()
        if only is None or option.name in only
        for single in _singles(option)
    ]


def _singles(option: Option) -> list[Option]:
    """What the command line takes: an option itself, or each of a section."""
    if not option.is_section:
        return [option]
    common = {each.name: each for each in serve_options()}
    return [replace(common[name], name=f"{option.name}_{name}") for name in RoleOptions.model_fields]


def _parameter(option: Option) -> inspect.Parameter:
    declared = typer.Option(option.flag, hidden=True)  # ServeHelp shows it
    annotation = Annotated[option.kind | None, declared]  # type: ignore[name-defined]
    return inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


class ServeHelp(TyperCommand):
    """A command with options of a deployment. Its help lists them by group, each description below its flag:
    beside the flags, as in typer's tables, 80 columns would leave it 30."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As every command; flags of vLLM and SGLang, and a model without its flag, are told what they are here."""
        if ctx.resilient_parsing:
            return super().parse_args(ctx, args)
        taken = {flag for parameter in self.params for flag in (*parameter.opts, *parameter.secondary_opts)}
        if told := told_of_theirs(args, taken):
            ctx.fail(told)
        ctx.allow_extra_args = True  # refused below
        if extra := super().parse_args(ctx, args):
            hint = f". The model is given as --model {extra[0]}" if "--model" in taken else ""
            ctx.fail(f"Got unexpected arguments ({' '.join(extra)}){hint}")
        return extra

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help."""
        super().format_help(ctx, formatter)
        console = Console(highlight=False)
        taken = {parameter.name for parameter in self.params}
        listed = [option for option in serve_options() if _singles(option)[0].name in taken]
        for group, options in groupby(listed, key=lambda option: option.group):
            console.print(f"[bold]{group}[/bold]")
            for option in options:
                facts = "; ".join(filter(None, (option.metavar, option.values, f"default {option.default}")))
                console.print(Padding(f"[bold cyan]{option.flag}[/bold cyan]  {facts}", (0, 0, 0, 2), expand=False))
                text = f"{escape(option.description)} [dim]({option.variable})[/dim]"
                console.print(Padding(text, (0, 0, 0, 6), expand=False))
            console.print()
