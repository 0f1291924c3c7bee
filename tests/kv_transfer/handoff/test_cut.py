"""How the rows of a chunk are cut into messages, by both ends alike."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.handoff.cut import message_sizes, message_tokens, token_pieces
from kv_transfer.transports.base import CHUNK_BYTES, MESSAGE_BYTES
from paceline.v1.handoff_pb2 import Abort, Begin, Chunk, HandoffMessage, State


def chunk(num_tokens: int, num_bytes: int) -> HandoffMessage:
    return HandoffMessage(ticket="t", chunk=Chunk(num_tokens=num_tokens, num_bytes=num_bytes))


def test_tokens_are_cut_into_equal_parts() -> None:
    assert token_pieces(2048, 4096) == (range(0, 1024), range(1024, 2048))
    assert token_pieces(2048, 4096, CHUNK_BYTES) == (range(0, 2048),)
    assert token_pieces(0, 4096) == ()


@settings(deadline=None)
@given(st.integers(0, 5000), st.integers(1, 2 * MESSAGE_BYTES), st.sampled_from([None, CHUNK_BYTES]))
def test_pieces_follow_one_another_and_fit(num_tokens: int, token_bytes: int, limit: int | None) -> None:
    pieces = token_pieces(num_tokens, token_bytes, limit)
    assert [token for piece in pieces for token in piece] == list(range(num_tokens))
    for piece in pieces:
        assert len(piece) * token_bytes <= (limit or MESSAGE_BYTES) or len(piece) == 1
        assert max(len(p) for p in pieces) - len(piece) <= 1


@settings(deadline=None)
@given(st.integers(0, 3000), st.integers(0, 3 * CHUNK_BYTES))
def test_messages_bring_every_token_and_every_byte_once(num_tokens: int, num_bytes: int) -> None:
    """Whatever a descriptor says, malformed ones included."""
    sizes = message_sizes(chunk(num_tokens, num_bytes))
    assert sum(sizes) == num_bytes
    assert all(sizes)
    pieces = message_tokens(num_tokens, num_bytes)
    assert [token for piece in pieces for token in piece] == list(range(num_tokens))
    assert len(pieces) == len(sizes) or num_bytes == 0


def test_a_chunk_of_a_real_prompt() -> None:
    """SmolLM2-135M: 30 layers of 768 bytes; 700 tokens are 16.1 MB."""
    token_bytes = 30 * 768
    assert message_sizes(chunk(700, 700 * token_bytes)) == (182 * token_bytes,) * 3 + (154 * token_bytes,)
    assert message_sizes(chunk(728, 728 * token_bytes)) == (182 * token_bytes,) * 4
    assert message_sizes(chunk(180, 180 * token_bytes)) == (180 * token_bytes,)
    assert message_sizes(chunk(3, 10)) == (10,)  # no multiple: one message, to be refused


def test_what_brings_no_rows() -> None:
    assert message_sizes(HandoffMessage(ticket="t", begin=Begin(num_tokens=3))) == ()
    assert message_sizes(HandoffMessage(ticket="t", abort=Abort(reason="x"))) == ()
    assert message_sizes(HandoffMessage(ticket="t", state=State())) == ()
    assert message_sizes(HandoffMessage(ticket="t", state=State(num_bytes=1152))) == (1152,)
