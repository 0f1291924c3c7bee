"""Every port of a deployment and every credential that is not good enough: refused, counted, and a line in the audit.

Real gRPC, HTTPS and Redis, in one process. What a handshake refuses never reaches Paceline: it has no line.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.rpc.tls import TlsFolder
from tests.support.all_ports import (
    CALL_TIMEOUT_S,
    DENIED,
    IN,
    NODES,
    PORTS,
    SHAKEN,
    UNKNOWN,
    Credential,
    Deployment,
    context_of,
    deployed,
)
from tests.support.certificates import SECRET, expired, make_folder


def table(deployment: Deployment, stranger: TlsFolder, old: TlsFolder, mixed: TlsFolder) -> Iterator[tuple[Any, ...]]:
    """Port, what is shown, and what must come of it."""
    folder = deployment.folder
    for at, port in PORTS.items():
        role, key, node = port.role, port.key, at in NODES
        yield at, "no TLS", Credential(None, "", key), SHAKEN
        yield at, "no certificate", Credential(folder, "", key), SHAKEN
        yield at, "wrong CA", Credential(stranger, role, key), SHAKEN
        yield at, "certificate of another CA", Credential(mixed, role, key), SHAKEN
        yield at, "expired", Credential(old, role, key), SHAKEN
        if port.other_role:
            yield at, "another role", Credential(folder, port.other_role, key), DENIED
        bad_keys = ("", "earlier") if node else ("", "wrong", "revoked", "expired")
        for bad in bad_keys:
            yield at, f"key {bad or 'none'}", Credential(folder, role, bad), DENIED if node else UNKNOWN
        if port.other_key:
            yield at, f"key of scope {port.other_key}", Credential(folder, role, port.other_key), DENIED
        yield at, "what it takes", Credential(folder, role, key), IN


async def test_every_port_and_every_credential(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Mutants: a port without client certificates or without keys; a refusal that is not counted or has no line; an
    admin port that takes any certificate of the deployment's."""
    stranger = make_folder(tmp_path / "b")
    async with deployed(tmp_path) as deployment:
        old = expired(deployment.folder, tmp_path / "c")
        mixed = TlsFolder(Path(shutil.copytree(stranger.path, tmp_path / "d")))
        shutil.copy(deployment.folder.path / "ca.pem", mixed.path / "ca.pem")
        found, uncounted, silent = [], [], []
        for at, what, shown, due in table(deployment, stranger, old, mixed):
            before, lines = deployment.refused(), _audit(caplog)
            told = await deployment.ask(PORTS[at], at, shown)
            if told != due:
                found.append((at, what, told, due))
            elif told in (DENIED, UNKNOWN):
                if deployment.refused() != before + 1:
                    uncounted.append((at, what))
                if len(_audit(caplog)) != len(lines) + 1:
                    silent.append((at, what))
        assert (found, uncounted, silent) == ([], [], [])
        secrets = [*deployment.keys.secrets.values(), SECRET.call_token]
        assert not any(secret in caplog.text for secret in secrets)


def _audit(caplog: pytest.LogCaptureFixture) -> Sequence[str]:
    return [record.getMessage() for record in caplog.records if record.name == "paceline.audit"]


async def test_a_stream_over_http_goes_on_for_its_tenant_alone(tmp_path: Path) -> None:
    """Another tenant with the body and the id of an event. Mutant: a digest of the plan without the tenant's salt."""
    async with deployed(tmp_path) as deployment:
        shown = Credential(deployment.folder, "admin", "acme")
        url = f"https://{deployment.addresses['HTTPS']}/v1/completions"
        body = {"prompt": "hi", "max_tokens": 8, "stream": True}
        async with httpx.AsyncClient(verify=context_of(shown), timeout=CALL_TIMEOUT_S) as client:

            async def ask(key: str, **headers: str) -> httpx.Response:
                return await client.post(url, json=body, headers=dict(deployment.metadata(key)) | headers)

            first = (await ask("acme")).text.split("\n", 1)[0].removeprefix("id: ")
            assert (await ask("acme", **{"last-event-id": first})).status_code == 200
            assert (await ask("other", **{"last-event-id": first})).status_code == 409
