"""The process in which grammars of strangers are tried: ``python -m paceline.grammar.trial FOLDER VOCAB_SIZE``.

A compiler cannot be stopped from within, so each grammar is compiled in a fork of this process, which the kernel ends
when it takes too long, and in which memory is short. Channel: lines of JSON on stdin, a socket. To it: the fields of a
``Program``. From it: at first, and then for every program, null, or a text that says why not.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import sys
from pathlib import Path
from typing import NoReturn

from paceline.errors import InvalidRequest
from paceline.grammar.compile import MAX_COMPILE_S, Program, compiled_program
from paceline.grammar.tokens import GrammarTokens

MAX_COMPILE_MIB = 256  # that compiling one grammar may take
MAX_WALL_S = 5.0  # of one grammar: the machine may be busy with other work
TOO_LONG = f"takes more than {MAX_COMPILE_S:g} s to compile"
TOO_MUCH = f"takes more than {MAX_COMPILE_MIB} MiB of memory to compile"


def main() -> None:
    """Serve until the other end closes."""
    channel = socket.socket(fileno=os.dup(0))
    try:
        tokens = GrammarTokens.from_folder(Path(sys.argv[1]), int(sys.argv[2]))
    except InvalidRequest as error:
        _say(channel, error.message)
        return
    _say(channel, None)
    for line in channel.makefile("r", encoding="utf-8"):
        answered, status = _tried(channel, Program(**json.loads(line)), tokens)
        if not answered:
            _say(channel, TOO_LONG if status in (signal.SIGPROF, signal.SIGALRM) else TOO_MUCH)


def _tried(channel: socket.socket, program: Program, tokens: GrammarTokens) -> tuple[bool, int]:
    """Whether the fork gave the answer, and else the signal that ended it."""
    pid = os.fork()
    if pid == 0:
        _try(channel, program, tokens)
    _, status = os.waitpid(pid, 0)
    return status == 0, status & 0x7F


def _try(channel: socket.socket, program: Program, tokens: GrammarTokens) -> NoReturn:
    code = 1
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what a library says when it breaks is no news
        _bound()
        answer = None
        try:
            compiled_program(program, tokens)
        except InvalidRequest as error:
            answer = error.message
        _say(channel, answer)
        code = 0
    finally:
        os._exit(code)


def _bound() -> None:
    """The kernel ends this process where it takes too long; memory beyond the bound is refused to it."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    most = pages * resource.getpagesize() + MAX_COMPILE_MIB * 1024 * 1024
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.setitimer(signal.ITIMER_PROF, MAX_COMPILE_S)
    signal.setitimer(signal.ITIMER_REAL, MAX_WALL_S)


def _say(channel: socket.socket, why: str | None) -> None:
    channel.sendall(json.dumps(why).encode() + b"\n")


if __name__ == "__main__":
    main()
