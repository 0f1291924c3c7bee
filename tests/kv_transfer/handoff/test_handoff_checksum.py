"""A byte that changes on its way fails the hand-off it belongs to, by name, and nothing else."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from unittest.mock import patch

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from typer.testing import CliRunner

from cluster.commands.cli import app
from cluster.contract.generation import GenerationRequest
from kv_transfer.handoff.block import DRAFT_KV, HIDDEN, META, TARGET_KV
from kv_transfer.handoff.state import HandoffState
from kv_transfer.transports.base import Pending, Transport, byte_view
from kv_transfer.transports.crc import crc32
from kv_transfer.transports.loopback import loopback_pair
from kv_transfer.transports.registry import open_transport
from paceline.config import NodeConfig, ServeConfig
from paceline.errors import HandoffFailed
from paceline.kvcache.layout import LayerOwner
from paceline.request import SamplingParams
from paceline.v1.handoff_pb2 import Begin, HandoffMessage, State
from tests.cluster.routing.test_router_with_nodes import PROMPT, expected, router_for
from tests.fakes.nodes import cluster, node_config
from tests.support.exactness import run
from tests.support.handoff_link import FIRST, HIDDEN_SIZE, NUM, Link, Prompt, open_link, raw, raw_chunk, wait_for
from tests.support.node_pair import pair
from tests.support.tiny_model import tiny_prefill_runner, tiny_request, tiny_runner

torch.set_num_threads(1)

MESSAGES = (  # of one `Link.hand_over`, as a failure names them
    "target_kv rows, layers 0..1, tokens 16..39",
    "target_kv rows, layers 2..2, tokens 16..39",
    "draft_kv rows, layers 3..4, tokens 16..39",
    "target_kv rows, layers 0..1, tokens 40..65",
    "target_kv rows, layers 2..2, tokens 40..65",
    "draft_kv rows, layers 3..4, tokens 40..65",
    "the hidden rows of State",
)


class FlippingTransport(Transport):
    """Changes one bit of message number ``victim`` after the sender let go of it."""

    def __init__(self, inner: Transport, victim: int) -> None:
        self.inner, self.victim, self.sent = inner, victim, 0

    def start_send(self, tensor: Tensor) -> Pending:
        """See Transport."""
        data = byte_view(tensor)
        if self.sent == self.victim:
            data = data.clone()
            data[data.numel() // 2] ^= 16
        self.sent += 1
        return self.inner.start_send(data)

    def start_recv(self, tensor: Tensor) -> Pending:
        """See Transport."""
        return self.inner.start_recv(tensor)

    def _send_message(self, data: Tensor) -> None:
        self.inner._send_message(data)

    def _recv_message(self, data: Tensor) -> None:
        self.inner._recv_message(data)

    def close(self) -> None:
        """See Transport."""
        self.inner.close()

    def abort(self) -> None:
        """See Transport."""
        self.inner.abort()


def wait_for_end(link: Link, ticket: str) -> None:
    wait_for(lambda: ticket in [t for t, _ in link.terminal], f"the end of {ticket}")


def flipping_pair(victim: int) -> tuple[Transport, Transport]:
    sender, receiver = loopback_pair(max_messages=2)
    return FlippingTransport(sender, victim), receiver


@pytest.fixture
def flipped() -> Iterator[list[FlippingTransport]]:
    """Prefill nodes whose gloo pipes change the third message; the pipes."""
    pipes: list[FlippingTransport] = []

    def opened(*args: Any, **options: Any) -> Transport:
        pipes.append(FlippingTransport(open_transport(*args, **options), victim=2 if not pipes else -1))
        return pipes[-1]

    with patch("prefill_node.links.open_transport", opened):
        yield pipes


def test_the_sum_is_over_the_bytes_of_any_dtype() -> None:
    rows = torch.arange(1000).bfloat16()
    assert crc32(rows) == zlib.crc32(rows.view(torch.uint8).numpy().tobytes())
    assert crc32(torch.empty(0)) == 0


def test_sums_cost_no_byte_but_their_own() -> None:
    """H4 as ever: what grows is META, by a tag and four bytes a message."""
    with open_link() as plain, open_link(send_sums=True, check_sums=True) as summed:
        for link in (plain, summed):
            link.sink.reserve("t")
            link.hand_over("t", Prompt(1))
            wait_for_end(link, "t")
            assert link.terminal == [("t", "ready")]
            link.check_rows("t", Prompt(1))
        without, with_sums = (link.sender.bytes_sent("t") for link in (plain, summed))
        assert {k: with_sums[k] for k in (TARGET_KV, DRAFT_KV, HIDDEN)} == {
            k: without[k] for k in (TARGET_KV, DRAFT_KV, HIDDEN)
        }
        assert with_sums[META] == without[META] + 5 * len(MESSAGES)
        assert summed.sink.handoffs["t"].bytes_by_class == with_sums


@pytest.mark.parametrize("number", range(len(MESSAGES)))
def test_a_changed_byte_fails_that_ticket_alone(number: int) -> None:
    victim = len(MESSAGES) + number
    with open_link(transports=flipping_pair(victim), send_sums=True, check_sums=True) as link:
        for i, ticket in enumerate(("a", "b", "c")):
            link.sink.reserve(ticket)
            with suppress(HandoffFailed):  # the failure may be told before the last rows are queued
                link.hand_over(ticket, Prompt(i))
            wait_for_end(link, ticket)
        assert link.terminal == [("a", "ready"), ("b", "failed"), ("c", "ready")]
        reason = link.failure("b")
        announced = [m for m in link.posted if m.ticket == "b" and m.WhichOneof("body") in ("chunk", "state")][number]
        body = announced.state if number == len(MESSAGES) - 1 else announced.chunk
        assert reason.startswith(f"checksum of {MESSAGES[number]}: {body.checksum:08x} was sent, ")
        arrived = reason.removesuffix(" arrived").rpartition(" ")[2]
        assert arrived != f"{body.checksum:08x}"
        assert int(arrived, 16) < 1 << 32
        assert link.sink.handoffs["b"].status is HandoffState.FAILED
        assert "b" not in link.sink.ready_states
        check_unused(link, number)
        for i, ticket in ((0, "a"), (2, "c")):
            link.check_rows(ticket, Prompt(i))
        link.check_still_works()


def check_unused(link: Link, number: int) -> None:
    """The rows of "b" before the changed message were written, and none from it on."""
    written = {(layer, token) for ticket, layer, token in link.sink.rows if ticket == "b"}
    before = [((0, 1), (16, 40)), ((2,), (16, 40)), ((3, 4), (16, 40)), ((0, 1), (40, 66)), ((2,), (40, 66))]
    before += [((3, 4), (40, 66))]
    assert written == {(layer, token) for layers, span in before[:number] for layer in layers for token in range(*span)}


def test_without_the_option_nobody_looks() -> None:
    """What the tests above rest on: the change is one that nothing else notices. Sums that come unasked are ignored."""
    for send_sums in (False, True):
        with open_link(transports=flipping_pair(2), send_sums=send_sums) as link:
            link.sink.reserve("t")
            link.hand_over("t", Prompt(1))
            wait_for_end(link, "t")
            assert link.terminal == [("t", "ready")]
            with pytest.raises(AssertionError):
                link.check_rows("t", Prompt(1))


def test_a_chunk_without_a_sum_is_refused_where_one_is_asked_for() -> None:
    with open_link(send_sums=True, check_sums=True) as link:
        link.sink.reserve("t")
        raw(link, HandoffMessage(ticket="t", begin=Begin(first_token=FIRST, num_tokens=NUM)))
        raw(link, raw_chunk("t", 384), torch.zeros(384, dtype=torch.uint8))
        wait_for(lambda: link.sink.failures, "the failure")
        assert "tokens 16..19 came without a checksum, which handoff_checksum of this node" in link.sink.failures[0][1]
        assert not link.sink.rows
        link.check_still_works()


def test_a_state_without_a_sum_is_refused_where_one_is_asked_for() -> None:
    with open_link(check_sums=True) as link:
        link.sink.reserve("t", num_tokens=0)
        raw(link, HandoffMessage(ticket="t", begin=Begin(first_token=FIRST, num_tokens=0)))
        state = State(num_hidden_rows=1, num_bytes=HIDDEN_SIZE * 2)
        raw(link, HandoffMessage(ticket="t", state=state), torch.zeros(HIDDEN_SIZE, dtype=torch.bfloat16))
        wait_for(lambda: link.sink.failures, "the failure")
        assert "hidden rows of State came without a checksum" in link.sink.failures[0][1]
        assert "t" not in link.sink.ready_states


def test_a_state_without_rows_has_a_sum_too() -> None:
    with open_link(send_sums=True, check_sums=True) as link:
        link.sink.reserve("t", num_tokens=0)
        link.sender.begin("t", range(FIRST, FIRST))
        link.sender.state("t", State(first_token_id=7))
        wait_for(lambda: link.terminal == [("t", "ready")], "the hand-off")


@pytest.mark.parametrize("handoff", ["draft_kv", "hidden_states"])
async def test_text_and_bytes_are_the_same_with_sums(handoff: str) -> None:
    options: dict[str, Any] = {"drafter": "mtp", "num_draft_tokens": 3, "handoff": handoff, "prefix_cache": False}
    requests = [tiny_request(index=i, temperature=i % 2) for i in range(4)]
    together = run(tiny_runner("bf16", **options), requests)
    config = NodeConfig.model_validate({"model": "tiny", "prefill_chunk_tokens": 5, "handoff_checksum": True} | options)
    prefill = tiny_prefill_runner("bf16", **options)
    async with pair(config, prefill, tiny_runner("bf16", page_size=8, **options)) as nodes:
        for (outcome, answer), one, request in zip(await nodes.run(requests, 3), together, requests, strict=True):
            assert outcome == one
            assert answer.handed_off is not None
            sent, layout, rows = answer.handed_off.bytes, prefill.kv.layout, len(request.prompt_token_ids)
            assert sent.target_kv == rows * layout.token_bytes(LayerOwner.TARGET)
            assert sent.draft_kv == rows * layout.token_bytes(LayerOwner.DRAFT)
            assert sent.hidden == (rows if handoff == "hidden_states" else 1) * prefill.handoff.hidden_size * 2
        await nodes.all_released()


async def test_a_changed_byte_over_gloo_is_replayed(
    flipped: list[FlippingTransport], caplog: pytest.LogCaptureFixture
) -> None:
    """Real nodes behind a router: that hand-off fails, is made again over the same link, and the text is right."""
    prefill, decode = node_config(handoff_checksum=True), node_config(handoff_checksum=True, page_size=8)
    async with cluster(prefill, decode) as nodes:
        router = router_for(nodes)
        for _ in range(2):
            done = await router.complete(GenerationRequest(PROMPT, SamplingParams(seed=9, ignore_eos=True), 10))
            assert done.token_ids == expected(9, 10)
        assert 'paceline_retries_total{error="HandoffFailed"} 1.0' in router.metrics.render().decode()
        assert len(flipped) == 1, "the link lives"
        assert flipped[0].sent > 3
        assert sum("checksum of target_kv rows" in record.message for record in caplog.records) >= 1
        await nodes.wait_for_release()
        await router.close()


def test_the_option() -> None:
    assert not ServeConfig().node(threads=1).handoff_checksum
    assert ServeConfig(handoff_checksum=True).node(threads=1).handoff_checksum
    with pytest.raises(ValidationError, match=r"handoff_checksum sums bytes in host memory.*set transport to gloo"):
        ServeConfig(handoff_checksum=True, transport="nccl")
    told = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"}).output
    assert "--handoff-checksum" in told
    assert "Needs transport `gloo`" in " ".join(told.replace("│", " ").split())
