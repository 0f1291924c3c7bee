"""The ``paceline`` command."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import sys
from collections.abc import Callable, Container, Coroutine, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TypeVar

try:
    import typer
    from rich.markup import escape
except ModuleNotFoundError as missing:  # the client SDK alone is installed
    raise SystemExit(f"error {missing.name} is not installed; the command needs pip install 'paceline[node]'") from None

from cluster.commands.certs import certs
from cluster.commands.console import errors
from cluster.commands.fetch import fetch_model
from cluster.commands.generate import generate
from cluster.commands.keys import app as keys
from cluster.commands.nodes import app as nodes
from cluster.commands.options import ServeHelp, load_config, serve_parameters, shown
from cluster.commands.plan import plan
from cluster.commands.quantize import quantize
from cluster.commands.reach import next_step
from cluster.commands.role import role
from cluster.commands.trace import trace
from cluster.commands.train import make_corpus, train_drafter
from cluster.commands.verify import verify
from cluster.option_sets import ROUTER_OPTIONS
from paceline import __version__
from paceline.config import ServeConfig
from paceline.errors import ConfigError, NodeUnavailable, PacelineError
from paceline.logs import configure_logging

if TYPE_CHECKING:
    from cluster.parts import Tell
    from cluster.serving_router import ServingRouter

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("make-corpus")(make_corpus)
app.command("train-drafter")(train_drafter)
app.command("quantize")(quantize)
app.command("trace")(trace)
app.command("plan")(plan)
app.command("role")(role)
app.command("generate")(generate)
app.command("verify")(verify)
app.add_typer(certs, name="certs")
app.add_typer(keys, name="keys")
app.add_typer(nodes, name="nodes")


JOIN = inspect.Parameter(
    "join",
    inspect.Parameter.KEYWORD_ONLY,
    annotation=Annotated[
        str,
        typer.Option(
            "--join", envvar="PACELINE_REDIS", help="URL of the deployment's Redis, e.g. redis://HOST:6379/0."
        ),
    ],
)


DRY_RUN = inspect.Parameter(
    "dry_run",
    inspect.Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[
        bool,
        typer.Option("--dry-run", help="Print where the nodes would be and what each rank would hold; start nothing."),
    ],
)
HOSTS = inspect.Parameter(
    "hosts",
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[
        Path | None,
        typer.Option("--hosts", help="With --dry-run: YAML file of hosts, in place of those of the running Ray."),
    ],
)


def add_registered_commands() -> None:
    """Commands of packages that lie above this one, such as ``paceline bench``: entry points of the group
    ``paceline.commands`` in pyproject.toml, each a typer application."""
    for found in entry_points(group="paceline.commands"):
        app.add_typer(found.load(), name=found.name)


add_registered_commands()


def print_version(asked: bool) -> None:
    """Print it and end the command."""
    if asked:
        typer.echo(f"paceline {__version__}")
        raise typer.Exit


@app.callback()
def about(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Paceline: disaggregated prefill and decode with speculative decoding in every step."""


def main() -> None:
    """Entry point: what Paceline raises on purpose is one line, not a traceback."""
    try:
        app()
    except (PacelineError, RuntimeError) as error:
        sys.exit(_told(error))


def _told(error: Exception) -> int:
    """Print what was raised on purpose; returns the exit code."""
    if isinstance(error, ConfigError):
        errors.print(f"[red]error[/red] {shown(error.key)}: {escape(error.message)}", soft_wrap=True)
        return 2
    errors.print(f"[red]error[/red] {escape(str(error) + next_step(error))}", soft_wrap=True)
    return 1


def with_serve_options(
    run: Callable[..., None], only: Container[str] | None = None, first: Sequence[inspect.Parameter] = ()
) -> Callable[..., None]:
    """A command that takes every deployment option, or those of ``only``, ``--config FILE`` and ``--verbose``. first:
    further options, which ``run`` gets by name."""
    own = {parameter.name for parameter in first}

    def command(config: Path | None = None, verbose: bool = False, **given: Any) -> None:
        if verbose and given["log_level"] is None:
            given["log_level"] = "info"
        options = load_config({name: value for name, value in given.items() if name not in own}, config)
        foreign = [] if only is None else sorted(options.model_fields_set - {*ROUTER_OPTIONS, "redis"})
        if foreign:
            raise ConfigError(foreign[0], "is the deployment's; a router that joins takes it over")
        configure_logging(options.log_level, options.log_format, "router")
        run(options, **{name: given[name] for name in own})

    keyword = inspect.Parameter.KEYWORD_ONLY
    file = Annotated[Path | None, typer.Option("--config", help="YAML file with any of the options below.")]
    loud = Annotated[bool, typer.Option("--verbose", help="Short for --log-level info.")]
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            *first,
            inspect.Parameter("config", keyword, default=None, annotation=file),
            inspect.Parameter("verbose", keyword, default=False, annotation=loud),
            *serve_parameters(only),
        ]
    )
    command.__doc__ = run.__doc__
    return command


@app.command("pull")
def pull(model: Annotated[str, typer.Argument(help="A known model, e.g. smollm2-135m-instruct, or a hub id.")]) -> None:
    """Fetch a model, convert it if need be, print its folder."""
    typer.echo(fetch_model(model))


def serve(config: ServeConfig, dry_run: bool = False, hosts: Path | None = None) -> None:
    """Serve a model: gRPC and OpenAI-style HTTP. Prints a line beginning "ready"; Ctrl-C drains and ends."""
    if hosts is not None and not dry_run:
        raise ConfigError("hosts", "is for --dry-run: nodes are placed by Ray")
    if dry_run:
        from cluster.commands.placement import dry_run as show

        show(config, hosts)
        return
    fetch_model(config.model)
    _to_its_end(_serve(config))


def _to_its_end(serving: Coroutine[Any, Any, None]) -> None:
    """Serve, then end this process without the ends of the event loop and of the interpreter: they would wait for
    threads which wait for nodes, or in the library of a Ray that is gone, and would crash with one that is in it."""

    async def to_its_end() -> None:
        code = 0
        try:
            await serving
        except (PacelineError, RuntimeError) as error:
            code = _told(error)
        os._exit(code)  # what is on stdout was flushed; a thread that writes there for no reader would hold it up

    asyncio.run(to_its_end())


SIGNALS = (signal.SIGINT, signal.SIGTERM)


def _on_signals(run: Callable[[], None]) -> None:
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, run)


def _begin_end() -> None:
    """The end is bounded: from now on no signal is to cut it off, or to change the exit code."""
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.remove_signal_handler(number)  # first: the loop would else set the default at its end
        signal.signal(number, signal.SIG_IGN)
    if joined := sys.modules.get("cluster.nodes.ray_session"):
        joined.SESSION.quits = True


async def _serve(config: ServeConfig) -> None:
    from cluster.deployment import Deployment

    def ready(deployment: Deployment) -> str:
        exact = "bit-exact" if deployment.front.served.bit_exact else "not bit-exact"
        told = f"{_addresses(deployment.front)} drafter={deployment.config.drafter} ({exact})"
        return told + _admin(deployment.admin_address)

    await _run(lambda tell: Deployment(config, tell), ready, config)


async def _join(url: str, config: ServeConfig) -> None:
    from cluster.joined import JoinedRouter

    def ready(joined: JoinedRouter) -> str:
        return _addresses(joined.front) + _admin(joined.admin_address)

    await _run(lambda tell: JoinedRouter(url, config, tell), ready, config)


def _admin(address: str) -> str:
    return f" admin={address}" if address else ""


def _addresses(front: ServingRouter) -> str:
    return f"ready grpc={front.grpc_address} http={front.http_address} model={front.config.model}"


class Serving(Protocol):
    """What serves until it is told to stop, or has ``ended`` by itself for a ``problem``."""

    problem: str
    ended: asyncio.Event

    async def start(self) -> None:
        """Bring everything up."""

    async def stop(self, grace_s: float) -> None:
        """End everything."""


S = TypeVar("S", bound=Serving)


async def _run(make: Callable[[Tell], S], ready: Callable[[S], str], config: ServeConfig) -> None:
    """Start it, print a line when it is ready, drain and end it at a signal."""
    from cluster.commands.progress import start_progress

    stop = asyncio.Event()
    _on_signals(stop.set)
    with start_progress(errors, lines=config.log_level in ("debug", "info")) as tell:
        made = make(tell)
        starting = asyncio.create_task(made.start())
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if stop.is_set():
        _begin_end()
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await made.stop(0)  # had it started just before
        return
    await starting
    _on_signals(stop.set)  # Ray has put its own handler of SIGTERM there, which ends the process at once
    typer.echo(ready(made))
    sys.stdout.flush()
    ended = asyncio.create_task(made.ended.wait())
    await asyncio.wait({stopping, ended}, return_when=asyncio.FIRST_COMPLETED)
    ended.cancel()
    _begin_end()
    errors.print(f"draining, at most {config.drain_timeout_s:g} s")
    await made.stop(config.drain_timeout_s)
    if made.problem:
        raise NodeUnavailable(made.problem)


def router(config: ServeConfig, join: str) -> None:
    """Join a deployment that another process serves, with gRPC and HTTP of its own. Prints a line beginning "ready"."""
    _to_its_end(_join(join, config))


def demo(config: ServeConfig) -> None:
    """Start one prefill and one decode node, stream an answer of the real model, print what it took, stop."""
    from cluster.commands.demo import run_demo

    fetch_model(config.model)
    asyncio.run(run_demo(config))


app.command("serve", cls=ServeHelp)(with_serve_options(serve, first=[DRY_RUN, HOSTS]))
app.command("router", cls=ServeHelp)(with_serve_options(router, ROUTER_OPTIONS, [JOIN]))
app.command("demo", cls=ServeHelp)(with_serve_options(demo))

# `paceline --help` lists commands in this order: those that a newcomer types come first.
ORDER = ["demo", "serve", "generate", "trace", "verify", "pull", "plan", "router", "role"]
ORDER += ["quantize", "make-corpus", "train-drafter"]
app.registered_commands.sort(key=lambda one: ORDER.index(str(one.name)))
