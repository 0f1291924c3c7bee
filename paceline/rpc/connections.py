"""How many connections a server takes: fewer than this process may open files, so that files are left for others."""

from __future__ import annotations

import resource

MAX_CONNECTIONS = 4096  # of one server
PUBLIC_SERVERS = 2  # of a router: gRPC and HTTP
RESERVED_FILES = 512  # open files that are not for connections of clients: nodes, Redis, models


def most_connections(servers: int = 1) -> int:
    """The most that each of ``servers`` in this process takes."""
    open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if open_files < 0:
        return MAX_CONNECTIONS
    return min(MAX_CONNECTIONS, (open_files - min(RESERVED_FILES, open_files // 2)) // servers)
