"""CUDA graphs of the target: one for each shape of verify batch, chosen by size and padded to it.

With a graph the host launches a step in one call, where it would launch hundreds of kernels that each take less time
than their launch. Padding changes no row of the batch (``attention.padding``); what fits no graph, prefill above all,
runs eagerly with equal results.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from paceline.attention.base import AttentionBackend, Segment, StaticShape
from paceline.attention.padding import real_rows
from paceline.engine.buckets import Bucket, MemoryBound, all_buckets, choose
from paceline.layers.graph_capture import Capture, Captured
from paceline.layers.upload import staged
from paceline.models.base import AuxCapture, TargetModel
from paceline.models.late_tokens import LateTokens
from paceline.models.static_forward import Room, StaticForward

log = logging.getLogger(__name__)

Progress = Callable[[list[Bucket]], Iterable[Bucket]]  # passes the buckets on, and shows how far it is


@dataclass(frozen=True)
class GraphLimits:
    """What is captured at start."""

    max_batch: int  # sequences of a round
    max_rows: int  # of the largest tree
    varies: bool  # draft lengths differ from round to round
    tree: bool  # trees, not chains
    max_len: int  # positions of a sequence, draft slots included


@dataclass(frozen=True)
class _Graph:
    inputs: StaticForward
    captured: Captured


class TargetGraphs:
    """Captured forwards of one target over one pool."""

    def __init__(
        self,
        model: TargetModel,
        room: Room,
        attention: AttentionBackend,
        aux_layers: tuple[int, ...],
        capture: Capture,
    ) -> None:
        """aux_layers: see Drafter. Nothing is captured yet: ``capture_all``."""
        self._model, self._room, self._attention = model, room, attention
        self._aux_layers, self._capture = aux_layers, capture
        self._graphs: dict[Bucket, _Graph] = {}

    @property
    def buckets(self) -> list[Bucket]:
        """Shapes that have a graph."""
        return list(self._graphs)

    def capture_all(self, limits: GraphLimits, bound: MemoryBound, progress: Progress = iter) -> None:
        """Capture what fits ``bound``, largest first; what does not runs eagerly."""
        wanted = all_buckets(limits.max_batch, limits.max_rows, limits.varies)
        for bucket in progress(wanted):
            if not bound.allows_next():
                continue
            before = self._capture.used_bytes()
            self._capture_one(bucket, limits)
            bound.took(self._capture.used_bytes() - before)
        missing = sorted(set(wanted) - set(self._graphs))
        if missing:
            log.warning("no CUDA graph for %d of %d batch shapes: they run eagerly", len(missing), len(wanted))
        log.info("%d CUDA graphs of the target, %.0f MiB", len(self._graphs), bound.spent / 2**20)

    def _capture_one(self, bucket: Bucket, limits: GraphLimits) -> None:
        shape = StaticShape(bucket.requests, bucket.rows, limits.tree and bucket.rows > 1, limits.max_len)
        inputs = StaticForward.make(shape, self._attention, self._room)
        if inputs is None:
            return

        def work() -> tuple[torch.Tensor, ...]:
            inputs.derive()
            aux = AuxCapture(self._aux_layers) if self._aux_layers else None
            hidden = self._model.forward(inputs.context, aux)
            return (hidden,) if aux is None else (hidden, aux.rows())

        try:
            self._graphs[bucket] = _Graph(inputs, self._capture(work))
        except RuntimeError as error:  # no memory, or a workspace that is too small for the shape
            log.warning("no CUDA graph for %d requests of %d rows: %s", bucket.requests, bucket.rows, error)

    def forward(
        self, segments: Sequence[Segment], late: LateTokens | None = None
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The same as ``ModelRunner.forward``; None where no graph holds the batch. The results are the caller's."""
        bucket = choose(self.buckets, [len(segment.token_ids) for segment in segments])
        graph = None if bucket is None else self._graphs[bucket]
        if graph is None or not graph.inputs.fits(segments):
            return None
        graph.inputs.fill(segments, late)
        graph.captured.replay()
        outputs = take_rows(graph.captured.outputs, segments, graph.inputs.shape)
        return outputs[0], outputs[-1]


def take_rows(outputs: Sequence[torch.Tensor], segments: Sequence[Segment], shape: StaticShape) -> list[torch.Tensor]:
    """Copies of the real rows of a padded batch's outputs: a later replay overwrites the outputs themselves."""
    if all(len(segment.token_ids) == shape.rows for segment in segments):
        return [output[: len(segments) * shape.rows].clone() for output in outputs]
    index = staged(real_rows(segments, shape.rows), outputs[0].device)
    return [output.index_select(0, index) for output in outputs]
