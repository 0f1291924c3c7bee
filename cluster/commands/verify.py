"""``paceline verify``: the promise of equal tokens, checked on a running deployment."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from cluster.commands.console import errors
from cluster.commands.reach import ApiKeyFile, TlsCa, UseTls, key_in

if TYPE_CHECKING:
    from cluster.verification.asked import Asked
    from cluster.verification.run import Verification
    from cluster.verification.sides import Deployed, Side

MAX_CONCURRENCY = 256
DIFFERENT, NOT_RUN = 1, 2  # exit codes
EXACT_RULE = "sample"  # of the acceptance rules, the one that keeps plain decoding's tokens


@dataclass(frozen=True)
class Reach:
    """How one deployment is reached."""

    address: str
    tls: bool | str
    key: str | None


@dataclass(frozen=True)
class Wanted:
    """What is compared with what."""

    at: Reach
    against: Reach | None
    plain: str | None
    requests: Path | None
    record: Path | None
    concurrency: int
    timeout: float


def verify(
    requests: Annotated[
        Path | None,
        typer.Option(help="Requests, one JSON object a line; docs/internals/exactness.md. Not given: a built-in set."),
    ] = None,
    at: Annotated[str, typer.Option(help="HOST:PORT of the gRPC of the deployment to verify.")] = "127.0.0.1:50051",
    against: Annotated[
        str | None, typer.Option(help="HOST:PORT of a second deployment that must answer alike.")
    ] = None,
    against_plain: Annotated[
        str | None, typer.Option(help="Model to load here, in one process without a drafter, that must answer alike.")
    ] = None,
    record: Annotated[
        Path | None, typer.Option(help="Write requests and answers here; --requests compares with them later.")
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, max=MAX_CONCURRENCY, help="Requests at a time.")] = 4,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for one request.")] = 600.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as one JSON object.")] = False,
    tls: UseTls = False,
    tls_ca: TlsCa = None,
    api_key_file: ApiKeyFile = None,
    against_tls: Annotated[bool, typer.Option("--against-tls", help="As --tls, for the second deployment.")] = False,
    against_tls_ca: Annotated[Path | None, typer.Option(help="As --tls-ca, for the second deployment.")] = None,
    against_api_key_file: Annotated[
        Path | None, typer.Option(help="File with the second deployment's API key. Not given: none is sent to it.")
    ] = None,
) -> None:
    """Ask a deployment, and a second one or one plain process, the same requests. Exit code 1 when an answer differs, 2
    when no verdict could be given."""
    from cluster.verification.asked import CannotCompare
    from cluster.verification.report import report_json, show_report
    from paceline.errors import PacelineError

    try:
        own_key = key_in(api_key_file)
        other_key = "" if against_api_key_file is None else key_in(against_api_key_file)  # empty: PACELINE_API_KEY too
        other = None if against is None else Reach(against, _tls(against_tls, against_tls_ca), other_key)
        wanted = Wanted(
            Reach(at, _tls(tls, tls_ca), own_key), other, against_plain, requests, record, concurrency, timeout
        )
        done, sides = asyncio.run(_verify(wanted, quiet=as_json))
    except (CannotCompare, PacelineError, OSError, ValueError) as error:
        errors.print(f"[red]error[/red] {_escaped(str(error))}", soft_wrap=True)
        raise typer.Exit(NOT_RUN) from None
    if as_json:
        typer.echo(json.dumps(report_json(done, sides), ensure_ascii=False, indent=2))
    else:
        show_report(done, sides, typer.echo)
    if any(score.equal < score.compared for score in done.scores.values()):
        raise typer.Exit(DIFFERENT)


def _tls(use: bool, ca: Path | None) -> bool | str:
    return str(ca) if ca is not None else use


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)


async def _verify(wanted: Wanted, quiet: bool) -> tuple[Verification, list[Side]]:
    from cluster.verification.report import show_difference
    from cluster.verification.run import Verification

    async with AsyncExitStack() as stack:
        first = await _reach(stack, wanted.at, wanted.timeout)
        all_asked = await _asked(wanted, first)
        others = await _others(stack, wanted, first, all_asked)
        file = None if wanted.record is None else stack.enter_context(wanted.record.open("w", encoding="utf-8"))

        def keep(asked: Asked, answers: Sequence[Any]) -> None:
            if file is not None:
                _write(file, asked, answers, first)

        made = Verification(first, others, lambda one: None if quiet else show_difference(one, first.name), keep)
        await _with_progress(made, all_asked, wanted.concurrency)
        return made, [first, *others]


async def _reach(stack: AsyncExitStack, where: Reach, timeout: float) -> Deployed:
    from cluster.verification.sides import Deployed
    from paceline.client import AsyncClient

    client = AsyncClient(where.address, timeout=timeout, tls=where.tls, api_key=where.key)
    reached = await Deployed.reach(where.address, await stack.enter_async_context(client))
    if reached.info.acceptance != EXACT_RULE:
        rule = f"acceptance rule {reached.info.acceptance}"
        errors.print(f"{where.address} has the {rule}, which does not promise equal tokens", soft_wrap=True)
    return reached


async def _asked(wanted: Wanted, first: Deployed) -> list[Asked]:
    from cluster.verification.asked import CannotCompare, read_requests
    from cluster.verification.built_in import built_in

    if wanted.requests is not None:
        if wanted.record is not None and wanted.record.resolve() == wanted.requests.resolve():
            raise CannotCompare(f"--record would write over {wanted.requests}, which is read: give another file")
        return read_requests(wanted.requests)
    made = built_in(first.info.max_model_len, await first.has_chats())
    if not made:
        raise CannotCompare(f"no built-in request fits {first.info.max_model_len} tokens of context: give --requests")
    return made


async def _others(stack: AsyncExitStack, wanted: Wanted, first: Deployed, all_asked: Sequence[Asked]) -> list[Side]:
    """Raises CannotCompare where nobody is left to compare with, or somebody serves another model."""
    from cluster.verification.asked import CannotCompare
    from cluster.verification.sides import FromFile, same_model

    others: list[Side] = []
    recorded = next((asked.recorded for asked in all_asked if asked.recorded is not None), None)
    if recorded is not None:
        others.append(FromFile(str(wanted.requests), recorded.about))
    if wanted.against is not None:
        others.append(await _reach(stack, wanted.against, wanted.timeout))
    for other in others:
        same_model(first, other)
    if wanted.plain is not None:
        others.append(await _plain(wanted.plain, first, all_asked))
    if not others and wanted.record is None:
        raise CannotCompare("nothing to compare with: give --against, --against-plain, or recorded --requests")
    return others


async def _plain(model: str, first: Deployed, all_asked: Sequence[Asked]) -> Side:
    from cluster.commands.fetch import fetch_model
    from cluster.verification.sides import Plain, same_model

    plain = Plain(await asyncio.to_thread(fetch_model, model), first.info)
    errors.print(f"loading {model} in this process", soft_wrap=True)
    await plain.load(all_asked)
    same_model(first, plain)
    return plain


def _write(file: IO[str], asked: Asked, answers: Sequence[Any], first: Deployed) -> None:
    from cluster.verification.asked import Recorded

    file.write(asked.line(Recorded(first.about, tuple(answers))) + "\n")


async def _with_progress(made: Verification, all_asked: Sequence[Asked], concurrency: int) -> None:
    """A bar on a terminal; elsewhere a line for each tenth of the requests."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    total = len(all_asked)
    columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task("requests", total=total)

        def progressed() -> None:
            bar.update(task, completed=made.done)
            if not errors.is_terminal and made.done * 10 // total > (made.done - 1) * 10 // total:
                errors.print(f"{made.done} of {total} requests", soft_wrap=True)

        await made.run(all_asked, concurrency, progressed)
