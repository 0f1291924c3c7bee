"""docs/api/grpc.md, from the comments of proto/."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2
from grpc_tools import protoc

from tests.support.reference.markdown import made_from, one_line, table

PROTO = Path(__file__).resolve().parents[3] / "proto"
PACKAGE = "paceline.v1."
PUBLIC = ("inference", "common", "trace")  # what clients of the model see
ADMIN = ("admin",)
INTERNAL = ("node", "handoff")
FIELD = descriptor_pb2.FieldDescriptorProto
SCALARS = {number: name.removeprefix("TYPE_").lower() for name, number in FIELD.Type.items()}
# Numbers of fields in descriptor.proto, which the paths of comments are made of.
SERVICE, METHOD, MESSAGE, ENUM, MESSAGE_FIELD, MESSAGE_ENUM, ENUM_VALUE, ONEOF = 6, 2, 4, 5, 2, 4, 2, 8

PAGE = """\
# gRPC API

{made}

The package is `paceline.v1`; its files are in `proto/`. The router serves `Inference` at the address of the option
`--grpc`, with gRPC's health checks and reflection beside it. `Admin` has an address of its own, that of `--admin`.
A deployment with [API keys](../guides/security.md) wants one in the metadata `authorization`, and with `--tls-dir` it
takes TLS alone ([how](../guides/security.md#tls)). The [Python SDK](python.md) is a client of `Inference`.

Errors are gRPC's statuses; [Errors](python.md#errors) lists them with the exceptions that the SDK raises. A call may
carry a deadline, and a call that is cancelled ends its generation.
"""


@dataclass(frozen=True)
class Entry:
    """A service, RPC, message, field, enum or value with its comment."""

    path: str  # e.g. inference.GenerateRequest.model
    comment: str
    item: Any  # its descriptor


def entries() -> list[Entry]:
    """Everything in proto/ that a reader may ask about, by file and in the files' order."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch, "set")
        sources = sorted(str(path.relative_to(PROTO)) for path in PROTO.rglob("*.proto"))
        status = protoc.main(["protoc", f"-I{PROTO}", f"--descriptor_set_out={out}", "--include_source_info", *sources])
        if status != 0:
            raise SystemExit("protoc failed")
        files = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file
    return [entry for file in files for entry in _entries_of(file)]


def _entries_of(file: descriptor_pb2.FileDescriptorProto) -> Iterator[Entry]:
    comments = {tuple(one.path): one.leading_comments for one in file.source_code_info.location}
    stem = Path(file.name).stem
    kinds: tuple[tuple[int, Iterable[Any], tuple[tuple[str, int], ...]], ...] = (
        (SERVICE, file.service, (("method", METHOD),)),
        (MESSAGE, file.message_type, (("field", MESSAGE_FIELD), ("oneof_decl", ONEOF))),
        (ENUM, file.enum_type, (("value", ENUM_VALUE),)),
    )
    for number, items, inner in kinds:
        for i, item in enumerate(items):
            yield Entry(f"{stem}.{item.name}", one_line(comments.get((number, i))), item)
            for attribute, inner_number in inner:
                for j, part in enumerate(getattr(item, attribute)):
                    if attribute == "oneof_decl" and part.name.startswith("_"):  # made for an optional field
                        continue
                    comment = one_line(comments.get((number, i, inner_number, j)))
                    yield Entry(f"{stem}.{item.name}.{part.name}", comment, part)
    for i, message in enumerate(file.message_type):
        for j, enum in enumerate(message.enum_type):
            path, place = f"{stem}.{message.name}.{enum.name}", (MESSAGE, i, MESSAGE_ENUM, j)
            yield Entry(path, one_line(comments.get(place)), enum)
            for k, value in enumerate(enum.value):
                yield Entry(f"{path}.{value.name}", one_line(comments.get((*place, ENUM_VALUE, k))), value)


def grpc_page() -> str:
    """The page."""
    found = {entry.path: entry for entry in entries()}
    parts = [PAGE.format(made=made_from("proto/"))]
    parts += [_chapter("What clients call", PUBLIC, found)]
    parts += [_chapter("For operators", ADMIN, found)]
    internal = "The router and the nodes call these among themselves. They may change with any version."
    parts += [_chapter("Between the nodes", INTERNAL, found, internal)]
    return "\n".join(parts)


def _chapter(title: str, files: tuple[str, ...], found: Mapping[str, Entry], note: str = "") -> str:
    parts = [f"## {title}\n", *([f"{note}\n"] if note else [])]
    own = [entry for file in files for entry in found.values() if entry.path.partition(".")[0] == file]
    for kind, make in (
        (descriptor_pb2.ServiceDescriptorProto, _service),
        (descriptor_pb2.DescriptorProto, _message),
        (descriptor_pb2.EnumDescriptorProto, _enum),
    ):
        parts += [make(entry, found) for entry in own if isinstance(entry.item, kind)]
    return "\n".join(parts)


def _service(entry: Entry, found: Mapping[str, Entry]) -> str:
    rows = [
        (
            f"`{rpc.name}`",
            ("stream of " if rpc.client_streaming else "") + _link(rpc.input_type),
            ("stream of " if rpc.server_streaming else "") + _link(rpc.output_type),
            found[f"{entry.path}.{rpc.name}"].comment,
        )
        for rpc in entry.item.method
    ]
    return f"### {entry.item.name}\n\n{entry.comment}\n\n{table(('RPC', 'request', 'answer', 'description'), rows)}"


def _message(entry: Entry, found: Mapping[str, Entry]) -> str:
    text = f"### {entry.item.name}\n\n{entry.comment}\n"
    if not entry.item.field:
        return text
    rows = [
        (f"`{field.name}`", _field_kind(field, entry.item), found[f"{entry.path}.{field.name}"].comment)
        for field in entry.item.field
    ]
    return f"{text}\n{table(('field', 'type', 'description'), rows)}"


def _enum(entry: Entry, found: Mapping[str, Entry]) -> str:
    rows = [(f"`{one.name}`", f"{one.number}", found[f"{entry.path}.{one.name}"].comment) for one in entry.item.value]
    name = entry.path.partition(".")[2]  # with that of the message that it stands in
    return f"### {name}\n\n{entry.comment}\n\n{table(('value', 'number', 'description'), rows)}"


def _field_kind(field: Any, message: Any) -> str:
    nested = {one.name: one for one in message.nested_type}
    entry = nested.get(field.type_name.rpartition(".")[2])
    if entry is not None and entry.options.map_entry:
        key, value = entry.field
        return f"map of {_kind(key)} to {_kind(value)}"
    kind = _kind(field)
    if field.label == FIELD.LABEL_REPEATED:
        return f"repeated {kind}"
    if field.proto3_optional:
        return f"optional {kind}"
    if field.HasField("oneof_index"):
        return f"{kind}, one of `{message.oneof_decl[field.oneof_index].name}`"
    return kind


def _kind(field: Any) -> str:
    return _link(field.type_name) if field.type_name else SCALARS[field.type]


def _link(type_name: str) -> str:
    name = type_name.removeprefix(f".{PACKAGE}")
    return f"[{name}](#{name.lower().replace('.', '')})"  # as headings are made into anchors
