"""What a decode node captures at its start: the target's verify batches, and its draft head's extends and loops."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from paceline.attention.base import AttentionBackend
from paceline.attention.padding import Scratch
from paceline.attention.placed import ResidentTables
from paceline.config import NodeConfig
from paceline.engine.buckets import MemoryBound, batch_sizes, row_counts
from paceline.engine.graphs import GraphLimits, TargetGraphs
from paceline.kvcache.pool import KvPool
from paceline.layers.graph_capture import Capture, CudaCapture
from paceline.models.base import TargetModel
from paceline.models.static_forward import Room
from paceline.spec_decode.base import Drafter, DraftSampling, TreeKind
from paceline.spec_decode.drafters.feature import FeatureDrafter
from paceline.spec_decode.drafters.head_graphs import HeadAt, HeadGraphs
from paceline.spec_decode.drafters.plan import budget_of
from paceline.speculation import AUTO

log = logging.getLogger(__name__)

SCRATCH_PAGES = 1  # of the pool, past those that the allocator hands out
T = TypeVar("T")


def wants_graphs(config: NodeConfig) -> bool:
    """Whether a decode node of this deployment runs CUDA graphs."""
    if not config.cuda_graphs or not config.on_gpu:
        return False
    if config.tp > 1:
        log.warning("CUDA graphs are off: the %d ranks of this node launch every step", config.tp)
    return config.tp == 1


def capture_graphs(
    config: NodeConfig, model: TargetModel, drafter: Drafter, kv: KvPool, attention: AttentionBackend, max_len: int
) -> TargetGraphs:
    """Capture the target's forwards over a pool, and those of the drafter's head, within ``graph_memory_mib``.

    The pool's last page must be no one's (SCRATCH_PAGES). max_len: positions of a sequence, draft slots included.
    """
    capture = CudaCapture(model.device)
    scratch = Scratch(kv.num_pages - SCRATCH_PAGES, kv.page_size)
    budget = budget_of(config)
    varies = config.adaptive != "off" or config.drafter == AUTO or config.min_confidence > 0.0
    limits = GraphLimits(
        max_batch=config.max_running,
        max_rows=budget.max_nodes,
        varies=varies or budget.tree is TreeKind.DYNAMIC,
        tree=budget.tree is not TreeKind.CHAIN and budget.tree_width > 1,
        max_len=max_len,
    )
    bound = MemoryBound(config.graph_memory_mib << 20)
    room = Room(kv, scratch, ResidentTables(limits.max_batch, limits.max_len, scratch, kv.device))
    graphs = TargetGraphs(model, room, attention, drafter.aux_layers, capture)
    graphs.capture_all(limits, bound, lambda buckets: showing("capturing CUDA graphs", buckets))
    if (stepping := _feature_drafter(drafter)) is not None and budget.num_draft_tokens:
        stepping.graphs = _head_graphs(stepping, limits, budget.num_draft_tokens, room, capture, bound)
    return graphs


def _feature_drafter(drafter: Drafter) -> FeatureDrafter | None:
    primary = drafter.primary
    return primary if isinstance(primary, FeatureDrafter) else None


def _head_graphs(
    drafter: FeatureDrafter, limits: GraphLimits, depth: int, room: Room, capture: Capture, bound: MemoryBound
) -> HeadGraphs:
    """Rows of an extend: a path of the tree, root included. Trees with branches are drafted eagerly, level by level."""
    model = drafter.model
    assert drafter.kv is room.kv
    at = HeadAt(drafter.head, model.spec.vocab_size, model.dtype, drafter.attention, room, limits.max_len)
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
