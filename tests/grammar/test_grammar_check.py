"""A router's check of grammars: one that cannot be compiled in time or memory is refused, and holds up nobody."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from paceline.errors import InvalidRequest, Overloaded
from paceline.grammar.check import GrammarChecker
from paceline.grammar.compile import GrammarCompiler
from paceline.grammar.trial import MAX_COMPILE_MIB
from paceline.request import Grammar, GrammarKind
from tests.support.grammar_engines import GRAMMAR_VOCAB
from tests.support.tiny_chat import write_chat_tokenizer

GOOD = Grammar(GrammarKind.REGEX, "a+")
HUNG_BELOW_S = 6.0  # of a compilation that may take 1 s of a core, on a machine that runs other tests


def endless() -> Grammar:
    """Within all bounds, and llguidance 1.9 does not come back from it within minutes."""
    patterns = [{"type": "string", "pattern": f".*{chr(97 + i)}.{{{200 + i}}}"} for i in range(26)]
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"type": "string", "allOf": patterns}))


@pytest_asyncio.fixture
async def checker(tmp_path: Path) -> AsyncIterator[GrammarChecker]:
    made = GrammarChecker(write_chat_tokenizer(tmp_path), GRAMMAR_VOCAB)
    try:
        yield made
    finally:
        made.close()
        assert _trials() == []


def _trials() -> list[psutil.Process]:
    return [p for p in psutil.Process().children(recursive=True) if "paceline.grammar.trial" in p.cmdline()]


async def refusal(checker: GrammarChecker, grammar: Grammar) -> str:
    with pytest.raises(InvalidRequest) as refused:
        await checker.check(grammar)
    assert refused.value.field == "grammar"
    return refused.value.message


async def test_a_compilation_without_end_is_ended(checker: GrammarChecker) -> None:
    """Others are refused meanwhile, or wait for their turn; the event loop runs on. Fails without ITIMER_PROF."""
    await checker.check(GOOD)
    began = time.monotonic()
    hung = asyncio.create_task(refusal(checker, endless()))
    behind = asyncio.create_task(checker.check(Grammar(GrammarKind.REGEX, "b+")))
    await asyncio.sleep(0.1)
    assert "more than 10000" in await refusal(checker, Grammar(GrammarKind.REGEX, "(a{1000}){1000}"))
    assert not hung.done(), "a bound waited for the compiler"
    longest, last = 0.0, time.monotonic()
    while not hung.done():
        await asyncio.sleep(0.001)
        longest, last = max(longest, time.monotonic() - last), time.monotonic()
    assert await hung == "takes more than 1 s to compile"
    assert time.monotonic() - began < HUNG_BELOW_S
    assert longest < 0.25
    await behind
    again = time.monotonic()
    assert await refusal(checker, endless())
    assert time.monotonic() - again < 0.1, "it was tried again"


async def test_a_process_that_is_lost_is_started_anew(checker: GrammarChecker) -> None:
    """One that is stopped is ended all the same when the router ends (the fixture)."""
    await checker.check(GOOD)
    _trials()[0].kill()
    await checker.check(Grammar(GrammarKind.REGEX, "c+"))
    assert "unclosed group" in await refusal(checker, Grammar(GrammarKind.REGEX, "(a"))
    _trials()[0].send_signal(signal.SIGSTOP)


async def test_the_first_grammar_waits_for_the_tokenizer_too(
    checker: GrammarChecker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a router and on a node. Mutants: the first has no longer than the others; all have as long as the first."""
    compiler = GrammarCompiler(tmp_path, GRAMMAR_VOCAB)
    for module in ("check", "compile"):
        monkeypatch.setattr(f"paceline.grammar.{module}.COMPILE_DEADLINE_S", 0.0)
    await checker.check(GOOD)
    with pytest.raises(Overloaded, match="within 0 s"):
        await checker.check(Grammar(GrammarKind.REGEX, "d+"))
    await compiler.compiled(GOOD)
    with pytest.raises(Overloaded, match="within 0 s"):
        await compiler.compiled(Grammar(GrammarKind.REGEX, "d+"))
    compiler.close()


async def test_models_that_cannot_follow_one(tmp_path: Path) -> None:
    assert "no tokenizer" in await refusal(GrammarChecker(None, 10), GOOD)
    without = GrammarChecker(tmp_path, 10)
    assert "no tokenizer.json" in await refusal(without, GOOD)
    without.close()


def test_memory_is_bounded() -> None:
    """The bound of a trial, on something that needs more. Fails without RLIMIT_AS."""
    code = f"from paceline.grammar.trial import bound_memory; bound_memory(); bytearray({MAX_COMPILE_MIB + 64} << 20)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "MemoryError" in done.stderr
