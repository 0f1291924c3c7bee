"""From a request's grammar to a checked, immutable thing that makes a matcher for every sequence.

The same code compiles a grammar in the process where a router tries it (check.py) and on a node. Compiling runs on one
thread of its own, one grammar at a time; what came of the latest grammars is kept, refusals too.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from llguidance import LLMatcher, LLParserLimits
from llguidance.gbnf_to_lark import gbnf_to_lark

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

from paceline.errors import InvalidRequest, Overloaded
from paceline.grammar.bounds import FIELD, check_choices, check_lark, check_regex, check_schema, check_source, parsed
from paceline.grammar.bounds import refuse as refuse_source
from paceline.grammar.tokens import GrammarTokens
from paceline.request import Grammar, GrammarKind

MAX_CACHED = 128  # grammars
MAX_CACHED_BYTES = 256 * 1024  # of their sources; a compiled schema takes 30 to 110 times as much, a regex up to 370
MAX_WAITING = 64  # grammars in line for the compiler
MAX_EBNF_BYTES = 32 * 1024
MAX_COMPILE_S = 1.0  # of compiling and the first mask; one that took longer is refused, and stays refused
COMPILE_DEADLINE_S = 10.0  # in line and compiling
READ_DEADLINE_S = 60.0  # more, where the model's tokenizer is still to be read: on a busy machine that takes long
MAX_ERROR_CHARS = 300
JSON_STYLE: JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

MAX_ITEMS = 10_000  # that the parser may create in a step; a sequence that needs more fails, and no other
MAX_EBNF_ITEMS = 3_000  # the same where rules may be ambiguous: each item is then met again and again


@dataclass(frozen=True)
class Program:
    """A grammar as the library compiles it."""

    text: str
    max_items: int = MAX_ITEMS


@dataclass(frozen=True)
class CompiledGrammar:
    """One grammar over one vocabulary. ``matcher`` may be called from any thread."""

    tokens: GrammarTokens
    _prototype: LLMatcher
    _lock: threading.Lock = field(default_factory=threading.Lock, compare=False)

    def matcher(self) -> LLMatcher:
        """A matcher at the beginning of the text, of which the caller is the only owner."""
        with self._lock:
            return self._prototype.deep_copy()


class GrammarCompiler:
    """The grammars of one model: compiled at need, the latest kept. Thread-safe."""

    def __init__(self, folder: Path | None, vocab_size: int) -> None:
        """folder: the model's; None has no tokenizer, and refuses every grammar. vocab_size: width of its logits.
        Nothing is read before the first grammar."""
        self._folder, self._vocab_size = folder, vocab_size
        self._lock = threading.Lock()  # of compiling
        self._guard = threading.Lock()  # of the cache, held for moments
        self._tokens: GrammarTokens | None = None
        self._kept: OrderedDict[str, tuple[int, CompiledGrammar | InvalidRequest]] = OrderedDict()
        self._bytes = 0
        self._thread: ThreadPoolExecutor | None = None
        self._waiting = 0

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Blocks while it compiles. Raises InvalidRequest for the field ``grammar``."""
        key = grammar_key(grammar)
        kept = self._find(key)
        if kept is None:
            with self._lock:
                kept = self._find(key) or self._made(grammar)
                self._keep(key, len(grammar.source), kept)
        if isinstance(kept, InvalidRequest):
            raise InvalidRequest(kept.field, kept.message)
        return kept

    async def compiled(self, grammar: Grammar) -> CompiledGrammar:
        """``compile`` off the event loop. Also raises Overloaded where too many grammars are in line, or a compilation
        takes too long."""
        check_source(grammar.source)
        if self._find(grammar_key(grammar)) is not None:
            return self.compile(grammar)
        if self._waiting >= MAX_WAITING:
            raise Overloaded("too many grammars wait to be compiled")
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "grammar")
        self._waiting += 1
        limit_s = COMPILE_DEADLINE_S + (0.0 if self._tokens is not None else READ_DEADLINE_S)
        work = self._thread.submit(self.compile, grammar)
        try:
            async with asyncio.timeout(limit_s):
                return await asyncio.wrap_future(work)
        except TimeoutError:
            raise Overloaded(f"the grammar was not compiled within {limit_s:g} s") from None
        finally:
            self._waiting -= 1

    def forget(self) -> None:
        """Empty the cache."""
        with self._guard:
            self._kept.clear()
            self._bytes = 0

    def close(self) -> None:
        """Let the thread end. Idempotent."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _find(self, key: str) -> CompiledGrammar | InvalidRequest | None:
        with self._guard:
            if key not in self._kept:
                return None
            self._kept.move_to_end(key)
            return self._kept[key][1]

    def _keep(self, key: str, size: int, made: CompiledGrammar | InvalidRequest) -> None:
        with self._guard:
            self._bytes -= self._kept.pop(key, (0, None))[0]
            self._kept[key] = (size, made)
            self._bytes += size
            while len(self._kept) > MAX_CACHED or (self._bytes > MAX_CACHED_BYTES and len(self._kept) > 1):
                self._bytes -= self._kept.popitem(last=False)[1][0]

    def _made(self, grammar: Grammar) -> CompiledGrammar | InvalidRequest:
        try:
            program = program_of(grammar)
            if self._folder is None:
                refuse_source("cannot be followed: this model has no tokenizer")
            if self._tokens is None:
                self._tokens = GrammarTokens.from_folder(self._folder, self._vocab_size)
            return compiled_program(program, self._tokens)
        except InvalidRequest as error:
            return error


def program_of(grammar: Grammar) -> Program:
    """What the library compiles. Raises InvalidRequest for a source that breaks a bound (``bounds``)."""
    check_source(grammar.source)
    try:
        return Program(_program(grammar), MAX_EBNF_ITEMS if grammar.kind is GrammarKind.EBNF else MAX_ITEMS)
    except ValueError as error:  # numbers beyond a float, escapes that are no character: JSON of another reader
        refuse_source(f"cannot be read: {_shortened(str(error))}")


def _program(grammar: Grammar) -> str:
    source = grammar.source
    match grammar.kind:
        case GrammarKind.JSON_OBJECT:
            return LLMatcher.grammar_from_json_schema('{"type": "object"}', defaults=JSON_STYLE)
        case GrammarKind.JSON_SCHEMA:
            check_schema(parsed(source))
            return LLMatcher.grammar_from_json_schema(source, defaults=JSON_STYLE)
        case GrammarKind.REGEX:
            check_regex(source)
            return LLMatcher.grammar_from_regex(source)
        case GrammarKind.CHOICE:
            texts = check_choices(parsed(source))
            return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(t, ensure_ascii=False) for t in texts))
        case GrammarKind.EBNF:
            return LLMatcher.grammar_from_lark(_lark(source))


def _lark(source: str) -> str:
    if len(source) > MAX_EBNF_BYTES:
        refuse_source(f"has more than {MAX_EBNF_BYTES} bytes")
    if "::=" in source:
        try:
            source = gbnf_to_lark(source).removeprefix("%llguidance {}")
        except RecursionError:
            refuse_source("is no GBNF: its brackets are too deeply nested")
        except Exception as error:
            refuse_source(f"is no GBNF: {_shortened(str(error))}")
    check_lark(source)
    return source


def _limits(program: Program) -> LLParserLimits:
    """What a step may take of the lexer's states and the parser's items."""
    return LLParserLimits(
        initial_lexer_fuel=50_000,
        step_lexer_fuel=100_000,
        step_max_items=program.max_items,
        max_lexer_states=20_000,  # 1 to 2 KB each
        max_grammar_size=100_000,
        verbose_errors=False,
    )


def compiled_program(program: Program, tokens: GrammarTokens) -> CompiledGrammar:
    """What ``program_of`` gave, compiled. Raises InvalidRequest."""
    began = time.thread_time()
    matcher = LLMatcher(tokens.inner, program.text, log_level=0, limits=_limits(program))
    if not matcher.is_error():
        matcher.compute_bitmask()  # where a lexer or a row of the parser is too large, it shows here
    if matcher.is_error():
        raise InvalidRequest(FIELD, f"cannot be compiled: {_shortened(matcher.get_error())}")
    if matcher.is_stopped() and not matcher.is_accepting():
        raise InvalidRequest(FIELD, "allows no text at all")
    if time.thread_time() - began > MAX_COMPILE_S:
        raise InvalidRequest(FIELD, f"takes more than {MAX_COMPILE_S:g} s to compile")
    return CompiledGrammar(tokens, matcher)


def _shortened(message: str) -> str:
    line = " ".join(message.replace("<non-verbose/>", "").split())
    return line if len(line) <= MAX_ERROR_CHARS else f"{line[:MAX_ERROR_CHARS]}..."


def grammar_key(grammar: Grammar) -> str:
    """What tells grammars apart."""
    return f"{grammar.kind}:{hashlib.sha256(grammar.source.encode('utf-8', 'surrogatepass')).hexdigest()}"
