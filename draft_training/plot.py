"""The loss curve and held-out acceptance of a run, as a PNG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def draw_history(history: Sequence[Mapping[str, Any]], path: Path) -> bool:
    """Draw ``Progress.history``. False, and nothing drawn, where matplotlib is not installed."""
    try:
        import matplotlib as mpl
    except ImportError:
        return False
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    with_loss = [entry for entry in history if entry["loss"]]
    for step in range(len(with_loss[0]["loss"]) if with_loss else 0):
        left.plot([e["tokens"] for e in with_loss], [e["loss"][step] for e in with_loss], label=f"step {step + 1}")
    left.set(xlabel="tokens seen", ylabel="cross-entropy", title="loss per draft step")
    if with_loss:
        left.legend()
    right.plot([e["tokens"] for e in history], [e["acceptance_length"] for e in history], marker=".")
    right.set(xlabel="tokens seen", ylabel="tokens per round", title="held-out acceptance length")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return True
