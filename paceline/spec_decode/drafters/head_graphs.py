"""CUDA graphs of a draft head: the extend over committed rows, and the whole draft loop of a chain.

In the loop a step's candidate is the next step's token, chosen where it is needed: K drafts are one launch, and the
host reads them once (algorithms.md E2). What depends on the batch is known before the first step: the slots and
positions that rows will take, the noise that their candidates are raced with.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from paceline.attention.base import AttentionBackend, Segment, StaticShape
from paceline.attention.padding import filler, real_rows
from paceline.attention.placed import words_of
from paceline.layers.graph_capture import Capture, Captured
from paceline.layers.upload import Int64, staged, staged_index
from paceline.models.late_tokens import LateTokens
from paceline.models.static_forward import Room, StaticForward, memory_of
from paceline.sampling.device import race_topk, upload_races
from paceline.spec_decode.heads.base import DraftHead

log = logging.getLogger(__name__)

Allowance = Callable[[Callable[[], None]], bool]  # runs a capture if there is room for it; whether it did


@dataclass(frozen=True)
class HeadAt:
    """A head, and what it runs over."""

    head: DraftHead
    vocab_size: int  # of the target
    dtype: torch.dtype
    attention: AttentionBackend
    room: Room
    max_len: int  # positions of a sequence, draft slots included

    @property
    def device(self) -> torch.device:
        """Where all memory lies."""
        return self.room.kv.device

    def shape(self, requests: int, rows: int) -> StaticShape:
        """The shape of the head's forwards."""
        return StaticShape(requests, rows, False, self.max_len)

    def inputs(self, requests: int, rows: int, memory: torch.Tensor | None = None) -> StaticForward | None:
        """Static inputs of the head's forwards; None where attention cannot be captured."""
        return StaticForward.make(self.shape(requests, rows), self.attention, self.room, memory)

    def hidden(self, num_rows: int) -> torch.Tensor:
        """Zeros for the head's input rows, [num_rows, hidden_size]."""
        return torch.zeros(num_rows, self.head.hidden_size, dtype=self.dtype, device=self.device)


class ExtendGraph:
    """The head over up to ``rows`` committed rows of each of up to ``requests`` sequences."""

    def __init__(self, at: HeadAt, inputs: StaticForward, capture: Capture) -> None:
        self._inputs, self._hidden = inputs, at.hidden(inputs.shape.num_rows)
        shape = inputs.shape
        self._lasts = torch.arange(1, shape.requests + 1, device=at.device) * shape.rows - 1  # padding comes first
        self._captured: Captured = capture(lambda: self._work(at.head))

    def _work(self, head: DraftHead) -> tuple[torch.Tensor, ...]:
        self._inputs.derive()
        context = self._inputs.context
        return (head.forward(context.batch.token_ids, self._hidden, context),)

    def fits(self, segments: Sequence[Segment]) -> bool:
        """Whether the batch can be padded to this graph."""
        return self._inputs.fits(segments)

    def __call__(
        self,
        segments: Sequence[Segment],
        hidden: torch.Tensor,
        late: LateTokens | None = None,
        behind: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """hidden: [T, hidden_size] -> the last output of every sequence, [len(segments), hidden_size], the caller's.

        late: tokens that the segments do not name. behind: int64 [len(segments)], on the device: outputs that many rows
        before the last.
        """
        self._inputs.fill(segments, late)
        index = staged_index(real_rows(segments, self._inputs.shape.rows), hidden.device)
        self._hidden.index_copy_(0, index, hidden)
        self._captured.replay()
        lasts = self._lasts[: len(segments)]
        return self._captured.outputs[0].index_select(0, lasts if behind is None else lasts - behind)


@dataclass(frozen=True)
class ChainRequest:
    """One sequence that drafts a chain."""

    slots: torch.Tensor  # int32, position -> slot
    committed: int  # m: the root's position, where its first draft row goes
    depth: int  # candidates wanted, at least 1
    seed: int
    temperature: float


class ChainSteps:
    """The draft loop of up to ``requests`` sequences, ``depth`` candidates each, over fixed memory."""

    def __init__(self, at: HeadAt, steps: Sequence[StaticForward], memory: torch.Tensor, coupled: bool) -> None:
        """steps: one for each draft forward, depth - 1 of them, each of one row for each request. memory: theirs, int64
        [depth - 1, memory of a step]."""
        device, requests = at.device, steps[0].shape.requests
        self._at, self._steps, self._coupled = at, list(steps), coupled
        self._words = memory[:, : words_of(steps[0].shape)]
        self.requests, self.depth = requests, len(self._steps) + 1
        self._first = torch.zeros(requests, dtype=torch.int64, device=device)
        self._hidden = at.hidden(requests)
        self._keys = torch.zeros(len(self._steps), requests, 2, dtype=torch.int32, device=device)
        self._temperatures = torch.zeros(requests, dtype=torch.float64, device=device)
        self._greedy = True  # no temperature is above 0: the keys are not read

    @classmethod
    def make(cls, at: HeadAt, requests: int, depth: int, coupled: bool) -> ChainSteps | None:
        """None where attention cannot be captured."""
        memory = torch.zeros(depth - 1, memory_of(at.shape(requests, 1)), dtype=torch.int64, device=at.device)
        steps = [at.inputs(requests, 1, of_step) for of_step in memory]
        ready = [step for step in steps if step is not None]
        return cls(at, ready, memory, coupled) if len(ready) == len(steps) else None

    def fill(self, requests: Sequence[ChainRequest], first: torch.Tensor, hidden: torch.Tensor) -> None:
        """first: int64 [n], the candidates of the last extend; hidden: [n, hidden_size], its outputs.

        A sequence that wants fewer candidates than this loop makes has its further rows written to the scratch page.
        """
        n, device = len(requests), self._first.device
        if self._steps[0].follows:
            self._words.copy_(staged(self._numbers(requests), device))
        else:
            blank = filler(1, self._at.room.scratch)
            for s, step in enumerate(self._steps):
                rows = [Segment.linear([0], r.committed + s, r.slots) for r in requests]
                step.fill([row if s < r.depth - 1 else blank for row, r in zip(rows, requests, strict=True)])
        greedy = not any(r.temperature for r in requests)
        if not (greedy and self._greedy):
            positions = [r.committed + s + 2 for s in self._range for r in requests]
            temperatures = [r.temperature for r in requests]
            keys, there = upload_races([r.seed for r in requests] * len(self._steps), positions, temperatures, device)
            self._keys[:, :n].copy_(keys.view(len(self._steps), n, 2))
            self._temperatures.zero_()
            self._temperatures[:n].copy_(there)
        self._greedy = greedy
        self._first[:n].copy_(first)
        self._hidden[:n].copy_(hidden)

    def _numbers(self, requests: Sequence[ChainRequest]) -> Int64:
        """Every step's words: the s-th writes one position further than the one before."""
        depths = np.array([r.depth for r in requests], dtype=np.int64)
        seen = np.array([r.committed + 1 for r in requests], dtype=np.int64)
        which = self._at.room.tables.rows_of([r.slots for r in requests], (seen + depths - 2).tolist())
        made = []
        for s, step in enumerate(self._steps):
            counts = (s < depths - 1).astype(np.int64)
            made.append(step.numbers(which, seen + s, counts, np.zeros(int(counts.sum()), dtype=np.int64)))
        return np.stack(made)

    @property
    def _range(self) -> range:
        return range(len(self._steps))

    def run(self) -> tuple[torch.Tensor, ...]:
        """The loop: (tokens int64 [requests, depth],). May be captured: the host waits for nothing."""
        head, token, hidden = self._at.head, self._first, self._hidden
        tokens = [token]
        for s, step in enumerate(self._steps):
            step.derive()
            context = replace(step.context, batch=replace(step.context.batch, token_ids=token))
            hidden = head.forward(token, hidden, context)
            logits = head.logits(hidden)
            if head.token_map is None and logits.shape[1] > self._at.vocab_size:
                logits = logits[:, : self._at.vocab_size]  # a padded head
            best, _ = race_topk(logits, self._keys[s], self._temperatures, 1, head.token_map, coupled=self._coupled)
            token = best[:, 0].to(torch.int64)
            tokens.append(token)
        return (torch.stack(tokens, dim=1),)


class HeadGraphs:
    """Captured forwards of one draft head."""

    def __init__(self, at: HeadAt, capture: Capture, coupled: bool) -> None:
        """coupled: candidates of sampled requests run the target's race (``DraftSampling.COUPLED``), else they are the
        likeliest. Nothing is captured yet."""
        self._at, self._capture, self._coupled = at, capture, coupled
        self._extends: dict[tuple[int, int], ExtendGraph] = {}  # (requests, rows)
        self._chains: dict[tuple[int, int], tuple[ChainSteps, Captured]] = {}  # (requests, depth)

    def capture_all(
        self, batches: Sequence[int], rows: Sequence[int], depths: Iterable[int], allowance: Allowance
    ) -> None:
        """Extends of ``rows`` rows and chains of ``depths`` candidates for every batch size, largest first."""
        depths = sorted((depth for depth in depths if depth > 1), reverse=True)
        wanted = missed = 0
        for requests in sorted(batches, reverse=True):
            for count in sorted(rows, reverse=True):
                wanted += 1
                missed += not allowance(lambda b=requests, r=count: self._capture_extend(b, r))  # type: ignore[misc]
            for depth in depths:
                wanted += 1
                missed += not allowance(lambda b=requests, d=depth: self._capture_chain(b, d))  # type: ignore[misc]
        log.info("%d of %d CUDA graphs of the draft head", wanted - missed, wanted)

    def _capture_extend(self, requests: int, rows: int) -> None:
        if (inputs := self._at.inputs(requests, rows)) is not None:
            self._extends[requests, rows] = ExtendGraph(self._at, inputs, self._capture)

    def _capture_chain(self, requests: int, depth: int) -> None:
        if (steps := ChainSteps.make(self._at, requests, depth, self._coupled)) is not None:
            self._chains[requests, depth] = steps, self._capture(steps.run)

    def extend(
        self,
        segments: Sequence[Segment],
        hidden: torch.Tensor,
        late: LateTokens | None = None,
        behind: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """The last output of every sequence, or one before it, [len(segments), hidden_size]; None where no graph holds
        the batch. See ``ExtendGraph``."""
        rows = max(len(segment.token_ids) for segment in segments)
        fitting = [key for key in self._extends if key[0] >= len(segments) and key[1] >= rows]
        if not fitting:
            return None
        graph = self._extends[min(fitting, key=lambda key: (key[0] * key[1], key))]
        return graph(segments, hidden, late, behind) if graph.fits(segments) else None

    def chain(self, requests: Sequence[ChainRequest], first: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor | None:
        """Candidates int64 [len(requests), depth of the graph], the caller's; None where no graph holds the batch.

        See ``ChainSteps.fill``.
        """
        depth = max(request.depth for request in requests)
        if depth == 1:  # the last extend's own candidates: there is no step to run
            return first.unsqueeze(1)
        longest = max(request.committed + request.depth for request in requests)
        fitting = [key for key in self._chains if key[0] >= len(requests) and key[1] >= depth]
        if not fitting or longest > self._at.max_len:
            return None
        steps, captured = self._chains[min(fitting, key=lambda key: (key[0] * key[1], key))]
        steps.fill(requests, first, hidden)
        captured.replay()
        return captured.outputs[0][: len(requests)].clone()
