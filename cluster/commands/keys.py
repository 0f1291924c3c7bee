"""``paceline keys``: makes, revokes and lists API keys in the file that ``--api-keys`` names."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from cluster.commands.console import errors

app = typer.Typer(help="API keys of a deployment.", no_args_is_help=True)

File = Annotated[Path, typer.Option("--file", help="The file that the deployment has as --api-keys.")]
MODE = 0o600
LOCK_TIMEOUT_S, LOCK_POLL_S = 10.0, 0.05


@app.command()
def create(
    file: File,
    tenant: Annotated[str, typer.Option(help="Whom the key belongs to.")],
    key_id: Annotated[str, typer.Option("--id", help="Name of the key in logs; made when not given.")] = "",
    scope: Annotated[list[str], typer.Option(help="infer, metrics or operator; may be repeated.")] = ["infer"],  # noqa: B006
    model: Annotated[list[str], typer.Option(help="A model that it may ask; may be repeated. * is any.")] = ["*"],  # noqa: B006
    priorities: Annotated[tuple[int, int], typer.Option(help="Lowest and highest priority.")] = (-10, 10),
    requests_per_minute: Annotated[int | None, typer.Option(help="Requests of a minute.")] = None,
    tokens_per_minute: Annotated[int | None, typer.Option(help="Tokens of prompts and outputs of a minute.")] = None,
    concurrency: Annotated[int | None, typer.Option(help="Sequences at once.")] = None,
    tokens_in_flight: Annotated[int | None, typer.Option(help="Tokens of all sequences at once.")] = None,
    budget_tokens: Annotated[int | None, typer.Option(help="Tokens in all.")] = None,
    days: Annotated[float | None, typer.Option(help="Days until the key ends; without it, it does not.")] = None,
) -> None:
    """Make a key, add it to the file, and print it. It is printed this once and kept nowhere."""
    from cluster.access.keys import digest, new_key

    key, now = new_key(), datetime.now(UTC).replace(microsecond=0)
    found = digest(key)
    limits = {
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "concurrency": concurrency,
        "tokens_in_flight": tokens_in_flight,
        "budget_tokens": budget_tokens,
    }
    entry: dict[str, Any] = {
        "id": key_id or f"{tenant}-{found[:8]}",
        "sha256": found,
        "tenant": tenant,
        "scopes": list(scope),
        "models": list(model),
        "priorities": list(priorities),
        "created": now,
        **{name: limit for name, limit in limits.items() if limit is not None},
    }
    if days is not None:
        entry["expires"] = now + timedelta(days=days)
    with _editing(file, missing_ok=True) as entries:
        entries.append(entry)
    errors.print(f"{file}: key {entry['id']} of tenant {tenant}", soft_wrap=True)
    typer.echo(key)


@app.command()
def revoke(file: File, key_id: Annotated[str, typer.Argument(help="Id of the key.")]) -> None:
    """End a key. Its entry stays, so that logs can name it; calls that run go on to their end."""
    with _editing(file) as entries:
        found = [entry for entry in entries if entry.get("id") == key_id]
        if not found:
            raise typer.BadParameter(f"{file} has no key {key_id!r}")
        found[0].setdefault("revoked", datetime.now(UTC).replace(microsecond=0))
    typer.echo(f"{key_id} is revoked")


@app.command("list")
def list_keys(file: File) -> None:
    """Print id, tenant, scopes and state of every key."""
    from cluster.access.keys import read_keys

    now = datetime.now(UTC)
    for key in read_keys(file):
        ended = key.expires is not None and key.expires <= now
        state = "revoked" if key.revoked is not None else "expired" if ended else "valid"
        typer.echo(f"{key.id}\t{key.tenant}\t{','.join(key.scopes)}\t{state}")


@contextmanager
def _editing(file: Path, missing_ok: bool = False) -> Iterator[list[dict[str, Any]]]:
    """The entries, to be changed; what comes of them is checked and then replaces the file in one step. Two commands
    at once take turns. Raises ConfigError."""
    from cluster.access.keys import parse_keys, read_keys
    from paceline.errors import ConfigError

    with _lock(file):
        if file.exists() or not missing_ok:
            read_keys(file)
        content = (yaml.safe_load(file.read_text(encoding="utf-8")) if file.exists() else None) or {}
        entries = list(content.get("keys") or [])
        yield entries
        text = yaml.safe_dump({"keys": entries}, sort_keys=False)
        parse_keys(text, "the new entry")
        try:
            _replace(file, text)
        except OSError as error:
            raise ConfigError("file", f"{file} cannot be written: {error}") from None


@contextmanager
def _lock(file: Path) -> Iterator[None]:
    from paceline.errors import ConfigError
    from paceline.file_lock import locked

    try:
        handle = os.open(file.with_name(f".{file.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, MODE)
    except OSError as error:
        raise ConfigError("file", f"{file} cannot be written: {error}") from None
    try:
        with locked(handle, LOCK_TIMEOUT_S, LOCK_POLL_S):
            yield
    except TimeoutError as error:
        raise ConfigError("file", f"{file}: {error}") from None
    finally:
        os.close(handle)


def _replace(file: Path, text: str) -> None:
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}-")  # of mode 0600
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as made:
            made.write(text)
            made.flush()
            os.fsync(made.fileno())
        Path(name).chmod(MODE)
        Path(name).replace(file)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
