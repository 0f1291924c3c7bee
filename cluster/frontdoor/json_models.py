"""Strict models of JSON objects: no conversions, no unknown fields, and errors that name the field by its path.

``read`` turns pydantic's errors into InvalidRequest with the path of the first wrong value, e.g. ``messages[0].role``.
A list ends at its first wrong item, and so do unknown fields: a body of a million faults is refused as fast as one with
a single fault.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ModelWrapValidatorHandler,
    ValidationError,
    model_validator,
)
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError, core_schema

from cluster.frontdoor.json_body import within
from paceline.errors import InvalidRequest

INT64_MIN, UINT64_MAX = -(2**63), 2**64 - 1  # beyond these no integer of an API has a meaning

_UNKNOWN_FIELD = "unknown_field"  # the error type of a field that the model does not have
# Error types of pydantic, in words that follow the name of a field.
_MESSAGES = {
    "missing": "is missing",
    "int_type": "must be an integer",
    "float_type": "must be a number",
    "string_type": "must be a string",
    "bool_type": "must be true or false",
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "literal_error": "must be {expected}",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
    "string_unicode": "is not valid Unicode: it has a lone surrogate",
    "string_too_short": "must not be empty",
    "string_too_long": "must have at most {max_length} characters",
    "too_short": "must not be empty",
    "too_long": "must have at most {max_length} items",
}


class JsonObject(BaseModel):
    """An object with the fields of the class and no others. A field that is null counts as absent."""

    model_config = ConfigDict(
        strict=True,
        frozen=True,
        use_attribute_docstrings=True,
        json_schema_extra={"additionalProperties": {"type": "null"}},
    )

    @model_validator(mode="wrap")
    @classmethod
    def _known_fields(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(value, dict):
            return handler(value)
        made = handler({name: value[name] for name in cls.model_fields if value.get(name) is not None})
        for position, (key, item) in enumerate(value.items()):
            if key not in cls.model_fields and item is not None:  # its place, since a key may be no valid Unicode
                raise PydanticCustomError(_UNKNOWN_FIELD, "is not a field that is known here", {"position": position})
        return made


M = TypeVar("M", bound=JsonObject)


def read(model: type[M], body: dict[str, Any]) -> M:
    """``body`` as a ``model``. Raises InvalidRequest naming the first field that is wrong."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
    context = first.get("ctx", {})
    message = _MESSAGES.get(first["type"], first["msg"]).format_map(context)
    raise InvalidRequest(_path(first, body, context), message)


def _path(error: ErrorDetails, body: dict[str, Any], context: Mapping[str, Any]) -> str:
    """Where the error is. Steps of pydantic's that are not in the body, such as the branch of a union, are left out."""
    path = ""
    value: Any = body
    last = len(error["loc"]) - 1  # a field that is missing
    for i, step in enumerate(error["loc"]):
        if isinstance(step, int):
            path, value = within(path, step), value[step]
        elif isinstance(value, dict) and (step in value or i == last):
            path, value = within(path, step), value.get(step)
    if error["type"] == _UNKNOWN_FIELD:
        path = within(path, list(value)[context["position"]])
    return path or "body"


def _check_unicode(text: str) -> str:
    """JSON can spell half a surrogate pair, which no UTF-8 can hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError("string_unicode", "") from None  # _MESSAGES has the words
    return text


Text = Annotated[str, AfterValidator(_check_unicode)]


def at_most(most: int) -> BeforeValidator:
    """Refuses a list or an object of more items before any of them is looked at."""

    def check(value: Any) -> Any:
        if isinstance(value, list | dict) and len(value) > most:
            raise PydanticCustomError("too_long", "", {"max_length": most})
        return value

    return BeforeValidator(check)


class Neutral:
    """Marks a field that is not supported: it takes null and the values that mean the same as leaving it out."""

    def __init__(self, *values: Any) -> None:
        self._values = values

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        same = "null and the values that mean the same as leaving it out" if self._values else "null"
        return {"enum": [*self._values, None], "description": f"This field is not supported: it takes only {same}."}

    def _check(self, value: Any) -> Any:
        if not any(value == neutral and type(value) is type(neutral) for neutral in self._values):
            raise PydanticCustomError("unsupported", "is not supported")
        return value
