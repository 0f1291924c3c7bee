"""A file of API keys, and what lets their holders in."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import yaml

from cluster.access.access import Access
from cluster.access.caller import Caller, set_current
from cluster.access.keys import Key, KeyFile, digest, new_key
from cluster.access.quotas import Quotas
from cluster.routing.metrics import Metrics
from paceline.rpc.audit import Audit

PAST = datetime.now(UTC) - timedelta(days=1)


def entry(key_id: str, key: str, tenant: str, **fields: Any) -> dict[str, Any]:
    return {"id": key_id, "sha256": digest(key), "tenant": tenant, **fields}


def caller(tenant: str, **fields: Any) -> Caller:
    """Somebody whose key the front door has seen."""
    return Caller(Key(**entry(tenant, new_key(), tenant, **fields)), "127.0.0.1")


async def asked_by(who: Caller, asking: Any) -> Any:
    """What ``asking`` gives when ``who`` asks. Run it as a task of its own."""
    set_current(who)
    return await asking


@dataclass
class Keys:
    """Keys by name, and their file."""

    path: Path
    secrets: dict[str, str]

    def header(self, name: str) -> dict[str, str]:
        """What the holder of the key ``name`` sends; an empty name sends none."""
        return {"authorization": f"Bearer {self.secrets[name]}"} if name else {}

    def access(self, model: str, metrics: Metrics | None = None) -> Access:
        metrics = metrics or Metrics()
        return Access(KeyFile(self.path, poll_s=0.02), Quotas(None, metrics), (model,), metrics, Audit())


def write_keys(path: Path) -> Keys:
    """One key of every kind; ``wrong`` is in no file."""
    fields: dict[str, dict[str, Any]] = {
        "acme": {},
        "other": {},
        "revoked": {"revoked": PAST},
        "expired": {"expires": PAST},
        "metrics": {"scopes": ["metrics"]},
        "operator": {"scopes": ["operator"]},
        "model": {"models": ["another"]},
        "slow": {"requests_per_minute": 2},
    }
    secrets = {name: new_key() for name in (*fields, "wrong")}
    entries = [entry(name, secrets[name], name, **more) for name, more in fields.items()]
    path.write_text(yaml.safe_dump({"keys": entries}))
    return Keys(path, secrets)
