"""The TCP sockets of other processes of this user: cut in one blow, or silenced and let speak again.

A descriptor of a running process is taken over with pidfd_getfd(2); no root is needed for one's own processes. A socket
whose filter refuses every packet is one whose cable is out: nothing arrives, acknowledgements neither, the peer sends
again and again, nobody is told. The kernel inherits a listener's filter to what it accepts.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

import psutil

PIDFD_GETFD = 438  # the same number on every architecture
SO_ATTACH_FILTER, SO_DETACH_FILTER = 26, 27
DROP = struct.pack("HBBI", 6, 0, 0, 0)  # one BPF instruction: return 0 bytes
ESTABLISHED = 1
SO_MEMINFO, DROPS_AT, MEMINFO_BYTES = 55, 32, 36  # an array of u32; the ninth counts the packets refused
TCP_INFO_BYTES = 104

_libc = ctypes.CDLL(None, use_errno=True)


class Taken:
    """A second descriptor of another process's socket."""

    def __init__(self, pid: int, fd: int) -> None:
        """OSError when the process is gone, or the descriptor."""
        process = os.pidfd_open(pid)
        try:
            copy = _libc.syscall(PIDFD_GETFD, process, fd, 0)
        finally:
            os.close(process)
        if copy < 0:
            raise OSError(ctypes.get_errno(), f"descriptor {fd} of process {pid}")
        self._socket = socket.socket(fileno=copy)

    def silence(self) -> None:
        """Let nothing in any more."""
        program = ctypes.create_string_buffer(DROP)
        self._socket.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(program)))

    def unsilence(self) -> None:
        """Let everything in again."""
        with suppress(OSError):  # it had no filter
            self._socket.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, struct.pack("i", 0))

    def cut(self) -> None:
        """End the connection both ways."""
        with suppress(OSError):  # it is not connected any more
            self._socket.shutdown(socket.SHUT_RDWR)

    def established(self) -> bool:
        """Whether it is a connection that nobody has ended."""
        return self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)[0] == ESTABLISHED

    def refused(self) -> int:
        """Packets that the kernel threw away on this socket."""
        counts = self._socket.getsockopt(socket.SOL_SOCKET, SO_MEMINFO, MEMINFO_BYTES)
        drops: int = struct.unpack_from("I", counts, DROPS_AT)[0]
        return drops

    def close(self) -> None:
        """Give the descriptor back."""
        self._socket.close()


@dataclass(frozen=True)
class Held:
    """A socket as the process that holds it sees it."""

    pid: int
    fd: int
    local: tuple[str, int]
    remote: tuple[str, int] | None  # None: it accepts connections


def held_by(pid: int) -> list[Held]:
    """Its connections and what it accepts them at; none of a process that is gone."""
    try:
        connections = psutil.Process(pid).net_connections("tcp")
    except psutil.NoSuchProcess:
        return []
    return [
        Held(pid, c.fd, (c.laddr.ip, c.laddr.port), (c.raddr.ip, c.raddr.port) if c.raddr else None)
        for c in connections
        if c.fd >= 0 and c.status in (psutil.CONN_ESTABLISHED, psutil.CONN_LISTEN)
    ]


def between(one: int, two: int) -> list[Held]:
    """Both ends of every connection between two processes."""
    ours, theirs = held_by(one), held_by(two)
    locals_of_one, locals_of_two = {s.local for s in ours if s.remote}, {s.local for s in theirs if s.remote}
    return [s for s in ours if s.remote in locals_of_two] + [s for s in theirs if s.remote in locals_of_one]


def listeners(pids: Iterable[int]) -> list[Held]:
    """What they accept connections at."""
    return [held for pid in pids for held in held_by(pid) if held.remote is None]


def who_listens(pids: Iterable[int], port: int) -> int | None:
    """The process that accepts connections at a port."""
    return next((held.pid for held in listeners(pids) if held.local[1] == port), None)
