"""A rolling upgrade under load: streams that ended and failed each second, and nodes and routers by generation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from benchmarks.pictures import style
from benchmarks.pictures.data import UPGRADE
from benchmarks.pictures.record_upgrade import SERVES, UpgradeRun

SERVING = (SERVES, "kept")
States = dict[str, tuple[int, str]]


def draw(run: UpgradeRun | None = None) -> Any:
    """The figure; of the kept run when none is given."""
    run = run or UpgradeRun.read(UPGRADE)
    figure = style.new_figure(11, 7.2)
    streams, nodes, routers = figure.subplots(3, 1, sharex=True)
    _draw_streams(streams, run)
    _draw_parts(nodes, "nodes", [(seen.at_s, seen.nodes) for seen in run.seen])
    _draw_parts(routers, "routers", [(seen.at_s, seen.routers) for seen in run.seen])
    for axes in (streams, nodes, routers):
        axes.axvspan(run.began_s, run.ended_s, color=style.EDGE, alpha=0.25, linewidth=0, zorder=0)
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, fontsize=11, loc="center left", bbox_to_anchor=(1.0, 0.5))
    routers.set(xlabel="seconds; the upgrade is shaded")
    parts = f"{len(run.seen[0].nodes)} nodes, {len(run.seen[0].routers)} routers"
    title = f"{run.model}, {parts}, {run.streams} streams at once: {told(run)}"
    streams.set_title(title, loc="left", fontsize=13)
    return figure


def told(run: UpgradeRun) -> str:
    """The run in a few words."""
    failed, longest_s = sum(bool(one.failed) for one in run.ended), max(one.longest_pause_s for one in run.ended)
    return f"{failed} of {len(run.ended)} failed, longest pause {longest_s:.1f} s"


def _draw_streams(axes: Any, run: UpgradeRun) -> None:
    last = int(max(one.at_s for one in run.ended))
    for what, colour in (("ended whole", style.TARGET_KV), ("failed", style.PREFILL)):
        counts = Counter(int(one.at_s) for one in run.ended if bool(one.failed) == (what == "failed"))
        axes.bar(range(last + 1), [counts[s] for s in range(last + 1)], 0.9, align="edge", color=colour, label=what)
    axes.set(ylabel="streams a second")


def _draw_parts(axes: Any, kind: str, seen: Sequence[tuple[float, States]]) -> None:
    first = {name: generation for name, (generation, _) in seen[0][1].items()}

    def count(states: States, renewed: bool) -> int:
        found = [(generation > first.get(name, 0), state) for name, (generation, state) in states.items()]
        return sum(new == renewed and state in SERVING for new, state in found)

    at = [at_s for at_s, _ in seen]
    for renewed, colour, label in ((False, style.OTHER, "generation before"), (True, style.DECODE, "next generation")):
        counts = [count(states, renewed) for _, states in seen]
        axes.step(at, counts, where="post", color=colour, linewidth=2.0, label=label)
    axes.set(ylabel=f"{kind} that serve", ylim=(-0.2, len(first) + 0.5))
