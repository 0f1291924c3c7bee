"""A router's check of grammars: bounds first, then a trial in a process of its own, which a hostile grammar cannot
keep busy for longer than a moment and cannot fill (trial.py)."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
import subprocess
import sys
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from paceline.errors import InvalidRequest, Overloaded
from paceline.grammar.bounds import FIELD, check_source
from paceline.grammar.compile import (
    COMPILE_DEADLINE_S,
    MAX_COMPILE_S,
    MAX_WAITING,
    READ_DEADLINE_S,
    Program,
    grammar_key,
    program_of,
)
from paceline.request import Grammar

log = logging.getLogger(__name__)

MODULE = "paceline.grammar.trial"
TOO_MUCH = "takes too much memory to compile"
MAX_KEPT = 1024  # grammars whose outcome is remembered
MAX_ANSWER_BYTES = 16 * 1024
ANSWER_TIMEOUT_S = 8.0  # it ends each trial within 5 s by itself
END_S = 0.2
TRIES = 2  # of a grammar, where the process was lost: earlier grammars may have used up its memory
CRASHES = (-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS)  # as Rust ends where there is no memory or stack
TIMERS = (-signal.SIGPROF, -signal.SIGALRM)  # how it ends where a grammar takes too long


class GrammarChecker:
    """Says whether a grammar may go to the nodes. The process starts at the first grammar, and is kept."""

    def __init__(self, folder: Path | None, vocab_size: int) -> None:
        """folder: the model's; None has no tokenizer, and refuses every grammar. vocab_size: width of its logits."""
        self._trial = None if folder is None else _Trial(folder, vocab_size)
        self._kept: OrderedDict[str, str | None] = OrderedDict()  # why a grammar is refused; None: it is not
        self._thread = ThreadPoolExecutor(1, "grammar")
        self._waiting = 0

    async def check(self, grammar: Grammar) -> None:
        """Raises InvalidRequest for the field ``grammar``, Overloaded where too many grammars are in line, a trial
        takes too long, or cannot take place."""
        check_source(grammar.source)
        key = grammar_key(grammar)
        if key not in self._kept:
            self._keep(key, await self._outcome(grammar))
        self._kept.move_to_end(key)
        if (why := self._kept[key]) is not None:
            raise InvalidRequest(FIELD, why)

    def close(self) -> None:
        """End the process. Idempotent."""
        if self._trial is not None:
            self._trial.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _outcome(self, grammar: Grammar) -> str | None:
        try:  # what breaks a bound waits for no other grammar
            program = await asyncio.to_thread(program_of, grammar)
        except InvalidRequest as error:
            return error.message
        if self._trial is None:
            return "cannot be followed: this model has no tokenizer"
        if self._waiting >= MAX_WAITING:
            raise Overloaded("too many grammars wait to be compiled")
        self._waiting += 1
        limit_s = COMPILE_DEADLINE_S + (0.0 if self._trial.ready else READ_DEADLINE_S)
        work = self._thread.submit(self._trial.outcome, program)
        try:
            async with asyncio.timeout(limit_s):
                return await asyncio.wrap_future(work)
        except TimeoutError:
            raise Overloaded(f"the grammar was not compiled within {limit_s:g} s") from None
        finally:
            self._waiting -= 1

    def _keep(self, key: str, why: str | None) -> None:
        self._kept[key] = why
        while len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)


class _Trial:
    """The process and the channel to it. ``outcome`` is called by one thread; ``close`` by any."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self._command = [sys.executable, "-m", MODULE, str(folder), str(vocab_size)]
        self._guard = threading.Lock()  # of starting and ending
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._closed = False
        self.ready = False  # whether it has read the model's tokenizer

    def outcome(self, program: Program) -> str | None:
        """Why a program is refused; None: it is not. Raises Overloaded where nobody can say."""
        died = 0
        for _ in range(TRIES):
            asked = False
            try:
                if self._channel is None and (why := self._start()) is not None:
                    self._end()
                    return why
                asked = True
                return self._ask(json.dumps(asdict(program)).encode() + b"\n", ANSWER_TIMEOUT_S)
            except OSError as error:
                status = self._end()
                if status in TIMERS:
                    return f"takes more than {MAX_COMPILE_S:g} s to compile"
                log.warning("the process that tries grammars was lost (%s): %s", status, error)
                died += asked and status in CRASHES
        if died == TRIES:
            return TOO_MUCH
        raise Overloaded("grammars cannot be checked now")

    def close(self) -> None:
        """End it, whatever it does."""
        self._closed = True
        self._end()

    def _start(self) -> str | None:
        """Why this model can follow no grammar; None: it can. Raises OSError."""
        with self._guard:
            if self._closed:
                raise BrokenPipeError("the router stops")
            ours, theirs = socket.socketpair()
            with theirs:
                # Its own session: Ctrl-C is for the router. The end of the channel ends it.
                self._process = subprocess.Popen(self._command, stdin=theirs.fileno(), start_new_session=True)
            self._channel = ours
        why = self._ask(b"", READ_DEADLINE_S)
        self.ready = True
        return why

    def _ask(self, message: bytes, timeout_s: float) -> str | None:
        channel = self._channel
        if channel is None:
            raise BrokenPipeError("it was ended")
        channel.settimeout(timeout_s)
        channel.sendall(message)
        answer = b""
        while not answer.endswith(b"\n"):
            more = channel.recv(MAX_ANSWER_BYTES)
            if not more or len(answer) > MAX_ANSWER_BYTES:
                raise BrokenPipeError("it ended")
            answer += more
        why: str | None = json.loads(answer)
        return why

    def _end(self) -> int | None:
        """How it ended; None where it was not there."""
        with self._guard:
            channel, process = self._channel, self._process
            self._channel = self._process = None
            self.ready = False
        if channel is not None:
            channel.close()
        if process is None:
            return None
        with suppress(subprocess.TimeoutExpired):  # one that has closed its channel is about to end by itself
            return process.wait(END_S)
        process.kill()
        return process.wait()
