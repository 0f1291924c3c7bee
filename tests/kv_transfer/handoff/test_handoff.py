"""The hand-off state machine: edges, coverage, deadlines, and any order of events."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kv_transfer.handoff.block import DRAFT_KV, HIDDEN, META, TARGET_KV, ByteClass, RowBlock
from kv_transfer.handoff.coverage import ExpectedRows
from kv_transfer.handoff.state import Handoff, HandoffState
from paceline.errors import HandoffFailed
from paceline.kvcache.layout import KvLayer, KvLayout, LayerKind, LayerOwner
from paceline.tracing import Recorder

LAYOUT = KvLayout(
    (
        KvLayer(LayerKind.GQA, LayerOwner.TARGET, 2, 4),  # 16 elements
        KvLayer(LayerKind.MLA, LayerOwner.TARGET, 1, 6),  # 6
        KvLayer(LayerKind.GQA, LayerOwner.DRAFT, 1, 4),  # 8
    ),
    torch.bfloat16,
)
HIDDEN_SIZE = 5


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make(first_token: int = 2, num_tokens: int = 4, draft_required: bool = True, clock: Clock | None = None) -> Handoff:
    expected = ExpectedRows(LAYOUT, range(first_token, first_token + num_tokens), HIDDEN_SIZE, draft_required)
    return Handoff("t", clock or Clock(), expected, reserve_deadline_s=10, handoff_deadline_s=3)


def size(layers: range, num_tokens: int) -> int:
    return sum(LAYOUT.layers[layer].row_elems for layer in layers) * 2 * num_tokens


def put(handoff: Handoff, byte_class: ByteClass, layers: range, tokens: range) -> None:
    handoff.chunk(RowBlock(byte_class, layers, tokens), size(layers, len(tokens)))


def complete(handoff: Handoff) -> None:
    handoff.begin(range(2, 6))
    put(handoff, TARGET_KV, range(0, 2), range(2, 6))
    put(handoff, DRAFT_KV, range(2, 3), range(2, 6))
    handoff.state(1, HIDDEN_SIZE * 2)


def test_the_whole_way() -> None:
    clock = Clock()
    handoff = make(clock=clock)
    handoff.begin(range(2, 6), "link-1")
    put(handoff, TARGET_KV, range(1, 2), range(4, 6))  # any order, any cut
    put(handoff, TARGET_KV, range(0, 2), range(2, 4))
    put(handoff, TARGET_KV, range(0, 1), range(4, 6))
    assert not handoff.draft_complete
    put(handoff, DRAFT_KV, range(2, 3), range(2, 6))
    handoff.count_meta(7)
    clock.now += 1
    handoff.state(1, HIDDEN_SIZE * 2)
    assert handoff.status is HandoffState.READY
    assert handoff.draft_complete
    assert handoff.link_id == "link-1"
    assert handoff.bytes_by_class == {
        TARGET_KV: 4 * LAYOUT.token_bytes(LayerOwner.TARGET),
        DRAFT_KV: 4 * LAYOUT.token_bytes(LayerOwner.DRAFT),
        HIDDEN: 10,
        META: 7,
    }
    handoff.release()
    assert handoff.terminal
    assert handoff.entered_at == {
        HandoffState.RESERVED: 100.0,
        HandoffState.SENDING: 100.0,
        HandoffState.READY: 101.0,
        HandoffState.RELEASED: 101.0,
    }


@pytest.mark.parametrize(("failure", "last"), [(None, "released"), ("the client left", "failed")])
def test_every_state_that_is_entered_is_an_event_of_the_trace(failure: str | None, last: str) -> None:
    recorder = Recorder(1)
    expected = ExpectedRows(LAYOUT, range(2, 6), HIDDEN_SIZE)
    handoff = Handoff(
        "t", Clock(), expected, reserve_deadline_s=10, handoff_deadline_s=3, trace=recorder.open("r", "x")
    )
    complete(handoff)
    if failure is None:
        handoff.release()
    else:
        handoff.fail(failure)
    names = [f"hand-off {state}" for state in ("reserved", "sending", "ready", last)]
    events = recorder.read("r", "decode-0").events
    assert [event.name for event in events] == names
    assert events[0].attributes == {"first_token": 2, "num_tokens": 4}
    assert [event.attributes["reason"] for event in events[1:]] == ["", "", failure or ""]


def test_nothing_to_send_is_complete_at_once() -> None:
    handoff = make(first_token=6, num_tokens=0)
    handoff.begin(range(6, 6))
    handoff.state(0, 0)
    assert handoff.status is HandoffState.READY


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((TARGET_KV, 0, 1, 2, 4, 127), "127 bytes declared where the layout says 128"),
        ((TARGET_KV, 0, 3, 2, 4, 240), "outside"),  # runs into the draft layer
        ((TARGET_KV, 2, 1, 2, 4, 64), "outside"),
        ((DRAFT_KV, 0, 1, 2, 4, 128), "outside"),
        ((TARGET_KV, 0, 0, 2, 4, 0), "outside"),
        ((TARGET_KV, 0, 1, 1, 4, 128), "outside the announced"),  # a row of the shared prefix
        ((TARGET_KV, 0, 1, 3, 4, 128), "outside the announced"),
        ((TARGET_KV, 0, 1, 2, 2**32 - 1, 0), "outside the announced"),
        ((HIDDEN, 0, 1, 2, 4, 128), "byte class"),
        ((META, 0, 1, 2, 4, 128), "byte class"),
    ],
)
def test_a_wrong_chunk_fails_closed(args: tuple[ByteClass, int, int, int, int, int], words: str) -> None:
    handoff = make()
    handoff.begin(range(2, 6))
    byte_class, first_layer, num_layers, first_token, num_tokens, num_bytes = args
    layers, tokens = range(first_layer, first_layer + num_layers), range(first_token, first_token + num_tokens)
    block = RowBlock(byte_class, layers, tokens)
    assert words in (handoff.chunk_problem(block, num_bytes) or "")
    with pytest.raises(HandoffFailed, match=words):
        handoff.chunk(block, num_bytes)
    assert handoff.status is HandoffState.FAILED
    assert words in (handoff.failure or "")
    assert sum(handoff.bytes_by_class.values()) == 0


def test_an_overlap_in_one_layer_fails_closed() -> None:
    handoff = make()
    handoff.begin(range(2, 6))
    put(handoff, TARGET_KV, range(1, 2), range(3, 4))
    with pytest.raises(HandoffFailed, match="twice"):
        put(handoff, TARGET_KV, range(0, 2), range(2, 6))
    assert handoff.status is HandoffState.FAILED


def test_a_gap_fails_closed() -> None:
    handoff = make()
    handoff.begin(range(2, 6))
    put(handoff, TARGET_KV, range(0, 2), range(2, 5))
    put(handoff, TARGET_KV, range(0, 1), range(5, 6))
    put(handoff, DRAFT_KV, range(2, 3), range(2, 6))
    with pytest.raises(HandoffFailed, match="1 of 4 rows of layer 1 are missing"):
        handoff.state(0, 0)
    assert handoff.status is HandoffState.FAILED


def test_draft_rows_that_no_draft_came_with_may_be_some() -> None:
    for required, tokens, ready in ((True, 3, False), (True, 4, True), (False, 0, True), (False, 3, True)):
        handoff = make(draft_required=required)
        handoff.begin(range(2, 6))
        put(handoff, TARGET_KV, range(0, 2), range(2, 6))
        if tokens:
            put(handoff, DRAFT_KV, range(2, 3), range(2, 2 + tokens))
        assert (handoff.state_problem(0, 0, drafts=False) is None) is ready
        assert handoff.draft_complete is (tokens == 4)


def test_draft_rows_may_be_left_out_only_whole_and_only_when_allowed() -> None:
    for required, tokens, ready in ((True, 0, False), (False, 0, True), (False, 3, False), (False, 4, True)):
        handoff = make(draft_required=required)
        handoff.begin(range(2, 6))
        put(handoff, TARGET_KV, range(0, 2), range(2, 6))
        if tokens:
            put(handoff, DRAFT_KV, range(2, 3), range(2, 2 + tokens))
        assert (handoff.state_problem(0, 0) is None) is ready
        assert handoff.draft_complete is (tokens == 4)


@pytest.mark.parametrize(("rows", "num_bytes"), [(1, 9), (1, 0), (0, 10), (7, 70), (2**32 - 1, 10)])
def test_wrong_hidden_rows_fail_closed(rows: int, num_bytes: int) -> None:
    handoff = make()
    handoff.begin(range(2, 6))
    put(handoff, TARGET_KV, range(0, 2), range(2, 6))
    put(handoff, DRAFT_KV, range(2, 3), range(2, 6))
    with pytest.raises(HandoffFailed, match="hidden"):
        handoff.state(rows, num_bytes)
    assert handoff.status is HandoffState.FAILED


def test_begin_must_announce_what_is_reserved() -> None:
    handoff = make()
    for first, num in ((1, 5), (2, 5), (3, 3), (2, 3)):
        with pytest.raises(HandoffFailed, match="reserved"):
            handoff.begin(range(first, first + num))
        assert handoff.status is HandoffState.RESERVED


def test_a_second_begin_does_not_disturb_the_first() -> None:
    handoff = make()
    handoff.begin(range(2, 6), "a")
    with pytest.raises(HandoffFailed, match="begin while sending"):
        handoff.begin(range(2, 6), "b")
    assert (handoff.status, handoff.link_id) == (HandoffState.SENDING, "a")


def test_fail_reserved_is_refused_once_a_link_began() -> None:
    handoff = make()
    handoff.begin(range(2, 6))
    assert not handoff.fail_reserved("left")
    assert handoff.status is HandoffState.SENDING
    handoff = make()
    assert handoff.fail_reserved("left")
    assert not handoff.fail_reserved("again")
    assert handoff.failure == "left"
    with pytest.raises(HandoffFailed):
        handoff.begin(range(2, 6))


def test_ready_and_terminal_states_refuse_what_comes_late() -> None:
    handoff = make()
    complete(handoff)
    with pytest.raises(HandoffFailed):
        put(handoff, TARGET_KV, range(0, 1), range(2, 3))
    with pytest.raises(HandoffFailed):
        handoff.state(0, 0)
    assert handoff.status is HandoffState.READY
    handoff.fail("decode broke")
    with pytest.raises(HandoffFailed):
        handoff.release()
    with pytest.raises(HandoffFailed):
        handoff.fail("twice")
    assert handoff.failure == "decode broke"


def test_deadlines_count_from_reservation_and_from_the_first_byte() -> None:
    """TensorRT-LLM #13824: each deadline starts at the moment that it is about."""
    clock = Clock()
    handoff = make(clock=clock)
    assert handoff.expired(110.0) is None
    assert "reservation" in (handoff.expired(110.1) or "")
    clock.now = 109.0
    handoff.begin(range(2, 6))
    assert handoff.expired(112.0) is None
    assert "did not finish" in (handoff.expired(112.1) or "")
    put(handoff, TARGET_KV, range(0, 2), range(2, 6))
    put(handoff, DRAFT_KV, range(2, 3), range(2, 6))
    handoff.state(0, 0)
    assert handoff.expired(1e9) is None


LEGAL = {
    HandoffState.RESERVED: {HandoffState.SENDING, HandoffState.FAILED},
    HandoffState.SENDING: {HandoffState.READY, HandoffState.FAILED},
    HandoffState.READY: {HandoffState.RELEASED, HandoffState.FAILED},
    HandoffState.RELEASED: set(),
    HandoffState.FAILED: set(),
}


class AnyOrder(RuleBasedStateMachine):
    """Events in any order, against a model that remembers every row as a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.handoff = make()
        self.rows: set[tuple[int, int]] = set()
        self.before = self.handoff.status

    def attempt(self, event: object, *args: object) -> bool:
        assert callable(event)
        try:
            event(*args)
        except HandoffFailed:
            return False
        return True

    @rule(first=st.sampled_from([1, 2, 2, 2]), num=st.sampled_from([3, 4, 4, 4]))
    def begin(self, first: int, num: int) -> None:
        was = self.handoff.status
        accepted = self.attempt(self.handoff.begin, range(first, first + num))
        assert accepted == (was is HandoffState.RESERVED and (first, num) == (2, 4))

    @rule(
        layers=st.tuples(st.integers(0, 2), st.integers(1, 3)),
        tokens=st.tuples(st.integers(1, 6), st.integers(0, 5)),
        draft=st.booleans(),
        wrong=st.sampled_from([0, 0, 0, 0, 1]),
    )
    def chunk(self, layers: tuple[int, int], tokens: tuple[int, int], draft: bool, wrong: int) -> None:
        span, positions = range(layers[0], sum(layers)), range(tokens[0], sum(tokens))
        rows = {(layer, token) for layer in span for token in positions}
        allowed = {2} if draft else {0, 1}
        legal = (
            self.handoff.status is HandoffState.SENDING
            and not wrong
            and set(span) <= allowed
            and 2 <= positions.start <= positions.stop <= 6
            and not rows & self.rows
        )
        num_bytes = sum(LAYOUT.layers[layer].row_elems for layer in span if layer < 3) * 2 * len(positions) + wrong
        byte_class = DRAFT_KV if draft else TARGET_KV
        assert self.attempt(self.handoff.chunk, RowBlock(byte_class, span, positions), num_bytes) == legal
        if legal:
            self.rows |= rows

    @rule()
    def send_what_is_missing(self) -> None:
        if self.handoff.status is HandoffState.SENDING:
            for layer in range(3):
                for token in range(2, 6):
                    if (layer, token) not in self.rows:
                        put(
                            self.handoff,
                            DRAFT_KV if layer == 2 else TARGET_KV,
                            range(layer, layer + 1),
                            range(token, token + 1),
                        )
                        self.rows.add((layer, token))

    @rule()
    def state(self) -> None:
        legal = self.handoff.status is HandoffState.SENDING and len(self.rows) == 12
        assert self.attempt(self.handoff.state, 1, 10) == legal

    @rule()
    def release(self) -> None:
        legal = self.handoff.status is HandoffState.READY
        assert self.attempt(self.handoff.release) == legal

    @rule()
    def fail(self) -> None:
        legal = not self.handoff.terminal
        assert self.attempt(self.handoff.fail, "reason") == legal

    @invariant()
    def only_drawn_edges(self) -> None:
        now = self.handoff.status
        assert now is self.before or now in LEGAL[self.before]
        self.before = now

    @invariant()
    def never_ready_with_a_missing_row(self) -> None:
        if self.handoff.status in (HandoffState.READY, HandoffState.RELEASED):
            assert len(self.rows) == 12
        counted = self.handoff.bytes_by_class[TARGET_KV] + self.handoff.bytes_by_class[DRAFT_KV]
        assert counted == sum(LAYOUT.layers[layer].row_elems * 2 for layer, _ in self.rows)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
