"""Makes a deployment's own certificates: a CA that signs nothing else, and the files that paceline/rpc/tls.py reads."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import ConfigError
from paceline.rpc.tls import CA, ROLES, SERVER, URI_SCHEME, role_name, role_of

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

CA_DAYS = 3650
BACKDATE = timedelta(minutes=5)  # for clocks of hosts that differ


@dataclass(frozen=True)
class Shown:
    """One certificate of a folder."""

    file: str
    whom: str  # role and deployment, or the hosts that it is for
    until: datetime  # UTC
    days_left: int  # below 0: it is over


def init(folder: Path, deployment: str, hosts: Sequence[str], days: float) -> None:
    """A new CA, a certificate for each role, and one for the public face. ConfigError when there is a CA already.

    hosts: names and addresses that clients reach the router at.
    """
    if (folder / f"{CA}.key").exists() or (folder / f"{CA}.pem").exists():
        raise ConfigError("folder", f"{folder} has a CA already; `paceline certs renew` makes its certificates anew")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    key = _new_key(folder / f"{CA}.key")
    _write(folder / f"{CA}.pem", _pem(_ca_certificate(key, deployment)), 0o644)
    for role in ROLES:
        _issue(folder, role, [f"{URI_SCHEME}{deployment}/role/{role}"], [role_name(role)], days)
    _issue(folder, SERVER, [], hosts, days)


def renew(folder: Path, days: float) -> list[str]:
    """Sign every certificate of the folder anew, for the same names and keys; returns the files. ConfigError when the
    CA's key is not there."""
    renewed = []
    for name in (*ROLES, SERVER):
        file = folder / f"{name}.pem"
        if file.exists():
            _issue(folder, name, *_names(_load(file)), days)
            renewed.append(file.name)
    return renewed


def show(folder: Path) -> list[Shown]:
    """The certificates of a folder, the CA first. ConfigError when one cannot be read."""
    shown = []
    for name in (CA, *ROLES, SERVER):
        file = folder / f"{name}.pem"
        if not file.exists():
            continue
        found = _load(file)
        uris, hosts = _names(found)
        whom = f"signs for {_deployment_of(found)}" if name == CA else role_of(uris) or ", ".join(hosts)
        left = found.not_valid_after_utc - datetime.now(UTC)
        shown.append(Shown(file.name, whom, found.not_valid_after_utc, left.days))
    if not shown:
        raise ConfigError("folder", f"{folder} has no certificates; `paceline certs init` makes them")
    return shown


def _issue(folder: Path, name: str, uris: Iterable[str], hosts: Iterable[str], days: float) -> None:
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    ca_key, ca = _load_key(folder / f"{CA}.key"), _load(folder / f"{CA}.pem")
    file = folder / f"{name}.key"
    key = _load_key(file) if file.exists() else _new_key(file)
    named: list[x509.GeneralName] = [x509.UniformResourceIdentifier(uri) for uri in uris]
    named += [_host_name(host) for host in hosts]
    now = datetime.now(UTC)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"paceline {name}")])
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    made = (
        _builder(subject, ca.subject, key, now - BACKDATE, min(now + timedelta(days=days), ca.not_valid_after_utc))
        .add_extension(x509.SubjectAlternativeName(named), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
    )
    _write(folder / f"{name}.pem", _pem(_signed(made, ca_key)), 0o644)


def _ca_certificate(key: EllipticCurvePrivateKey, deployment: str) -> x509.Certificate:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    name = x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, deployment),
            x509.NameAttribute(NameOID.COMMON_NAME, f"paceline CA of {deployment}"),
        ]
    )
    now = datetime.now(UTC)
    made = (
        _builder(name, name, key, now - BACKDATE, now + timedelta(days=CA_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs=True), critical=True)
    )
    return _signed(made, key)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: EllipticCurvePrivateKey, since: datetime, until: datetime
) -> x509.CertificateBuilder:
    from cryptography import x509

    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(since, until - BACKDATE))
        .not_valid_after(until)
    )


def _key_usage(*, signs: bool) -> x509.KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def _signed(builder: x509.CertificateBuilder, key: EllipticCurvePrivateKey) -> x509.Certificate:
    from cryptography.hazmat.primitives.hashes import SHA256

    return builder.sign(key, SHA256())


def _host_name(host: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        return x509.DNSName(host)


def _names(certificate: x509.Certificate) -> tuple[list[str], list[str]]:
    """Its URIs, and its host names and addresses."""
    from cryptography import x509

    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return [], []
    addresses = [str(address) for address in found.get_values_for_type(x509.IPAddress)]
    return found.get_values_for_type(x509.UniformResourceIdentifier), [
        *found.get_values_for_type(x509.DNSName),
        *addresses,
    ]


def _deployment_of(ca: x509.Certificate) -> str:
    from cryptography.x509.oid import NameOID

    found = ca.subject.get_attributes_for_oid(NameOID.ORGANIZATION_NAME)
    return str(found[0].value) if found else "an unnamed deployment"


def _pem(certificate: x509.Certificate) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    return certificate.public_bytes(Encoding.PEM)


def _load(file: Path) -> x509.Certificate:
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificate(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError("folder", f"{file} is no certificate: {error}") from None


def _load_key(file: Path) -> EllipticCurvePrivateKey:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key(file.read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError("folder", f"{file} is no key: {error}") from None
    if not isinstance(key, EllipticCurvePrivateKey):
        raise ConfigError("folder", f"{file} is no key of an elliptic curve")
    return key


def _new_key(file: Path) -> EllipticCurvePrivateKey:
    from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    key = generate_private_key(SECP256R1())
    _write(file, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), 0o600)
    return key


def _write(file: Path, content: bytes, mode: int) -> None:
    """Replace a file at once, so that a handshake finds the old one or the new one."""
    scratch = file.with_name(f".{file.name}.{os.getpid()}")
    handle = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(handle, "wb") as out:
        out.write(content)
    scratch.replace(file)
