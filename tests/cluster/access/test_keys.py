"""The file of API keys: what the command writes, what is refused, what is read again."""

from __future__ import annotations

import asyncio
import stat
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from cluster.access.keys import KeyFile, digest, read_keys
from cluster.commands.keys import app
from paceline.errors import ConfigError, Unauthenticated
from tests.support.api_keys import entry, write_keys


def run(*arguments: str) -> str:
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == 0, done.output
    return str(done.stdout)


def test_the_command_makes_revokes_and_lists_and_keeps_no_key(tmp_path: Path) -> None:
    """Mutants: the key in the entry; the file written in place, or readable by others."""
    file = tmp_path / "keys.yaml"
    key = run("create", "--file", str(file), "--tenant", "acme", "--id", "one", "--concurrency", "3").strip()
    first = file.stat().st_ino
    run("create", "--file", str(file), "--tenant", "acme", "--scope", "metrics", "--days", "-1")
    assert file.stat().st_ino != first
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert key.startswith("pl-")
    assert len(key) >= 46
    assert key not in file.read_text()
    assert digest(key) in file.read_text()
    assert KeyFile(file).find(key).concurrency == 3
    run("revoke", "--file", str(file), "one")
    with pytest.raises(Unauthenticated, match="was revoked"):
        KeyFile(file).find(key)
    assert [line.split("\t")[1:] for line in run("list", "--file", str(file)).splitlines()] == [
        ["acme", "infer", "revoked"],
        ["acme", "metrics", "expired"],
    ]
    before = file.read_bytes()
    refused = CliRunner().invoke(app, ["create", "--file", str(file), "--tenant", "a b"])
    assert isinstance(refused.exception, ConfigError)
    assert file.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == [".keys.yaml.lock", "keys.yaml"]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("keys: [", "is not YAML"),
        ("keys: 5", "keys"),
        ("more: 1", "more"),
        (yaml.safe_dump({"keys": [entry("a", "x", "t", scopes=["all"])]}), "keys.0.scopes.0"),
        (yaml.safe_dump({"keys": [entry("a", "x", "t", priorities=[3, 1])]}), "keys.0.priorities"),
        (yaml.safe_dump({"keys": [entry("a", "x", "t") | {"key": "x"}]}), "keys.0.key"),
        (yaml.safe_dump({"keys": [entry("a", "x", "t"), entry("b", "x", "t")]}), "two keys have the sha256"),
        ("a: !!python/object/apply:os.getcwd []", "is not YAML"),
    ],
)
def test_a_file_that_is_wrong_names_the_entry(tmp_path: Path, text: str, named: str) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=named):
        read_keys(file)


async def test_the_file_is_read_again_as_a_whole_or_not_at_all(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = write_keys(tmp_path / "keys.yaml")
    file = KeyFile(keys.path, poll_s=0.02)
    file.start()

    async def until(holds: object) -> None:
        async with asyncio.timeout(5):
            while not holds():  # type: ignore[operator]
                await asyncio.sleep(0.01)

    def known(key: str) -> bool:
        try:
            return bool(file.find(key))
        except Unauthenticated:
            return False

    try:
        good = entry("late", "pl-late", "late")
        keys.path.write_text(yaml.safe_dump({"keys": [good, {"id": "half"}]}))
        await until(lambda: "API KEYS ARE NOT CHANGED" in caplog.text)
        assert known(keys.secrets["acme"])
        assert not known("pl-late")
        keys.path.unlink()
        await until(lambda: "cannot be read" in caplog.text)
        assert known(keys.secrets["acme"])
        keys.path.write_text(yaml.safe_dump({"keys": [good]}))
        await until(lambda: known("pl-late"))
        assert not known(keys.secrets["acme"])
    finally:
        await file.close()


async def test_a_folder_that_is_exchanged_by_a_link(tmp_path: Path) -> None:
    """As Kubernetes renews a Secret. Mutant: the link is looked at in place of the file."""
    for version in ("old", "new"):
        (tmp_path / version).mkdir()
        content = {"keys": [entry(version, f"pl-{version}", version)]}
        (tmp_path / version / "keys.yaml").write_text(yaml.safe_dump(content))
    (tmp_path / "now").symlink_to("old")
    (tmp_path / "keys.yaml").symlink_to("now/keys.yaml")
    file = KeyFile(tmp_path / "keys.yaml", poll_s=0.02)
    file.start()
    try:
        assert file.find("pl-old").tenant == "old"
        (tmp_path / "next").symlink_to("new")
        (tmp_path / "next").replace(tmp_path / "now")
        async with asyncio.timeout(5):
            while "new" not in (key.tenant for key in file._keys.values()):
                await asyncio.sleep(0.01)
        assert file.find("pl-new").tenant == "new"
    finally:
        await file.close()
