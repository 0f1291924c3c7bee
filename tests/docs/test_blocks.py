"""What pages show besides commands: flags in a sentence exist, Python compiles and finds its imports or runs, YAML has
options. tests/examples runs the Python that needs a deployment."""

from __future__ import annotations

import ast
import importlib
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.core
import typer.main

from cluster.commands.cli import app
from cluster.commands.options import load_config
from tests.support.shell_blocks import ROOT, pages

GENERATED = "<!-- Generated"
OURS = ("paceline", "cluster", "kv_transfer", "prefill_node", "decode_node", "benchmarks", "draft_training", "tests")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+(?:\n[^`\n]+)?)`")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
# Flags of other programs than paceline, by the page that names them. coming_from_vllm.md has a test of its own.
OTHERS = {
    "README.md": {"--no-deps", "--wheel-dir"},  # pip
    "CONTRIBUTING.md": {"--https", "--upgrade-package", "--write"},  # tests/clients, uv, tests/support
    "deploy/README.md": {"--generate"},  # ray
    "docs/extend/drafter.md": {"--speculative-config"},  # vLLM
    "docs/guides/benchmarks.md": {"--option"},  # benchmarks.mixed
    "docs/guides/gpu.md": {  # benchmarks.gpu
        *("--drafts", "--from", "--keep", "--limit-mib", "--list", "--python", "--rows", "--try", "--xz"),
    },
    "docs/guides/operations.md": {"--install"},  # benchmarks.pictures
    "docs/guides/sizing.md": {"--option", "--values"},  # benchmarks.mixed
    "docs/guides/structured_output.md": {"--library"},  # benchmarks.schema_suite
    "docs/guides/security.md": {  # ray
        *("--max-worker-port", "--min-worker-port", "--node-manager-port", "--object-manager-port"),
    },
    "docs/internals/decisions.md": {"--crowd"},  # benchmarks.mixed
    "docs/internals/failures.md": {"--streams"},  # tests/chaos
    "docs/internals/first_device.md": {"--keep", "--try"},  # benchmarks.gpu
    "docs/internals/parallel.md": {"--kills", "--streams", "--whole"},  # tests/chaos, tests/ranks
    "docs/troubleshooting.md": {"--head"},  # ray
}


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@cache
def texts() -> dict[str, str]:
    """Pages that a hand wrote, by their names."""
    found = {name(page): page.read_text(encoding="utf-8") for page in [*pages(), *ROOT.glob("[CS]*.md")]}
    return {page: text for page, text in found.items() if GENERATED not in text[:1000]}


def blocks(page: str, kind: str) -> list[str]:
    return [body for found, body in FENCE.findall(texts()[page]) if found == kind]


def flags(command: Any) -> Iterator[str]:
    """Those of a command and of all below it."""
    for parameter in command.params:
        yield from (*parameter.opts, *parameter.secondary_opts)
    if isinstance(command, typer.core.TyperGroup):
        for below in command.commands.values():
            yield from flags(below)


@cache
def known() -> frozenset[str]:
    return frozenset({"--help", *flags(typer.main.get_command(app))})


def unknown_flags(text: str) -> set[str]:
    """Those that a sentence or a table names and that no command has."""
    return {flag for code in INLINE.findall(FENCE.sub("", text)) for flag in FLAG.findall(code)} - known()


def test_flags_that_a_page_names_exist() -> None:
    found = {page: unknown_flags(text) for page, text in texts().items() if page != "docs/coming_from_vllm.md"}
    assert {page: flags for page, flags in found.items() if flags} == OTHERS


def test_a_flag_that_nobody_has_is_noticed() -> None:
    assert unknown_flags("`--prefil-nodes 2`, `serve --nothing`, `--decode-tp`\n```sh\nls --all\n```\n") == {
        "--prefil-nodes",
        "--nothing",
    }


def missing_imports(source: str) -> list[str]:
    """Names that a block imports from our packages and that are not there. Raises SyntaxError for what is no Python."""
    missing = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in OURS:
            module = importlib.import_module(node.module)
            missing += [alias.name for alias in node.names if not hasattr(module, alias.name)]
    return missing


@pytest.mark.parametrize(
    "page", [page for page in texts() if not page.startswith("docs/extend/") and blocks(page, "python")]
)
def test_python_of_a_page_is_python(page: str) -> None:
    """The pages of docs/extend add modules, and have tests that run all of their code."""
    assert [found for source in blocks(page, "python") for found in missing_imports(source)] == []


def test_options_in_yaml_are_options(tmp_path: Path) -> None:
    found = blocks("docs/guides/sizing.md", "yaml")
    assert found
    for body in found:
        file = tmp_path / "options.yaml"
        file.write_text(body)
        assert load_config({}, file, environment={})


def test_json_is_json() -> None:
    found = [body for page in texts() for body in blocks(page, "json")]
    assert len(found) >= 2
    for body in found:
        lines = [body] if body.startswith("{\n") else body.splitlines()
        assert [json.loads(line) for line in lines]


NO_BENCHMARKS = {"pack_weights", "peers", "pictures"}  # what prepares one, or draws its results


def test_every_benchmark_that_a_page_names_is_listed() -> None:
    """In the table of docs/guides/benchmarks.md."""
    pattern = re.compile(r"python -m benchmarks\.(\w+)|paceline (bench \w+)")
    table = texts()["docs/guides/benchmarks.md"].partition("\n## ")[0]
    listed, named = (
        {module or command for module, command in pattern.findall(text)} for text in (table, "".join(texts().values()))
    )
    assert len(listed) > 12
    assert named - listed == NO_BENCHMARKS


def test_the_table_of_checks_names_what_is_there() -> None:
    """That of CONTRIBUTING.md: pages, folders and tests; every test of pages stands in it."""
    table = texts()["CONTRIBUTING.md"].partition("## What checks each page")[2].partition("\n## ")[0]
    named = {code for code in re.findall(r"`([^`\s]+)`", table) if "/" in code}
    assert len(named) > 15
    assert sorted(path for path in named if not (ROOT / path).exists()) == []
    tests = {f"tests/docs/{file.name}" for file in (ROOT / "tests/docs").glob("test_*.py")}
    assert tests - named == {"tests/docs/test_docstrings.py", "tests/docs/test_sizes.py"}  # of modules
