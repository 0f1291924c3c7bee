"""docs/api/http.md, from the application's OpenAPI document."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

from cluster.contract.plan import CONTEXT_LENGTH_EXCEEDED
from cluster.frontdoor import http, http_errors, http_exchange, http_surface, openapi, resuming
from cluster.frontdoor.json_models import IGNORED_WORDS
from cluster.routing.metrics import Metrics
from paceline.config import ServeConfig
from tests.support.reference.comments import field_comments
from tests.support.reference.markdown import bounds, made_from, one_line, table

Schema = Mapping[str, Any]

PAGE = """\
# HTTP API

{made}

The HTTP address is that of the option `--http`. Requests and answers are those of OpenAI's completions and chat
completions, so OpenAI's own clients work with `base_url="http://HOST:PORT/v1"`. Sampling fields that OpenAI does not
have are those of vLLM and SGLang. [Responses and Messages](../guides/other_apis.md) has OpenAI's Responses API and
Anthropic's Messages API. A deployment with [API keys](../guides/security.md) wants one as
`authorization: Bearer KEY`.

A body is JSON of at most {mib} MiB, with the content type `application/json`, and arrives within {body_s:g} s
([limits](../guides/security.md#limits)). A field that is null counts as absent, and a whole number is an integer
however it is written (`16.0`).

A field of OpenAI, vLLM or SGLang that cannot change the text and is not offered is ignored. The answer's header
`{ignored}` names it, and so does the metric `paceline_ignored_fields_total`. One that would change the
answer is refused by name, unless its value means the same as leaving it out. A field that nobody knows is refused too.

Every answer has the header `x-request-id`. It is the one that the request brought, where that is 1 to 128 letters,
digits and signs of `._:=/+@-`, or it is made. A generation has it as its id, and `paceline trace` takes it.

A path may end with a slash, and HEAD is answered wherever GET is. Web pages of other origins are let in by
`--http-cors-origins`.

With `"stream": true` the answer is server-sent events: lines `data: {{...}}`, each a part of the answer, and
`data: [DONE]` as the last. An error after the first byte is a line `event: error` and a `data:` line with an
[Error](#error). Events of `/v1/responses` and `/v1/messages` have a name each, as their APIs say. A client that
disconnects, or does not read for {read_s:g} s in all (`--read-timeout-s`), ends its generation.

**A stream that broke goes on.** Events of answers have an `id:` line. Send the same body again, to this router or
another one of the same model, with the header `{resume}` set to the id that came last. The answer is the events that
are missing, and no character comes twice. The text up to there comes from the [journal](../concepts.md#journal), or is
made again. Status 409 says that the body, or the deployment, would make another text. Send `x-request-id` too, and the
answer keeps its id. An event without an id belongs to the next one that has one: act on it when that has come.

Streams have no ids with `echo`, with several prompts, with more than {choices} choices, and under an `--acceptance`
other than `sample`.

`GET {document}` answers this page's facts as OpenAPI 3.1.
"""

ERRORS = """\
## Errors

Every error has the body [Error](#error), below `/v1/messages` [MessageError](#messageerror). A client may try again
after 408, 429, 503 and 504.
"""


def document() -> dict[str, Any]:
    """The OpenAPI document; no router is asked for it."""
    return openapi.document(http.create_app(cast(Any, None), Metrics(), described=True))


def http_page() -> str:
    """The page."""
    found = document()
    made = made_from("cluster/frontdoor/")
    head = PAGE.format(
        made=made,
        mib=http_exchange.MAX_BODY_BYTES // 2**20,
        body_s=http_exchange.BODY_TIMEOUT_S,
        read_s=ServeConfig.model_fields["read_timeout_s"].default,
        document=openapi.PATH,
        ignored=http_surface.IGNORED,
        resume=resuming.HEADER.title().replace("Id", "ID"),
        choices=resuming.MAX_CHOICES,
    )
    operations = [
        _operation(method, path, one) for path, methods in found["paths"].items() for method, one in methods.items()
    ]
    schemas = found["components"]["schemas"]
    asked = [name for name in schemas if name in _reachable(schemas, *(body.__name__ for body in openapi.BODIES))]
    parts = [head, "## Operations\n", *operations, _errors()]
    parts += ["## Request bodies\n", *(_request(name, schemas[name]) for name in asked)]
    parts += ["## Answers\n", *(_object(name, schemas[name]) for name in schemas if name not in asked)]
    return "\n".join(parts)


def _operation(method: str, path: str, found: Schema) -> str:
    parts = [f"### {method.upper()} {path}\n", f"{one_line(found['description'])}\n"]
    body = found.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    if body:
        parts.append(f"Body: {_kind(body)}.\n")
    rows = []
    for status, answer in found["responses"].items():
        kinds = [
            _kind(media["schema"]) if name == "application/json" else f"`{name}`"
            for name, media in answer.get("content", {}).items()
            if media["schema"]
        ]
        rows.append((status, " or ".join(dict.fromkeys(kinds)), one_line(answer["description"])))
    parts.append(table(("status", "body", "meaning"), rows))
    return "\n".join(parts)


def _errors() -> str:
    wrong = "`invalid_request_error`"
    rows = [
        ("400", wrong, "`invalid_value`", "`InvalidRequest`"),
        ("400", wrong, f"`{CONTEXT_LENGTH_EXCEEDED}`", "`InvalidRequest`"),
        ("404", wrong, "`model_not_found`", ""),
        ("408", wrong, "`timeout`", ""),
        ("413", wrong, "`request_too_large`", ""),
        ("415", wrong, "", ""),
        ("500", "`server_error`", "`internal_error`", ""),
        *((f"{status}", f"`{kind}`", f"`{code}`", f"`{of.__name__}`") for of, status, kind, code in http_errors.KINDS),
    ]
    rows.sort(key=lambda row: row[0])
    return ERRORS + "\n" + table(("status", "`type`", "`code`", "[error of the SDK](python.md#errors)"), rows)


def _reachable(schemas: Mapping[str, Schema], *names: str) -> set[str]:
    """The schemas that these lead to, themselves included."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += _references(schemas[name])
    return found


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        if "$ref" in value:
            yield value["$ref"].rpartition("/")[2]
        for inner in value.values():
            yield from _references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _references(inner)


def _object(name: str, schema: Schema) -> str:
    rows = [
        (f"`{field}`", _kind(found), one_line(found.get("description")) or field_comments(name).get(field, ""))
        for field, found in schema.get("properties", {}).items()
    ]
    head = ("field", "type", "description")
    return f"### {name}\n\n{one_line(schema.get('description'))}\n\n{table(head, rows)}"


def _request(name: str, schema: Schema) -> str:
    """A body, or a part of one: what it needs comes first, then what is offered, then what is not."""
    required, fields = schema.get("required", ()), schema.get("properties", {})
    ignored = [field for field, found in fields.items() if found.get("description") == IGNORED_WORDS]
    refused = {field: found for field, found in fields.items() if _is_refused(found)}
    offered = [field for field in fields if field not in refused and field not in ignored]
    rows = [
        (f"`{field}`", _kind(fields[field]), "yes" if field in required else "", one_line(fields[field]["description"]))
        for field in offered
    ]
    rows.sort(key=lambda row: row[2], reverse=True)
    head = ("field", "type", "required", "description")
    parts = [f"### {name}\n\n{one_line(schema.get('description'))}\n", table(head, rows)]
    if refused or ignored:
        taken = [(f"`{field}`", _kind(found)) for field, found in refused.items()]
        taken += [(f"`{field}`", "anything: it is ignored") for field in ignored]
        parts += ["These fields are not offered. What they take means the same as leaving them out:\n"]
        parts += [table(("field", "values"), taken)]
    return "\n".join(parts)


def _is_refused(found: Schema) -> bool:
    return "enum" in found and None in found["enum"]


def _kind(schema: Schema) -> str:
    """The type of a value, with its bounds."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "enum" in schema:
        return ", ".join(f"`{_json(one)}`" for one in schema["enum"])
    if "const" in schema:
        return f"`{_json(schema['const'])}`"
    choices = schema.get("anyOf") or schema.get("oneOf")
    if choices:
        kinds = dict.fromkeys(_kind(one) for one in choices if one.get("type") != "null")
        return (", or " if any("," in kind for kind in kinds) else " or ").join(kinds)
    return _plain(schema)


def _plain(schema: Schema) -> str:
    match schema.get("type"):
        case "array" if "prefixItems" not in schema:
            inner = _kind(schema["items"]) if schema.get("items") else "any"
            most = f", at most {schema['maxItems']:,}" if "maxItems" in schema else ""
            return f"list of ({inner}){most}" if " or " in inner or "," in inner else f"list of {inner}{most}"
        case "object":
            values = schema.get("additionalProperties")
            return f"object of {_kind(values)}" if isinstance(values, Mapping) and values else "object"
        case "integer" | "number" as kind:
            low, high = schema.get("minimum", schema.get("exclusiveMinimum")), schema.get("maximum")
            return str(kind) + bounds(low, high, above="exclusiveMinimum" in schema)
        case "string":
            longest = schema.get("maxLength")
            return "string" + (f", at most {longest:,} characters" if longest else "")
        case None:
            return "any"
        case kind:
            return str(kind)


def _json(value: Any) -> str:
    return http_errors.dumps(value)
