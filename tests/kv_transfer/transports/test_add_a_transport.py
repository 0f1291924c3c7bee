"""docs/extend/transport.md, followed: its file and its record are installed, then its own tests run."""

from __future__ import annotations

import pytest

from cluster.commands.options import load_config
from paceline.errors import ConfigError
from paceline.transports import TRANSPORTS, TransportRecord
from tests.support.recipes import collected, install, load, record_of

PAGE = "transport.md"


@pytest.fixture(autouse=True)
def followed(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, PAGE, "kv_transfer/transports/tcp.py")
    record = record_of(PAGE, "paceline/transports.py", TransportRecord=TransportRecord)
    monkeypatch.setitem(TRANSPORTS, record.name, record)


globals().update(collected(load(PAGE, "tests/kv_transfer/transports/test_tcp.py")))


def test_an_operator_can_name_it() -> None:
    assert load_config({}, None, {"PACELINE_TRANSPORT": "tcp"}).transport == "tcp"
    with pytest.raises(ConfigError, match="gloo, nccl, tcp"):
        load_config({"transport": "tpc"}, None, {})
