"""A rolling upgrade under load: streams that ended and failed each second, and nodes by generation."""

from __future__ import annotations

from collections import Counter
from typing import Any

from benchmarks.pictures import style
from benchmarks.pictures.data import UPGRADE
from benchmarks.pictures.record_upgrade import Seen, UpgradeRun

SERVES = ("ready", "kept")


def draw(run: UpgradeRun | None = None) -> Any:
    """The figure; of the kept run when none is given."""
    run = run or UpgradeRun.read(UPGRADE)
    figure = style.new_figure(11, 5.6)
    streams, nodes = figure.subplots(2, 1, sharex=True)
    _draw_streams(streams, run)
    _draw_nodes(nodes, run)
    for axes in (streams, nodes):
        axes.axvspan(run.began_s, run.ended_s, color=style.EDGE, alpha=0.25, linewidth=0, zorder=0)
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, fontsize=11, loc="center left", bbox_to_anchor=(1.0, 0.5))
    nodes.set(xlabel="seconds; the upgrade is shaded")
    title = f"{run.model}, {len(run.seen[0].nodes)} nodes, {run.streams} streams at once: {told(run)}"
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


def _draw_nodes(axes: Any, run: UpgradeRun) -> None:
    first = {name: generation for name, (generation, _) in run.seen[0].nodes.items()}

    def count(seen: Seen, renewed: bool) -> int:
        found = [(generation > first.get(name, 0), state) for name, (generation, state) in seen.nodes.items()]
        return sum(new == renewed and state in SERVES for new, state in found)

    at = [seen.at_s for seen in run.seen]
    for renewed, colour, label in ((False, style.OTHER, "generation before"), (True, style.DECODE, "next generation")):
        counts = [count(seen, renewed) for seen in run.seen]
        axes.step(at, counts, where="post", color=colour, linewidth=2.0, label=label)
    axes.set(ylabel="nodes that serve", ylim=(-0.2, len(first) + 0.5))
