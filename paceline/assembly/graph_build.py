"""What a decode node captures at its start: the target's verify batches, and its draft head's extends and loops."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from paceline.attention.padding import Scratch
from paceline.config import NodeConfig
from paceline.engine.buckets import MemoryBound, batch_sizes, row_counts
from paceline.engine.graphs import GraphLimits, TargetGraphs
from paceline.engine.model_runner import ModelRunner
from paceline.layers.graph_capture import Capture, CudaCapture
from paceline.spec_decode.base import DraftSampling, TreeKind
from paceline.spec_decode.drafters.feature import FeatureDrafter
from paceline.spec_decode.drafters.head_graphs import HeadAt, HeadGraphs
from paceline.speculation import AUTO

log = logging.getLogger(__name__)

SCRATCH_PAGES = 1  # of the pool, past those that the allocator hands out
T = TypeVar("T")


def wants_graphs(config: NodeConfig) -> bool:
    """Whether a decode node of this deployment runs CUDA graphs."""
    return config.cuda_graphs and config.device.startswith("cuda")


def add_graphs(runner: ModelRunner, config: NodeConfig, capture: Capture | None = None) -> None:
    """Capture, within ``graph_memory_mib``. The pool's last page must be no one's (SCRATCH_PAGES).

    capture: how; None: as CUDA graphs of the runner's device.
    """
    capture = capture or CudaCapture(runner.model.device)
    scratch = Scratch(runner.kv.num_pages - SCRATCH_PAGES, runner.page_size)
    budget = runner.limits.budget
    varies = config.adaptive != "off" or config.drafter == AUTO or config.min_confidence > 0.0
    limits = GraphLimits(
        max_batch=config.max_running,
        max_rows=budget.max_nodes,
        varies=varies or budget.tree is TreeKind.DYNAMIC,
        tree=budget.tree is not TreeKind.CHAIN and budget.tree_width > 1,
        max_len=runner.limits.max_model_len + runner.spec_slots,
    )
    bound = MemoryBound(config.graph_memory_mib << 20)
    graphs = TargetGraphs(runner.model, runner.kv, runner.attention, runner.drafter.aux_layers, scratch, capture)
    graphs.capture_all(limits, bound, lambda buckets: showing("capturing CUDA graphs", buckets))
    runner.graphs = graphs
    if (drafter := _feature_drafter(runner)) is not None and budget.num_draft_tokens:
        drafter.graphs = _head_graphs(drafter, limits, budget.num_draft_tokens, scratch, capture, bound)


def _feature_drafter(runner: ModelRunner) -> FeatureDrafter | None:
    primary = runner.drafter.primary
    return primary if isinstance(primary, FeatureDrafter) else None


def _head_graphs(
    drafter: FeatureDrafter, limits: GraphLimits, depth: int, scratch: Scratch, capture: Capture, bound: MemoryBound
) -> HeadGraphs:
    """Rows of an extend: a path of the tree, root included. Trees with branches are drafted eagerly, level by level."""
    model = drafter.model
    at = HeadAt(
        drafter.head, model.spec.vocab_size, model.dtype, drafter.kv, drafter.attention, scratch, limits.max_len
    )
    graphs = HeadGraphs(at, capture, drafter.sampling is DraftSampling.COUPLED)
    rows = row_counts(depth + 1, limits.varies)
    chains = drafter.sampling is not DraftSampling.SAMPLED and not limits.tree
    depths = row_counts(depth, limits.varies) if chains else ()
    graphs.capture_all(batch_sizes(limits.max_batch), rows, depths, allowance(bound, capture))
    return graphs


def allowance(bound: MemoryBound, capture: Capture) -> Callable[[Callable[[], None]], bool]:
    """Runs captures as long as ``bound`` has room for them."""

    def run(work: Callable[[], None]) -> bool:
        if not bound.allows_next():
            return False
        before = capture.used_bytes()
        work()
        bound.took(capture.used_bytes() - before)
        return True

    return run


def showing(what: str, items: list[T]) -> Iterable[T]:
    """Pass ``items`` on, with a progress bar on a terminal and a line in the log elsewhere."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    if console.is_terminal:
        return track(items, what, console=console, transient=True)
    log.info("%s: %d", what, len(items))
    return _passing(items)


def _passing(items: list[T]) -> Iterator[T]:
    yield from items
