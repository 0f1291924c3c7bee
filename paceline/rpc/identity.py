"""Who a process is among the parts of a deployment: how it calls others, and whom it lets call.

Two proofs, each where the deployment has it. A token that all parts share comes with every call, so that a stranger who
reaches the ports can do nothing. With a folder of certificates both ends also prove their role by mTLS.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from paceline.config import NodeConfig
from paceline.errors import ConfigError
from paceline.rpc.calls import CHANNEL_OPTIONS
from paceline.rpc.guard import TOKEN_KEY, Guard
from paceline.rpc.tls import Role, Stamp, TlsFolder, role_name
from paceline.rpc.wire_errors import Metadata

SECRET_BYTES = 32
MIN_SECRET_CHARS = 16


@dataclass(frozen=True)
class Secret:
    """What the parts of a deployment know and no stranger does. The parts get derived ones, never itself."""

    root: str = field(repr=False)

    @classmethod
    def from_file(cls, file: str) -> Secret:
        """That of a file, or a random one where no file is named. ConfigError naming ``secret_file``."""
        if not file:
            return cls(secrets.token_hex(SECRET_BYTES))
        try:
            text = Path(file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError("secret_file", f"{file}: {error}") from None
        if len(text) < MIN_SECRET_CHARS:
            raise ConfigError("secret_file", f"{file} holds fewer than {MIN_SECRET_CHARS} characters")
        return cls(text)

    @property
    def call_token(self) -> str:
        """Comes with every call between parts."""
        return self._derived("calls")

    @property
    def ticket_key(self) -> str:
        """Signs grants: for routers and decode nodes (`grants.Grants`)."""
        return self._derived("tickets")

    @property
    def journal_key(self) -> str:
        """Seals what routers keep in Redis about requests."""
        return self._derived("journal")

    def _derived(self, purpose: str) -> str:
        return hmac.new(self.root.encode(), f"paceline {purpose}".encode(), hashlib.sha256).hexdigest()


@dataclass(frozen=True)
class Identity:
    """A part's role, and its proofs. Without token and TLS everyone is let in: a part alone, in a test."""

    role: Role
    token: str = field(default="", repr=False)
    tls: TlsFolder | None = None

    @classmethod
    def of_node(cls, role: Role, config: NodeConfig) -> Identity:
        """A node's."""
        return cls(role, config.call_token.get_secret_value(), TlsFolder.of(config.tls_dir))

    @property
    def metadata(self) -> Metadata:
        """To send with every call."""
        return ((TOKEN_KEY, self.token),) if self.token else ()

    def channel(self, address: str, peer: Role, options: Seq[tuple[str, Any]] = CHANNEL_OPTIONS) -> grpc.aio.Channel:
        """To a part of role ``peer``; with TLS it must prove that. ConfigError naming ``tls_dir``."""
        if self.tls is None:
            return grpc.aio.insecure_channel(address, options=options)
        named = [*options, ("grpc.ssl_target_name_override", role_name(peer))]
        return grpc.aio.secure_channel(address, self.tls.channel_credentials(self.role), options=named)

    def check(self) -> None:
        """ConfigError naming ``tls_dir`` when a file that this part needs is missing or is none, and when its
        certificate is not valid now."""
        if self.tls is not None:
            self.tls.check(self.role)

    def stamp(self) -> Stamp:
        """Changes when channels made from now on have another certificate."""
        return () if self.tls is None else self.tls.stamp(self.role)

    def guard(self, roles: Mapping[str, Role]) -> Guard:
        """Whom a server of this part lets call. roles: who may call each method."""
        return Guard(roles, self.token, by_role=self.tls is not None)

    def bind(self, server: grpc.aio.Server, address: str, began: Callable[[], None] = lambda: None) -> int:
        """Let ``server`` listen at ``address``; returns the port. began: see ``TlsFolder.node_credentials``.
        RuntimeError when the port cannot be had."""
        if self.tls is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, self.tls.node_credentials(self.role, began))
