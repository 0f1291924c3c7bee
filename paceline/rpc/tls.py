"""TLS from a folder of PEM files. Every handshake sees the files as they are then, so that certificates are renewed
without a restart.

| file                          | what it is                                                                          |
|-------------------------------|-------------------------------------------------------------------------------------|
| ``ca.pem``                    | who signs the certificates of this deployment's parts, and nobody else's            |
| ``ROLE.pem``, ``ROLE.key``    | certificate and key of router, prefill, decode or admin; a host needs its own only   |
| ``server.pem``, ``server.key``| what clients see at gRPC and HTTPS; without them the public face is not encrypted    |
| ``client-ca.pem``             | when it is there, clients need a certificate that it signed                          |

A part's role stands in its certificate as the URI ``paceline://DEPLOYMENT/role/ROLE``, and as the name that the other
end asks for in place of a host's: addresses change, roles do not.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal

import grpc

from paceline.errors import ConfigError

log = logging.getLogger(__name__)

Role = Literal["router", "prefill", "decode", "admin"]
ROLES: tuple[Role, ...] = ("router", "prefill", "decode", "admin")
CA, SERVER, CLIENT_CA = "ca", "server", "client-ca"
URI_SCHEME = "paceline://"
MAX_FILE_BYTES = 1024 * 1024

Stamp = tuple[tuple[int, int], ...]  # of each file: when it was last written, and its size


def role_name(role: Role) -> str:
    """The DNS name in a role's certificate."""
    return f"{role}.paceline"


def role_of(uris: list[str]) -> str:
    """The role that a certificate's URIs name; empty when they name none, or more than one."""
    roles = [uri.rpartition("/role/")[2] for uri in uris if uri.startswith(URI_SCHEME) and "/role/" in uri]
    return roles[0] if len(roles) == 1 else ""


@dataclass(frozen=True)
class TlsFolder:
    """The files below ``path``. ConfigError naming ``tls_dir`` when one that is needed is missing or is none."""

    path: Path

    @classmethod
    def of(cls, folder: str) -> TlsFolder | None:
        """None where no folder is named."""
        return cls(Path(folder)) if folder else None

    def channel_credentials(self, role: Role) -> grpc.ChannelCredentials:
        """To call other parts as ``role``; the files are read now."""
        return grpc.ssl_channel_credentials(
            self._read(f"{CA}.pem"), self._read(f"{role}.key"), self._read(f"{role}.pem")
        )

    def stamp(self, role: Role) -> Stamp:
        """Changes when a file of `channel_credentials` does."""
        return self._stamp((f"{CA}.pem", f"{role}.key", f"{role}.pem"))

    def node_credentials(self, role: Role, began: Callable[[], None] = lambda: None) -> grpc.ServerCredentials:
        """To be called as ``role``, by parts that have a certificate of this deployment's. began: called when a
        connection begins its handshake, on a thread of gRPC's."""
        return self._server_credentials(role, CA, began)

    def check(self, role: Role) -> None:
        """ConfigError also when the certificate of a part that starts now is over, or not valid yet: other parts would
        end its handshakes without a word."""
        from cryptography import x509  # a client has none

        self.node_credentials(role)
        try:
            own = x509.load_pem_x509_certificate(self._read(f"{role}.pem"))
        except ValueError as error:
            raise ConfigError("tls_dir", f"{role}.pem of {self.path} is no certificate: {error}") from None
        since, until = own.not_valid_before_utc, own.not_valid_after_utc
        if not since <= datetime.now(UTC) <= until:
            valid = f"{since:%Y-%m-%d %H:%M} to {until:%Y-%m-%d %H:%M} UTC"
            renew = f"sign it anew with: paceline certs renew {self.path}"
            raise ConfigError("tls_dir", f"{role}.pem of {self.path} is valid from {valid}; {renew}")

    @property
    def is_public(self) -> bool:
        """There is a certificate for the public face."""
        return (self.path / f"{SERVER}.pem").exists()

    def public_credentials(self, began: Callable[[], None] = lambda: None) -> grpc.ServerCredentials:
        """The public gRPC takes them. began: as in ``node_credentials``."""
        return self._server_credentials(SERVER, self._client_ca(), began)

    def public_context(self, refused: Callable[[str], None]) -> ssl.SSLContext:
        """HTTPS takes it. refused: told why, in OpenSSL's words, whenever a handshake fails."""
        names = self._names(SERVER, self._client_ca())
        context, stamp = self._context(), self._stamp(names)

        def renew(connection: Any, name: str | None, _: ssl.SSLContext) -> None:
            nonlocal context, stamp
            try:
                if (now := self._stamp(names)) != stamp:
                    context, stamp = self._context(), now
            except ConfigError as error:  # written at this moment, perhaps: the next handshake sees
                log.error("the certificate of HTTPS stays as it was: %s", error)
            connection.context = context

        first = self._context()
        first.sslobject_class = _handshakes(refused)
        first.sni_callback = renew  # called without a name too
        return first

    # -- insides -----------------------------------------------------------------------------------------------

    def _client_ca(self) -> str | None:
        return CLIENT_CA if (self.path / f"{CLIENT_CA}.pem").exists() else None

    def _context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self.path / f"{SERVER}.pem", self.path / f"{SERVER}.key")
            if (client_ca := self._client_ca()) is not None:
                context.verify_mode = ssl.CERT_REQUIRED
                context.load_verify_locations(self.path / f"{client_ca}.pem")
        except OSError as error:  # an ssl.SSLError is one
            raise ConfigError(
                "tls_dir", f"{SERVER}.pem and {SERVER}.key of {self.path} do not serve: {error}"
            ) from None
        return context

    def _server_credentials(
        self, name: str, client_ca: str | None, began: Callable[[], None]
    ) -> grpc.ServerCredentials:
        names = self._names(name, client_ca)
        stamp = self._stamp(names)
        make = partial(self._configuration, name, client_ca)

        def renewed() -> Any:
            """Called before each handshake. None: nothing has changed."""
            nonlocal stamp
            began()
            try:
                if (now := self._stamp(names)) == stamp:
                    return None
                made = make()
            except ConfigError as error:  # written at this moment, perhaps: the next handshake sees
                log.error("the certificate of %s stays as it was: %s", name, error)
                return None
            stamp = now
            return made

        fetch: Callable[[], Any] = renewed
        return grpc.dynamic_ssl_server_credentials(make(), fetch, require_client_authentication=client_ca is not None)

    def _configuration(self, name: str, client_ca: str | None) -> Any:
        root = None if client_ca is None else self._read(f"{client_ca}.pem")
        return grpc.ssl_server_certificate_configuration([(self._read(f"{name}.key"), self._read(f"{name}.pem"))], root)

    @staticmethod
    def _names(name: str, client_ca: str | None) -> tuple[str, ...]:
        return (f"{name}.key", f"{name}.pem", *(() if client_ca is None else (f"{client_ca}.pem",)))

    def _stamp(self, names: tuple[str, ...]) -> Stamp:
        try:
            found = [(self.path / name).stat() for name in names]
        except OSError as error:
            raise ConfigError("tls_dir", f"{error.filename}: {error.strerror}") from None
        return tuple((one.st_mtime_ns, one.st_size) for one in found)

    def _read(self, name: str) -> bytes:
        file = self.path / name
        try:
            with file.open("rb") as handle:
                content = handle.read(MAX_FILE_BYTES)
        except OSError as error:
            raise ConfigError("tls_dir", f"{file}: {error.strerror}") from None
        if b"-----BEGIN " not in content:
            raise ConfigError("tls_dir", f"{file} is no PEM file")
        return content


def _handshakes(refused: Callable[[str], None]) -> type[ssl.SSLObject]:
    """What a context makes for each connection. It tells ``refused`` why a handshake failed."""

    class Handshake(ssl.SSLObject):
        def do_handshake(self) -> None:
            try:
                super().do_handshake()
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):  # not over yet
                raise
            except ssl.SSLError as error:
                refused(getattr(error, "verify_message", "") or error.reason or type(error).__name__)
                raise

    return Handshake
