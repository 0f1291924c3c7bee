"""How the rows of a chunk are cut into messages, by both ends alike."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.handoff.block import TARGET_KV, RowBlock
from kv_transfer.handoff.cut import chunks, message_sizes, messages
from kv_transfer.transports.base import CHUNK_BYTES, MESSAGE_BYTES
from paceline.v1.handoff_pb2 import Abort, Begin, HandoffMessage, State

FIRST = 7  # the cut does not depend on where the tokens begin


def block(num_tokens: int) -> RowBlock:
    return RowBlock(TARGET_KV, range(2, 5), range(FIRST, FIRST + num_tokens))


def chunk(num_tokens: int, num_bytes: int) -> HandoffMessage:
    return HandoffMessage(ticket="t", chunk=block(num_tokens).to_proto(num_bytes))


def test_a_block_is_what_its_descriptor_says() -> None:
    descriptor = block(4).to_proto(96, 5)
    assert RowBlock.of(descriptor) == block(4)
    assert (descriptor.num_bytes, descriptor.checksum) == (96, 5)
    assert not block(4).to_proto(96).HasField("checksum")


def test_tokens_are_cut_into_equal_chunks() -> None:
    assert [part.tokens for part in chunks(block(2048), 4096, one_message=True)] == [range(7, 1031), range(1031, 2055)]
    assert chunks(block(2048), 4096) == (block(2048),)
    assert chunks(block(0), 4096) == ()


@settings(deadline=None)
@given(st.integers(0, 5000), st.integers(1, 2 * MESSAGE_BYTES), st.booleans())
def test_chunks_follow_one_another_and_fit(num_tokens: int, token_bytes: int, one_message: bool) -> None:
    parts = chunks(block(num_tokens), token_bytes, one_message=one_message)
    assert [token for part in parts for token in part.tokens] == list(block(num_tokens).tokens)
    for part in parts:
        num_bytes = len(part.tokens) * token_bytes
        assert num_bytes <= (MESSAGE_BYTES if one_message else CHUNK_BYTES) or len(part.tokens) == 1
        assert max(len(p.tokens) for p in parts) - len(part.tokens) <= 1
        assert part.layers == block(0).layers
        if one_message:
            assert messages(part, num_bytes) == ((part, num_bytes),)


@settings(deadline=None)
@given(st.integers(0, 3000), st.integers(0, 3 * CHUNK_BYTES))
def test_messages_bring_every_token_and_every_byte_once(num_tokens: int, num_bytes: int) -> None:
    """Whatever a descriptor says, malformed ones included."""
    parts = messages(block(num_tokens), num_bytes)
    assert [token for part, _ in parts for token in part.tokens] == list(block(num_tokens).tokens)
    assert sum(size for _, size in parts) == num_bytes
    if num_tokens and num_bytes % num_tokens == 0:
        assert all(size <= MESSAGE_BYTES or len(part.tokens) == 1 for part, size in parts)
    assert message_sizes(chunk(num_tokens, num_bytes)) == tuple(size for _, size in parts if size)


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
