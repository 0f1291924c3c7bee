"""Addresses: this host's own, and whether another host, or a node, answers at its."""

from __future__ import annotations

import asyncio
import errno
import socket

import grpc.aio
import psutil

from paceline.config import AUTO_HOST
from paceline.errors import ConfigError
from paceline.rpc.identity import Identity
from paceline.v1 import node_pb2, node_pb2_grpc

ANSWER_TIMEOUT_S = 1.0
LISTEN_TIMEOUT_S = 10.0
# What this process or host has no more of. It says nothing of the peer that was to be asked.
OWN_LIMITS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL)


def own_address(host: str, interface: str = "") -> str:
    """What to listen on here, and to tell others.

    host: an address of this host, or ``auto``: the one that Ray knows it by. interface: takes its IPv4 address
    instead, else its IPv6 one. Raises ConfigError when this host has no such interface, or it no address.
    """
    if interface:
        return _address_of(interface)
    if host != AUTO_HOST:
        return host
    import ray  # late: a node whose address is given needs no Ray

    return str(ray.util.get_node_ip_address())


def _address_of(interface: str) -> str:
    interfaces = psutil.net_if_addrs()
    if interface not in interfaces:
        raise ConfigError(
            "node_interface", f"{socket.gethostname()} has no {interface!r}, only {', '.join(sorted(interfaces))}"
        )
    for family in (socket.AF_INET, socket.AF_INET6):
        for found in interfaces[interface]:
            # A link-local address means nothing without its zone, which is another one on every host.
            if found.family == family and "%" not in found.address:
                return str(found.address)
    raise ConfigError("node_interface", f"{interface!r} of {socket.gethostname()} has no address")


def check_listens(address: str) -> None:
    """Raises OSError when nobody listens at ``HOST:PORT``, where Ray itself tries for minutes. Other forms of a Ray
    cluster's address, such as ``auto``, are Ray's to look at."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and "/" not in host:
        socket.create_connection((host.strip("[]"), int(port)), timeout=LISTEN_TIMEOUT_S).close()


async def host_answers(address: str) -> bool | None:
    """Whether the host of ``host:port`` answers: one that refuses the connection does, and one whose process is stopped
    (the kernel accepts for it); one without power or network does not. None: it could not be asked, since this process
    has no open file, port or memory left for a connection."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except ConnectionRefusedError:
        return True
    except OSError as error:  # no route, no answer in time (TimeoutError is one)
        return None if error.errno in OWN_LIMITS else False
    writer.transport.abort()
    return True


async def node_answers(identity: Identity, role: str, address: str) -> bool:
    """Whether the gRPC server of a node answers; false after ANSWER_TIMEOUT_S."""
    decodes = role == "decode"
    async with identity.channel(address, "decode" if decodes else "prefill") as channel:
        try:
            stub = node_pb2_grpc.DecodeNodeStub(channel) if decodes else node_pb2_grpc.PrefillNodeStub(channel)
            await stub.Status(node_pb2.StatusRequest(), timeout=ANSWER_TIMEOUT_S, metadata=identity.metadata)
        except grpc.aio.AioRpcError:
            return False
    return True
