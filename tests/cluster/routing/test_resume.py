"""Resuming over plain gRPC: what another router needs, what it sends, and what it refuses."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import AsyncMock

import grpc
import grpc.aio
import pytest
import redis

from cluster.contract.generation import ReceivedChoice
from cluster.routing import choice as choice_module
from cluster.state.journal import journal_key
from paceline.request import FinishReason, SamplingParams, SequenceRequest, derive_seed
from paceline.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from tests.fakes.redis_servers import Embedded
from tests.support.byte_text import ByteDetokenizer, ByteTokenizer
from tests.support.scripted_nodes import Fleet, fleet, letters, token_at
from tests.support.two_routers import One, Two, scripted, two_routers

ID = "0123456789abcdef0123456789abcdef"
TEXT = letters(5, 5, 64)
STUB = inference_pb2_grpc.InferenceStub


@pytest.fixture(scope="module")
def redis_server() -> Iterator[Embedded]:
    with Embedded() as made:
        yield made


@asynccontextmanager
async def routers(url: str, round_size: int = 1, **options: Any) -> AsyncIterator[tuple[Fleet, Two]]:
    async with fleet(**options) as nodes:
        nodes.nodes["decode-0"].script.round_size = round_size
        if url:
            with redis.Redis.from_url(url) as client:
                client.flushdb()
        async with two_routers(scripted(nodes), nodes.router.config, url) as two:
            yield nodes, two
        await nodes.idle()


@dataclass
class Got:
    """What one stream brought, by choice."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    first: dict[int, int] = field(default_factory=dict)
    text: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    completions: dict[int, inference_pb2.Completion] = field(default_factory=dict)
    resumable: inference_pb2.Resumable | None = None
    chunks: int = 0

    def take(self, chunk: inference_pb2.GenerateChunk) -> None:
        tokens = self.tokens.setdefault(chunk.choice, [])
        assert chunk.first_index == self.first.setdefault(chunk.choice, chunk.first_index) + len(tokens)
        assert chunk.choice not in self.completions
        tokens += chunk.token_ids
        self.text[chunk.choice] = self.text.get(chunk.choice, "") + chunk.text
        self.logprobs.setdefault(chunk.choice, []).extend(entry.logprob for entry in chunk.logprobs)
        assert chunk.HasField("resumable") == (self.chunks == 0)
        if chunk.HasField("resumable"):
            self.resumable = chunk.resumable
        if chunk.HasField("completion"):
            self.completions[chunk.choice] = chunk.completion
        self.chunks += 1


def ask(generation_id: str = ID, tenant: str = "", prompt: str = "hello", **sampling: Any) -> Any:
    params = {"seed": 5, "max_tokens": 12} | sampling
    return inference_pb2.GenerateRequest(
        text=prompt, sampling=common_pb2.SamplingParams(**params), generation_id=generation_id, tenant=tenant
    )


async def broken(two: Two, request: Any, upto: int) -> Got:
    """What a client has of a stream whose router died after ``upto`` chunks, with the request in the journal."""
    two.a.router.stall_after = upto
    got = Got()
    reading = asyncio.create_task(stream(two.a, request, got=got))
    await journaled(two, request.generation_id, request.tenant)
    stalled = asyncio.create_task(two.a.router.stalled.wait())
    await asyncio.wait({stalled, reading}, return_when=asyncio.FIRST_COMPLETED)
    while got.chunks < upto and not reading.done():  # what was sent is there before its connection breaks
        await asyncio.sleep(0.005)
    await two.a.die()
    stalled.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    assert got.chunks == upto or reading.exception() is None
    return got


async def part(two: Two, request: Any, upto: int) -> Got:
    """The same of a stream that its client broke off."""
    got = await stream(two.a, request, upto)
    if two.a.journal is not None and got.resumable is not None:
        await journaled(two, got.resumable.generation_id, request.tenant)
    return got


async def stream(one: One, request: Any, upto: int | None = None, got: Got | None = None) -> Got:
    """Read a stream to its end, or ``upto`` chunks of it and then break it off."""
    got = got or Got()
    async with grpc.aio.insecure_channel(one.address) as channel:
        call = STUB(channel).GenerateStream(request, timeout=20)
        while got.chunks != upto:
            chunk = await call.read()
            if not isinstance(chunk, inference_pb2.GenerateChunk):  # the end
                break
            got.take(chunk)
        call.cancel()
    return got


async def refused(one: One, request: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stream(one, request)
    return caught.value


async def journaled(two: Two, generation_id: str = ID, tenant: str = "") -> None:
    """Until the journal has a generation."""
    assert two.b.journal is not None
    async with asyncio.timeout(5):
        while await two.b.journal.read(journal_key(tenant, generation_id)) is None:
            await asyncio.sleep(0.005)


def resume(got: Got | None, *, tokens: bool = False, generation_id: str = ID, tenant: str = "") -> Any:
    """What a client sends that keeps nothing but the id and how far it is (and the tokens)."""
    request = inference_pb2.GenerateRequest(generation_id=generation_id, tenant=tenant)
    request.resume.SetInParent()
    for choice, had in (got.tokens if got else {}).items():
        request.resume.choices.add(
            choice=choice,
            next_index=len(had),
            token_ids=had if tokens else (),
            complete=got is not None and choice in got.completions,
        )
    return request


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("upto", range(14))
async def test_at_every_index(redis_server: Embedded, upto: int, tokens: bool) -> None:
    """Twelve tokens are thirteen chunks; at fourteen there is nothing left but the end."""
    async with routers(redis_server.url) as (nodes, two):
        before = await broken(two, ask(top_logprobs=0), upto)
        after = await stream(two.b, resume(before, tokens=tokens))
        assert before.text.get(0, "") + after.text.get(0, "") == TEXT[:12]
        assert before.tokens.get(0, []) + after.tokens.get(0, []) == list(TEXT[:12].encode())
        assert len(before.logprobs.get(0, []) + after.logprobs.get(0, [])) == 12
        assert len(before.completions) + len(after.completions) == 1
        if upto < 13:
            assert after.first == {0: min(upto, 12)}
            assert after.completions[0].finish_reason == common_pb2.FINISH_REASON_LENGTH
            usage = after.completions[0].usage
            assert (usage.prompt_tokens, usage.completion_tokens) == (5, 12)
        replayed = [s.output_token_ids for s in nodes.nodes["decode-0"].sequences][1:]
        assert [len(ids) for ids in replayed] == ([] if upto > 12 or (tokens and upto == 12) else [upto * tokens])


@pytest.mark.parametrize("tokens", [False, True])
async def test_rounds_that_straddle_the_cut(redis_server: Embedded, tokens: bool) -> None:
    async with routers(redis_server.url, round_size=3) as (nodes, two):
        before = await part(two, ask(top_logprobs=1), 2)
        assert len(before.tokens[0]) == 4
        before.tokens[0].pop()  # as if the chunk had ended one token earlier: rounds fall as they like
        nodes.nodes["decode-0"].script.round_size = 5
        after = await stream(two.b, resume(before, tokens=tokens))
        assert (after.first, after.text[0]) == ({0: 3}, TEXT[3:12])
        assert len(after.logprobs[0]) == 9


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("upto", [1, 5, 6, 7, 8, 9])
async def test_a_stop_string_across_the_cut(redis_server: Embedded, upto: int, tokens: bool) -> None:
    async with routers(redis_server.url) as (_, two):
        before = await part(two, ask(stop=[TEXT[6:9]]), upto)
        after = await stream(two.b, resume(before, tokens=tokens))
        assert before.text[0] + after.text[0] == TEXT[:6]
        done = after.completions[0]
        assert done.finish_reason == common_pb2.FINISH_REASON_STOP
        assert done.usage.completion_tokens == 9
        assert before.tokens[0] + after.tokens[0] == list(TEXT[:9].encode())


@pytest.mark.parametrize("upto", [0, 1, 4, 9, 17])
async def test_several_choices_some_complete(redis_server: Embedded, upto: int) -> None:
    """dynamo #7930, dynamo #7634: replay of tokens with ``n > 1``."""
    texts = [letters(derive_seed(5, i), 5, 6) for i in range(3)]
    async with routers(redis_server.url) as (_, two):
        before = await broken(two, ask(n=3, max_tokens=6), upto)
        after = await stream(two.b, resume(before, tokens=upto % 2 == 0))
        for i in range(3):
            assert before.text.get(i, "") + after.text.get(i, "") == texts[i]
        assert sorted([*before.completions, *after.completions]) == [0, 1, 2]


async def test_a_stop_token_was_the_last_token(redis_server: Embedded) -> None:
    async with routers(redis_server.url) as (nodes, two):
        before = await part(two, ask(stop_token_ids=[token_at(5, 5 + 4)]), 5)
        after = await stream(two.b, resume(before, tokens=True))
        assert after.completions[0].finish_reason == common_pb2.FINISH_REASON_STOP
        assert (after.text[0], after.tokens[0]) == ("", [])
        assert len(nodes.nodes["decode-0"].sequences) == 1  # nothing had to be computed


async def test_the_seed_that_the_first_router_drew_and_its_request_id(redis_server: Embedded) -> None:
    async with routers(redis_server.url) as (nodes, two):
        request = ask()
        request.sampling.ClearField("seed")
        before = await part(two, request, 4)
        after = await stream(two.b, resume(before))
        first, second = nodes.nodes["decode-0"].sequences
        assert first.params == second.params
        assert first.request_id == second.request_id == after.completions[0].request_id
        assert before.resumable is not None
        assert before.resumable == after.resumable
        assert before.resumable.seed == first.params.seed == after.completions[0].seed


async def test_a_router_gives_the_id_when_the_client_has_none(redis_server: Embedded) -> None:
    async with routers(redis_server.url) as (_, two):
        before = await part(two, ask(""), 3)
        assert before.resumable is not None
        assert len(before.resumable.generation_id) == 32
        after = await stream(two.b, resume(before, generation_id=before.resumable.generation_id))
        assert before.text[0] + after.text[0] == TEXT[:12]


async def test_resumed_twice(redis_server: Embedded) -> None:
    async with routers(redis_server.url) as (_, two):
        whole = await part(two, ask(), 3)
        for upto in (2, 3, None):
            more = await stream(two.b, resume(whole, tokens=True), upto)
            whole.tokens[0] += more.tokens[0]
            whole.text[0] += more.text[0]
        assert whole.text[0] == TEXT[:12]


async def test_another_tenant_or_id_finds_nothing(redis_server: Embedded) -> None:
    async with routers(redis_server.url) as (_, two):
        before = await part(two, ask(tenant="mine"), 3)
        for wrong in ({"tenant": "other"}, {"tenant": ""}, {"tenant": "mine", "generation_id": ID[::-1]}):
            error = await refused(two.b, resume(before, **wrong))  # type: ignore[arg-type]
            assert error.code() is grpc.StatusCode.NOT_FOUND
            assert "not in the journal" in str(error.details())
        assert (await stream(two.b, resume(before, tenant="mine"))).text[0] == TEXT[3:12]


async def test_an_entry_of_a_newer_build_is_left_to_its_routers(
    redis_server: Embedded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """UNAVAILABLE, so that clients ask another router. Mutant: what this build does not know of the request is left
    out, and another text goes on."""
    async with routers(redis_server.url) as (_, two):
        before = await part(two, ask(), 3)
        assert two.b.journal is not None
        known = await two.b.journal.read(journal_key("", ID))
        assert known is not None
        monkeypatch.setattr(two.b.journal, "read", AsyncMock(return_value=known + b"\x98\x06\x07"))
        error = await refused(two.b, resume(before))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "field 99: is not known to this build" in str(error.details())
        monkeypatch.undo()
        assert (await stream(two.b, resume(before))).text[0] == TEXT[3:12]


async def test_an_entry_expires(redis_server: Embedded) -> None:
    async with routers(redis_server.url, journal_ttl_s=0.3) as (_, two):
        before = await broken(two, ask(), 3)
        assert two.b.journal is not None
        async with asyncio.timeout(10):
            while await two.b.journal.read(journal_key("", ID)) is not None:
                await asyncio.sleep(0.02)
        error = await refused(two.b, resume(before))
        assert error.code() is grpc.StatusCode.NOT_FOUND
        assert "expired" in str(error.details())


async def test_the_clients_own_copy_does_when_the_journal_has_nothing() -> None:
    async with routers("") as (_, two):
        request = ask(n=2)
        request.sampling.ClearField("seed")
        before = await part(two, request, 5)
        assert before.resumable is not None
        again = resume(before, tokens=True)
        again.text = "hello"
        again.sampling.CopyFrom(request.sampling)
        for missing in ("seed", "digest"):  # then it would be another text, or might be
            error = await refused(two.b, again)
            assert error.code() is grpc.StatusCode.NOT_FOUND, missing
            again.sampling.seed = before.resumable.seed
        again.resume.plan_digest = before.resumable.plan_digest
        after = await stream(two.b, again)
        for i in range(2):
            text = letters(derive_seed(before.resumable.seed, i), 5, 12)
            assert before.text.get(i, "") + after.text[i] == text
        again.text = "jello"
        assert (await refused(two.b, again)).code() is grpc.StatusCode.NOT_FOUND


async def test_an_id_used_twice_does_not_mix_two_requests(redis_server: Embedded) -> None:
    async with routers(redis_server.url) as (_, two):
        before = await part(two, ask(), 3)
        assert two.b.journal is not None
        first = await two.b.journal.read(journal_key("", ID))
        await stream(two.a, ask(prompt="jello there"), 3)
        async with asyncio.timeout(10):
            while await two.b.journal.read(journal_key("", ID)) == first:
                await asyncio.sleep(0.005)
        assert before.resumable is not None
        again = resume(before)
        again.resume.plan_digest = before.resumable.plan_digest
        assert (await refused(two.b, again)).code() is grpc.StatusCode.NOT_FOUND
        again.text = "hello"
        again.sampling.CopyFrom(ask().sampling)
        assert (await stream(two.b, again)).text[0] == TEXT[3:12]


async def test_nothing_was_received_and_nothing_journaled_is_a_new_start() -> None:
    async with routers("") as (_, two):
        again = resume(None)
        assert (await refused(two.b, again)).code() is grpc.StatusCode.NOT_FOUND
        again.text = "hello"
        again.sampling.CopyFrom(ask().sampling)
        assert (await stream(two.b, again)).text[0] == TEXT[:12]


BAD = [
    ({"choice": 1, "next_index": 1}, "there are 1"),
    ({"choice": 0, "next_index": 13}, "above max_tokens"),
    ({"choice": 0, "next_index": 3, "token_ids": [97]}, "not those before"),
    ({"choice": 0, "next_index": 1, "token_ids": [300]}, "vocabulary"),
    ({"choice": 0, "next_index": 2, "token_ids": [256, 97]}, "ended at token 1"),  # goes on after the end
]


async def test_what_a_client_cannot_have(redis_server: Embedded) -> None:
    async with routers(redis_server.url) as (_, two):
        await part(two, ask(), 3)
        for received, message in BAD:
            again = resume(None)
            again.resume.choices.add(**received)  # type: ignore[arg-type]
            error = await refused(two.b, again)
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert message in str(error.details())
            assert dict(error.trailing_metadata() or {})["paceline-field"] == "resume.choices"
        again = resume(None)
        for _ in range(2):
            again.resume.choices.add(choice=0, next_index=1)
        assert "twice" in str((await refused(two.b, again)).details())
        short = ask("short")
        assert dict((await refused(two.a, short)).trailing_metadata() or {})["paceline-field"] == "generation_id"
        async with grpc.aio.insecure_channel(two.a.address) as channel:
            with pytest.raises(grpc.aio.AioRpcError, match="only a stream"):
                await STUB(channel).Generate(resume(None))


async def test_more_tokens_than_there_are(redis_server: Embedded) -> None:
    async with routers(redis_server.url) as (_, two):
        await part(two, ask(stop=[TEXT[2]]), 2)
        again = resume(None)
        again.resume.choices.add(choice=0, next_index=7)
        error = await refused(two.b, again)
        assert (error.code(), "has 3 tokens" in str(error.details())) == (grpc.StatusCode.INVALID_ARGUMENT, True)


@pytest.mark.parametrize("upto", [1, 3])
async def test_a_rule_whose_text_depends_on_drafts_needs_the_tokens(redis_server: Embedded, upto: int) -> None:
    async with routers(redis_server.url, acceptance="rejection") as (_, two):
        before = await part(two, ask(), upto)
        error = await refused(two.b, resume(before))
        assert "token_ids are needed" in str(error.details())
        assert (await stream(two.b, resume(before, tokens=True))).text[0] == TEXT[upto:12]


async def test_redis_dies_and_returns_under_a_stream() -> None:
    with Embedded() as server:
        async with routers(server.url, journal_ttl_s=2.0) as (nodes, two):
            gate = nodes.nodes["decode-0"].script.gate = asyncio.Event()
            reading = asyncio.create_task(stream(two.a, ask(tenant="runs")))
            await journaled(two, tenant="runs")
            server.kill()
            fresh = asyncio.create_task(stream(two.a, ask(tenant="during"), 1))  # no token waits for Redis
            assert (await asyncio.wait_for(fresh, 10.0)).text[0] == TEXT[0]
            error = await refused(two.b, resume(None))
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert "journal" in str(error.details())
            server.start_again()
            await journaled(two, tenant="runs")  # written again by itself
            gate.set()
            assert (await reading).text[0] == TEXT[:12]
            for tenant in ("runs", "during", "after"):
                before = await part(two, ask(tenant=tenant), 3)
                after = await stream(two.b, resume(before, tenant=tenant))
                assert before.text[0] + after.text[0] == TEXT[:12]


async def test_off(redis_server: Embedded) -> None:
    async with routers(redis_server.url, journal_mode="off") as (_, two):
        assert two.a.journal is None
        assert (await stream(two.a, ask())).text[0] == TEXT[:12]
        assert (await refused(two.b, resume(None))).code() is grpc.StatusCode.NOT_FOUND


async def test_admission_counts_what_is_resumed(redis_server: Embedded) -> None:
    async with routers(redis_server.url, max_inflight=3, max_queued=0) as (nodes, two):
        before = await part(two, ask(n=3), 2)
        nodes.nodes["decode-0"].script.gate = asyncio.Event()
        holding = asyncio.create_task(stream(two.b, ask(tenant="other")))
        while not two.b.router.inflight:
            await asyncio.sleep(0.005)
        error = await refused(two.b, resume(before))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert two.b.router.inflight == 1
        holding.cancel()
        await asyncio.gather(holding, return_exceptions=True)


def test_times_are_of_the_tokens_since_the_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    sequence = SequenceRequest("r", (1, 2), SamplingParams(max_tokens=20, seed=5))
    run = choice_module.ChoiceRun(0, "r", sequence, ByteDetokenizer(ByteTokenizer(), (1, 2), ()), 10.0)
    run.resume(ReceivedChoice(0, 10, (97,) * 10))
    for now[0] in (11.0, 12.0, 13.0):
        run.take(len(run.token_ids), [98], [], ())
    run.end(FinishReason.LENGTH)
    done = run.complete().completion
    assert done is not None
    assert (done.usage.completion_tokens, done.timing.ttft_s, done.timing.decode_tokens_per_s) == (13, 1.0, 1.0)
