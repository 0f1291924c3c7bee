"""``python -m benchmarks.schema_suite FOLDER``: how the grammars of JSON schemas fare with JSON-Schema-Test-Suite.

FOLDER is one draft's of the suite's own repository, e.g. tests/draft2020-12. Each of its schemas comes with values
that are valid or not. A schema is taken or refused by name. Where a schema is taken, a value is judged by whether an
answer may be this value: *right* where that is the schema's word. An answer that could be an invalid value is *wrong*.
A valid value that no answer can be is *narrow*: e.g. an object whose properties come in another order.
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common.console import bar
from paceline.errors import InvalidRequest
from paceline.grammar.compile import GrammarCompiler
from paceline.models.config import ModelSpec
from paceline.models.hub import resolve_model
from paceline.request import Grammar, GrammarKind
from paceline.text.tokenizer import Tokenizer

SHOWN = 12  # of the reasons why schemas are refused
COUNTS = ("schemas", "taken", "refused", "values", "right", "narrow", "wrong")


@dataclass
class Coverage:
    """What came of a draft's schemas and values."""

    schemas: int = 0
    taken: int = 0
    refused: int = 0
    values: int = 0  # of schemas that are taken
    right: int = 0
    narrow: int = 0
    wrong: int = 0
    reasons: Counter[str] = field(default_factory=Counter)  # of refusals
    wrong_values: list[str] = field(default_factory=list)
    narrow_files: Counter[str] = field(default_factory=Counter)

    def figures(self) -> dict[str, Any]:
        """As they are kept."""
        counts = {name: dict(getattr(self, name).most_common()) for name in ("reasons", "narrow_files")}
        return {**{name: getattr(self, name) for name in COUNTS}, "wrong_values": self.wrong_values, **counts}


MayBe = Callable[[str], bool]  # whether an answer may be this text, however it is cut into tokens
Compile = Callable[[str], MayBe]  # of a schema; raises InvalidRequest for one that is not taken


def coverage(folder: Path, compile_schema: Compile, optional: bool) -> Coverage:
    """Every schema below ``folder``. optional: also those of formats and more that a validator may leave out."""
    found, groups = Coverage(), list(_groups(folder, optional))
    with bar("schemas") as show:
        for name, group in groups:
            show(found.schemas, len(groups), name)
            _try(found, compile_schema, name, group)
    return found


def _try(found: Coverage, compile_schema: Compile, name: str, group: dict[str, Any]) -> None:
    """Add what comes of one schema, and of its values."""
    found.schemas += 1
    try:
        may_be = compile_schema(json.dumps(group["schema"]))
    except InvalidRequest as error:
        found.refused += 1
        found.reasons[_reason(error.message)] += 1
        return
    found.taken += 1
    for test in group["tests"]:
        _judge(found, f"{name}: {group['description']}: {test['description']}", may_be, test)


def _groups(folder: Path, optional: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    for file in sorted(folder.rglob("*.json") if optional else folder.glob("*.json")):
        for group in json.loads(file.read_text(encoding="utf-8")):
            yield str(file.relative_to(folder)), group


def _judge(found: Coverage, name: str, may_be: MayBe, test: dict[str, Any]) -> None:
    found.values += 1
    allowed = may_be(json.dumps(test["data"], ensure_ascii=False))
    if allowed == test["valid"]:
        found.right += 1
    elif allowed:
        found.wrong += 1
        found.wrong_values.append(name)
    else:
        found.narrow += 1
        found.narrow_files[name.partition(":")[0]] += 1


def ours(model: str) -> Compile:
    """As nodes compile schemas and mask with them."""
    home = resolve_model(model)
    tokenizer = Tokenizer.from_folder(home)
    compiler = GrammarCompiler(home, ModelSpec.from_folder(home).vocab_size)

    def compile_schema(schema: str) -> MayBe:
        compiled = compiler.compile(Grammar(GrammarKind.JSON_SCHEMA, schema))

        def may_be(text: str) -> bool:
            matcher = compiled.matcher()
            ids = tokenizer.encode(text, add_special_tokens=False)
            return matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting()

        return may_be

    return compile_schema


def xgrammars() -> Compile:
    """xgrammar's own grammars of schemas, where it can be imported; over a vocabulary of bytes."""
    xgrammar: Any = importlib.import_module("xgrammar")
    vocabulary = [bytes([i]) for i in range(256)]
    compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo(vocabulary, stop_token_ids=[0]), max_threads=1)

    def compile_schema(schema: str) -> MayBe:
        try:
            compiled = compiler.compile_json_schema(schema, strict_mode=False)
        except Exception as error:  # of the library's own kinds
            raise InvalidRequest("grammar", str(error)) from None

        def may_be(text: str) -> bool:
            matcher = xgrammar.GrammarMatcher(compiled, terminate_without_stop_token=True)
            return bool(matcher.accept_string(text) and matcher.is_terminated())

        return may_be

    return compile_schema


def _reason(message: str) -> str:
    return message.partition("(")[0].split(" at ")[0][:100].strip()


def show(found: Coverage) -> None:
    """Print the counts, and what was refused most."""
    table = Table()
    for name in COUNTS:
        table.add_column(name)
    table.add_row(*(str(getattr(found, name)) for name in COUNTS))
    console = Console()
    console.print(table)
    for reason, count in found.reasons.most_common(SHOWN):
        console.print(f"{count} refused: {reason}", highlight=False, markup=False)
    for name in found.wrong_values:
        console.print(f"wrong: {name}", highlight=False, markup=False)


def main() -> None:
    """Run it, and keep the figures."""
    parser = argparse.ArgumentParser(prog="benchmarks.schema_suite", description=__doc__)
    parser.add_argument("folder", type=Path, help="a draft's folder of JSON-Schema-Test-Suite")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--library", choices=["ours", "xgrammar"], default="ours", help="whose grammars")
    parser.add_argument("--optional", action="store_true", help="the folder `optional` too")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    if not any(options.folder.glob("*.json")):
        parser.error(f"{options.folder} has no schemas; give a draft's folder of the suite, such as tests/draft2020-12")
    compile_schema = ours(options.model) if options.library == "ours" else xgrammars()
    found = coverage(options.folder, compile_schema, options.optional)
    show(found)
    if options.json is not None:
        kept = {"draft": options.folder.name, "library": options.library, **found.figures()}
        options.json.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
