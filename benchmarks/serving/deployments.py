"""The servers to compare: deployments of ours, started one after the other on the same cores, or any by its URL."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from benchmarks.common.processes import serving_paceline
from paceline.errors import ConfigError

LAYOUTS = {
    "apart": ("--prefill-nodes", "1", "--decode-nodes", "1"),
    "one node": ("--prefill-nodes", "0", "--decode-nodes", "1"),
}
# No prompt may be in a cache from another run, and nothing stands by that the other settings have not.
COMMON = ("--no-prefix-cache", "--no-standby", "--log-level", "error")


@dataclass(frozen=True)
class Setting:
    """A server to measure. ``start`` brings it up for as long as its block runs and yields its URL."""

    name: str
    start: Callable[[], AbstractContextManager[str]]
    ours: bool = False  # must give the text that every other one of ours gives
    model: str = ""  # that requests name; empty: the first that the server lists


def deployments(model: str, layouts: Sequence[str], drafters: Sequence[str], options: Sequence[str]) -> list[Setting]:
    """Every layout with every drafter. options: further ones of ``paceline serve``. Raises ConfigError."""
    for layout in layouts:
        if layout not in LAYOUTS:
            raise ConfigError("layouts", f"{layout!r} is none of {', '.join(LAYOUTS)}")
    if not layouts or not drafters:
        raise ConfigError("layouts" if not layouts else "drafters", "names nothing to measure")
    return [_deployment(model, layout, drafter, options) for layout in layouts for drafter in drafters]


def _deployment(model: str, layout: str, drafter: str, options: Sequence[str]) -> Setting:
    chosen = ["--model", model, "--drafter", drafter, *LAYOUTS[layout], *COMMON, *options]

    @contextmanager
    def start() -> Iterator[str]:
        with serving_paceline(chosen) as addresses:
            yield f"http://{addresses['http']}"

    return Setting(f"{layout}, {drafter}", start, ours=True)


def by_url(text: str) -> Setting:
    """A server that runs already: ``http://host:port`` or ``name=http://host:port``. Raises ConfigError."""
    name, equals, url = text.partition("=")
    if not equals or "://" in name:
        name, url = text.split("://")[-1].rstrip("/"), text
    if not url.startswith(("http://", "https://")) or not name:
        raise ConfigError("url", f"{text!r} is neither http://HOST:PORT nor NAME=http://HOST:PORT")

    @contextmanager
    def start() -> Iterator[str]:
        yield url

    return Setting(name, start)
