"""Options from three places that say the same things: command line, over ``PACELINE_*``, over a YAML file."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from paceline.config import ServeConfig, choices_of
from paceline.errors import ConfigError

PREFIX = "PACELINE_"
# Variables that are not options of a deployment.
OTHER_VARIABLES = {"PACELINE_HOME", "PACELINE_KERNELS"}


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
        for key, value in layer.items():
            if key not in ServeConfig.model_fields:
                raise ConfigError(
                    key, f"unknown option in {name}; known: {', '.join(sorted(ServeConfig.model_fields))}"
                )
            values[key], origin[key] = value, name
    try:
        return ServeConfig.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        key = str(first["loc"][0]) if first["loc"] else "config"
        raise ConfigError(key, f"{first['msg']} (from {origin.get(key, 'defaults')}: {first['input']!r})") from None


def _from_yaml(file: Path | None) -> dict[str, Any]:
    if file is None:
        return {}
    if not file.is_file():
        raise ConfigError("config", f"{file} does not exist")
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ConfigError("config", f"{file} is not YAML: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError("config", f"{file} must hold a mapping of options")
    return {str(key).replace("-", "_"): value for key, value in content.items()}


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    names = (name for name in environment if name.startswith(PREFIX) and name not in OTHER_VARIABLES)
    return {name.removeprefix(PREFIX).lower(): environment[name] for name in names}


def serve_parameters() -> list[inspect.Parameter]:
    """One command-line option for every field of ServeConfig."""
    return [_parameter(name, info) for name, info in ServeConfig.model_fields.items()]


def _parameter(name: str, info: FieldInfo) -> inspect.Parameter:
    kind: Any = info.annotation
    words = choices_of(info)
    choices = f" One of {', '.join(words)}." if words else ""
    if words:
        kind = str
    default = str(info.default) if isinstance(info.default, str) else info.default  # a word of an enumeration as such
    text = (info.description or "").strip() + choices + f" [default: {default!r}]"
    option = typer.Option(f"--{name.replace('_', '-')}" + (f"/--no-{name.replace('_', '-')}" if kind is bool else ""))
    option.help, option.show_default = text.strip(), False
    annotation = Annotated[kind | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
