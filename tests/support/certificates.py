"""Folders of certificates, and the parts of a deployment that use them."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from cluster.commands import certificates
from paceline.rpc.grants import Grants
from paceline.rpc.identity import Identity, Secret
from paceline.rpc.tls import Role, TlsFolder
from tests.fakes.nodes import Cluster, cluster, node_config

SECRET = Secret("a secret of the tests")
LOOPBACK = ("localhost", "127.0.0.1")


def make_folder(path: Path, deployment: str = "test") -> TlsFolder:
    """A deployment's own CA and certificates."""
    certificates.init(path, deployment, LOOPBACK, 1)
    return TlsFolder(path)


def expired(folder: TlsFolder, into: Path) -> TlsFolder:
    """A copy whose certificates are over since a minute."""
    shutil.copytree(folder.path, into)
    certificates.renew(into, -1 / 1440)
    return TlsFolder(into)


def identity(role: Role, tls: TlsFolder | None, token: str = SECRET.call_token) -> Identity:
    """A part that knows the secret, unless another token is given."""
    return Identity(role, token, tls)


@asynccontextmanager
async def secured(tls: TlsFolder | None, **more: Any) -> AsyncIterator[Cluster]:
    """Both nodes of a deployment with a secret, and with certificates where there are some. more: options of both."""
    options = more | {"tls_dir": str(tls.path) if tls else "", "call_token": SecretStr(SECRET.call_token)}
    prefill = node_config(**options)
    decode = node_config(page_size=8, ticket_key=SecretStr(SECRET.ticket_key), **options)
    async with cluster(prefill, decode, identity=identity("router", tls), grants=Grants(SECRET.ticket_key)) as nodes:
        yield nodes
