"""Where hand-offs land on a decode node. Runs on the links' receiver threads, beside the engine.

Rows are written straight into reserved pages: until the hand-off is ready, nobody else reads or writes them, and the
engine gives them back only after ``failed`` or ``ready`` was told. On a GPU the receiver's thread writes on a stream of
its own: behind what the engine had queued when it reserved the pages, and done before either is told.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy

import torch

from decode_node.stream import Stream
from kv_transfer.handoff.block import HIDDEN, RowBlock
from kv_transfer.handoff.state import Handoff
from kv_transfer.lanes.arrivals import Arrivals, LaneTarget
from kv_transfer.layout.reshard import Side, reshard
from kv_transfer.layout.rows import RowTarget
from kv_transfer.transports.side_stream import finish_queued, go_on_after, read_by_the_model
from paceline.engine.model_runner import ModelRunner
from paceline.errors import HandoffFailed
from paceline.kvcache.pool import KvPool
from paceline.spec_decode.sequence import DraftState
from paceline.v1 import handoff_pb2
from paceline.wire import finish_reason_from_proto

MAX_PROBABILITY = 1.001  # a sum of float32 may come out above 1


class ReservedPages:
    """The `HandoffSink` of all links. ``streams``: by ticket, changed by the engine thread only.

    ``on_ready(ticket, state, draft)`` and ``on_failed(ticket, reason)`` must not block.
    """

    def __init__(
        self,
        runner: ModelRunner,
        streams: Mapping[str, Stream],
        on_ready: Callable[[str, handoff_pb2.State, DraftState | None], None],
        on_failed: Callable[[str, str], None],
    ) -> None:
        self._runner = runner
        side = Side(runner.kv.layout)
        self._target: RowTarget | LaneTarget = RowTarget(runner.kv, reshard(side, side))
        self._streams = streams
        self._on_ready = on_ready
        self._on_failed = on_failed

    @property
    def pool(self) -> KvPool:
        """The node's."""
        return self._runner.kv

    def over(self, arrivals: Arrivals | None) -> ReservedPages:
        """The same pages, where rows come over the lanes of a link too."""
        if arrivals is None:
            return self
        found = copy(self)
        found._target = LaneTarget(arrivals)
        return found

    def lookup(self, ticket: str) -> Handoff | None:
        """The hand-off of a ticket that holds pages."""
        stream = self._streams.get(ticket)
        return stream.landing.handoff if stream is not None and stream.landing is not None else None

    def write_kv(self, ticket: str, block: RowBlock, data: torch.Tensor) -> None:
        """Scatter rows into the ticket's pages, which must still be in the life that was reserved; keep hidden rows."""
        stream = self._streams.get(ticket)
        if stream is None or stream.landing is None:
            raise HandoffFailed(f"hand-off {ticket} has no pages")
        tokens = block.tokens
        if block.byte_class == HIDDEN:
            rows = data.view(len(tokens), -1).to(self._runner.kv.device, copy=True)
            stream.landing.hidden.write(tokens.start, rows)
            return
        go_on_after(stream.landing.free, self._runner.kv.device)
        page_size = self._runner.page_size
        self._runner.allocator.check(*stream.landing.pages[tokens.start // page_size : -(-tokens.stop // page_size)])
        self._target.scatter(block.layers, stream.landing.slots[tokens.start : tokens.stop], data)

    def ready(self, ticket: str, state: handoff_pb2.State, hidden: torch.Tensor) -> None:
        """All rows are there. HandoffFailed when the state makes no sense; then nothing of it is used."""
        if not 0 <= state.first_token_id < self._runner.vocab_size:
            raise HandoffFailed(f"first token {state.first_token_id} is outside the vocabulary")
        finish_reason_from_proto(state.finish_reason)  # PacelineError for one that is not known here
        device = self._runner.kv.device
        draft = draft_state(state, read_by_the_model(hidden.to(device)), self._runner.vocab_size)
        finish_queued(device)
        self._on_ready(ticket, state, draft)

    def failed(self, ticket: str, reason: str) -> None:
        """No row of this ticket will be written any more."""
        finish_queued(self._runner.kv.device)
        self._on_failed(ticket, reason)


def draft_state(state: handoff_pb2.State, hidden: torch.Tensor, vocab_size: int) -> DraftState | None:
    """The drafter's state as it crossed, or None when there is none. HandoffFailed when its shape or a value is none
    that a drafter leaves: the whole batch would fail with it.

    hidden: [rows, hidden_size]. vocab_size: token ids are below it.
    """
    depth, width = state.proposal_depth, state.proposal_width
    if not len(state.proposal_ids) == len(state.proposal_probs) == depth * width:
        raise HandoffFailed(f"{len(state.proposal_ids)} draft proposals where {depth} x {width} are announced")
    if depth * width == 0:
        return None
    if not len(hidden):
        raise HandoffFailed("draft proposals came without a hidden row")
    ids = torch.tensor(state.proposal_ids, dtype=torch.int64)
    probs = torch.tensor(state.proposal_probs, dtype=torch.float32)
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise HandoffFailed("a draft proposal is outside the vocabulary")
    if not bool(((probs >= 0) & (probs <= MAX_PROBABILITY)).all()):  # not so either where one is not a number
        raise HandoffFailed("the probability of a draft proposal is none")
    return DraftState(ids.view(depth, width), probs.view(depth, width), hidden)
