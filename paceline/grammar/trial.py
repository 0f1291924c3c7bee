"""The process in which grammars of strangers are tried: ``python -m paceline.grammar.trial FOLDER VOCAB_SIZE``.

A compiler cannot be stopped from within. So the kernel ends this process where a grammar takes too long, and refuses it
memory beyond a bound. Channel: lines of JSON on stdin, a socket. To it: the fields of a ``Program``. From it: at first,
and then for every program, null, or a text that says why not.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import sys
from pathlib import Path

from paceline.errors import InvalidRequest
from paceline.grammar.check import TOO_MUCH
from paceline.grammar.compile import MAX_COMPILE_S, Program, compiled_program
from paceline.grammar.tokens import GrammarTokens

MAX_COMPILE_MIB = 256  # that grammars may take, all that were tried
MAX_WALL_S = 5.0  # of one grammar: the machine may be busy with other work


def main() -> None:
    """Serve until the other end closes."""
    channel = socket.socket(fileno=os.dup(0))
    try:
        tokens = GrammarTokens.from_folder(Path(sys.argv[1]), int(sys.argv[2]))
    except InvalidRequest as error:
        _say(channel, error.message)
        return
    _say(channel, None)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what a library says when it breaks is no news
    bound_memory()
    for line in channel.makefile("r", encoding="utf-8"):
        program = Program(**json.loads(line))
        _allow(MAX_COMPILE_S, MAX_WALL_S)
        answer = _tried(program, tokens)
        _allow(0.0, 0.0)
        _say(channel, answer)


def _tried(program: Program, tokens: GrammarTokens) -> str | None:
    try:
        compiled_program(program, tokens)
    except InvalidRequest as error:
        return error.message
    except MemoryError:
        return TOO_MUCH
    return None


def _allow(core_s: float, wall_s: float) -> None:
    """Time until the kernel ends this process; 0 for ever."""
    signal.setitimer(signal.ITIMER_PROF, core_s)
    signal.setitimer(signal.ITIMER_REAL, wall_s)


def bound_memory() -> None:
    """What is there now, and the bound above it."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    most = pages * resource.getpagesize() + MAX_COMPILE_MIB * 1024 * 1024
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _say(channel: socket.socket, why: str | None) -> None:
    channel.sendall(json.dumps(why).encode() + b"\n")


if __name__ == "__main__":
    main()
