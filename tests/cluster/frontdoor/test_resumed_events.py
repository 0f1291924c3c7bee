"""Streams of server-sent events that go on at another router, from every event on."""

from __future__ import annotations

import asyncio
import copy
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from cluster.frontdoor.http import HttpOptions, create_app
from cluster.routing.recall import MOST_WAIT_S
from cluster.state.journal import Journal, open_journal
from paceline.v1 import inference_pb2
from tests.fakes.redis_servers import Embedded, stopped, unreachable
from tests.support.http_app import CHATS, COMPLETIONS, refused
from tests.support.scripted_nodes import Fleet, fleet, letters
from tests.support.two_routers import JOURNAL_KEY, StallingRouter, scripted

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 24}
COMPLETION: dict[str, Any] = {"prompt": "hi", "stream": True, "max_tokens": 24}
USAGE = {"include_usage": True}
RESUME = "last-event-id"
ASKED: list[tuple[str, dict[str, Any]]] = [
    (CHATS, CHAT),
    (CHATS, CHAT | {"n": 3, "logprobs": True, "top_logprobs": 1, "stream_options": USAGE}),
    (COMPLETIONS, COMPLETION | {"n": 2, "logprobs": 1, "return_token_ids": True, "seed": 2**53 - 1}),
    (COMPLETIONS, COMPLETION | {"seed": 0, "stop": letters(0, 2, 4)[2:]}),  # which ends in the midst of a later round
    # The fourth letter is held back: in smaller rounds no event comes of it.
    (COMPLETIONS, COMPLETION | {"max_tokens": 6, "seed": 0, "return_token_ids": True, "stop": letters(0, 5, 1) + "!"}),
    (COMPLETIONS, COMPLETION | {"stop": ["qq", "ab"], "stream_options": USAGE | {"continuous_usage_stats": True}}),
]


@dataclass
class Two:
    """Two applications in front of the same nodes, which make rounds of other sizes for each."""

    nodes: Fleet
    apps: list[httpx.AsyncClient]
    journals: list[Journal] = field(default_factory=list)

    async def ask(self, which: int, path: str, body: dict[str, Any], since: str = "") -> list[tuple[str, Any]]:
        """Id and data of each event; the stream must be complete."""
        self.nodes.nodes["decode-0"].script.round_size = (3, 2)[which]
        response = await self.apps[which].post(path, json=body, headers={RESUME: since} if since else {})
        assert response.status_code == 200, response.text
        *told, last = response.text.removesuffix("\n\n").split("\n\n")
        assert last == "data: [DONE]"
        return [(told_id, json.loads(data)) for told_id, data in map(_event, told)]


def _event(text: str) -> tuple[str, str]:
    name, _, data = text.rpartition("data: ")
    return name.removeprefix("id: ").strip(), data


@pytest.fixture(scope="module")
def redis_server() -> Iterator[Embedded]:
    with Embedded() as made:
        yield made


@pytest.fixture
async def two() -> AsyncIterator[Two]:
    async with both("") as made:
        yield made


@pytest.fixture
async def two_with_journals(redis_server: Embedded) -> AsyncIterator[Two]:
    async with both(redis_server.url) as made:
        yield made


@asynccontextmanager
async def both(url: str) -> AsyncIterator[Two]:
    """url: of Redis; empty for routers without a journal."""
    async with AsyncExitStack() as stack:
        nodes = await stack.enter_async_context(fleet())
        apps, journals = [], []
        for _ in range(2):
            journal = open_journal(nodes.router.config, url, JOURNAL_KEY) if url else None
            if journal is not None:
                stack.push_async_callback(journal.close)
                journals.append(journal)
            router: StallingRouter = scripted(nodes)(journal=journal)
            stack.push_async_callback(router.close)
            transport = httpx.ASGITransport(create_app(router, router.metrics, HttpOptions(resumable=True)))
            made = httpx.AsyncClient(transport=transport, base_url="http://router")
            apps.append(await stack.enter_async_context(made))
        yield Two(nodes, apps, journals)
        await nodes.idle()


@dataclass
class Got:
    """What a client makes of events."""

    text: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[Any]] = field(default_factory=dict)
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    ends: list[tuple[int, str]] = field(default_factory=list)
    usage: list[Any] = field(default_factory=list)
    all_token_ids: list[Any] = field(default_factory=list)

    def take(self, events: list[tuple[str, Any]]) -> Got:
        for _, event in events:
            for choice in event["choices"]:
                self._take(choice["index"], choice)
            self.usage += [event["usage"]] if event.get("usage") and not event["choices"] else []
            self.all_token_ids += [event["paceline"]["token_ids"]] if "paceline" in event else []
        return self

    def _take(self, index: int, choice: dict[str, Any]) -> None:
        said = choice["delta"].get("content") if "delta" in choice else choice["text"]
        self.text[index] = self.text.get(index, "") + (said or "")
        told = choice["logprobs"] or {}
        entries = told.get("content") or list(zip(told.get("tokens", ()), told.get("text_offset", ()), strict=True))
        self.logprobs.setdefault(index, []).extend(entries)
        self.token_ids.setdefault(index, []).extend(choice.get("token_ids", ()))
        if choice["finish_reason"]:
            self.ends.append((index, choice["finish_reason"]))

    def sorted(self) -> Got:
        self.ends.sort()
        return self


@pytest.mark.parametrize(("path", "body"), ASKED)
async def test_from_every_event_on(two: Two, path: str, body: dict[str, Any]) -> None:
    """Fails where an id counts tokens whose text was not told, where the end of a choice is told again, and where an id
    of a resumed stream forgets what the client has of another choice."""
    whole = await two.ask(0, path, body)
    named = [i for i, (event_id, _) in enumerate(whole) if event_id]
    assert len(named) >= len(whole) // 2
    assert whole[-1][0].endswith("u")
    for i in named:
        rest = await two.ask(1, path, body, since=whole[i][0])
        assert Got().take(whole[: i + 1]).take(rest).sorted() == Got().take(whole).sorted(), whole[i][0]
        assert not rest or rest[-1][0] == whole[-1][0]  # and on from there
        if "n" in body and rest[:-1] and rest[0][0]:
            again = [rest[0], *await two.ask(0, path, body, since=rest[0][0])]
            assert Got().take(whole[: i + 1]).take(again).sorted() == Got().take(whole).sorted(), (whole[i][0], rest[0])


@pytest.mark.parametrize(
    ("path", "body", "share"), [(*one, 1) for one in ASKED[1:5]] + [(*one, 2) for one in ASKED[1:3]]
)
async def test_tokens_that_were_told_are_not_decoded_again(
    two_with_journals: Two, path: str, body: dict[str, Any], share: int
) -> None:
    """share: one of so many of the tokens is still in Redis. Mutants: what is recalled is not told to the surface;
    log-probabilities are not kept; a chunk is noted whatever its index is."""
    two = two_with_journals
    whole = await two.ask(0, path, {"seed": 3} | body)
    kept = await Kept.of(two, whole)
    all_of_them = [tuple(choice.token_ids) for choice in kept.message.choices]
    missing = set()
    for cut in kept.message.choices:
        del cut.token_ids[len(cut.token_ids) // share :], cut.logprobs[len(cut.logprobs) // share :]
    for event_id in [event_id for event_id, _ in whole if event_id][:-1:3]:
        await kept.write()
        asked = two.nodes.nodes["decode-0"].sequences
        asked.clear()
        rest = await two.ask(1, path, {"seed": 3} | body, since=event_id)
        begun = whole[: [name for name, _ in whole].index(event_id) + 1]
        assert Got().take(begun).take(rest).sorted() == Got().take(whole).sorted(), event_id
        told = event_id.split(".")[2].split("-")
        for one in asked:
            choice = int(one.request_id.partition("#")[2] or 0)
            had = all_of_them[choice][: int(told[choice].rstrip("c"))]
            missing.add(len(had) - len(one.output_token_ids))  # an earlier stream may have written all of them again
            assert one.output_token_ids == had[: len(one.output_token_ids)]
            assert share > 1 or not told[choice].endswith("c")
    assert max(missing) > 0 if share > 1 else missing == {0}


async def journalled(two: Two) -> tuple[list[Any], list[Any]]:
    """A long answer whose tokens the journal has, and what the decode node is asked from then on."""
    whole = await two.ask(0, COMPLETIONS, LONG)
    await Kept.of(two, whole)
    asked = two.nodes.nodes["decode-0"].sequences
    asked.clear()
    return whole, asked


AWAY = {"stopped": (stopped, 1.2), "unreachable": (unreachable, 0.6)}
LONG: dict[str, Any] = COMPLETION | {"max_tokens": 110, "seed": 3, "return_token_ids": True}


@pytest.mark.parametrize("how", AWAY)
async def test_a_redis_that_is_away_for_a_moment_is_waited_for(
    two_with_journals: Two, redis_server: Embedded, how: str
) -> None:
    """Mutants: the journal is asked once, for however long; the last try begins before Redis is back."""
    two, (away, seconds) = two_with_journals, AWAY[how]
    whole, asked = await journalled(two)
    with away(redis_server):
        resumed = asyncio.create_task(two.ask(1, COMPLETIONS, LONG, since=whole[-4][0]))
        await asyncio.sleep(seconds)
        assert not asked
    rest = await resumed
    assert Got().take(whole[:-3]).take(rest).sorted() == Got().take(whole).sorted()
    assert [len(one.output_token_ids) for one in asked] == [int(whole[-4][0].split(".")[2])]


async def test_tokens_are_made_again_where_redis_stays_away(two_with_journals: Two, redis_server: Embedded) -> None:
    """And what resumes nothing does not wait. Mutants: a resume waits until Redis is back; any request waits."""
    two = two_with_journals
    whole, asked = await journalled(two)
    with stopped(redis_server):
        resumed = asyncio.create_task(two.ask(1, COMPLETIONS, LONG, since=whole[-4][0]))
        assert await two.ask(0, COMPLETIONS, COMPLETION)
        assert not resumed.done()
        async with asyncio.timeout(2 * MOST_WAIT_S):
            rest = await resumed
    assert Got().take(whole[:-3]).take(rest).sorted() == Got().take(whole).sorted()
    assert [list(one.output_token_ids) for one in asked] == [[], []]


async def test_nodes_know_what_redis_does_not(two_with_journals: Two, redis_server: Embedded) -> None:
    """Mutants: nodes are not asked, or only after Redis was waited for."""
    two = two_with_journals
    two.nodes.nodes["decode-0"].made = {}
    whole, asked = await journalled(two)
    with stopped(redis_server):
        began = time.monotonic()
        rest = await two.ask(1, COMPLETIONS, LONG, since=whole[-4][0])
        assert time.monotonic() - began < MOST_WAIT_S / 2
    assert Got().take(whole[:-3]).take(rest).sorted() == Got().take(whole).sorted()
    assert [len(one.output_token_ids) for one in asked] == [int(whole[-4][0].split(".")[2])]


@dataclass
class Kept:
    """What Redis has of a stream that ended, under the name that the second router looks for."""

    journal: Journal
    name: str
    message: inference_pb2.GenerateResponse

    @classmethod
    async def of(cls, two: Two, whole: list[tuple[str, Any]]) -> Kept:
        return await cls.when(two, whole[-1][0])

    @classmethod
    async def when(cls, two: Two, event_id: str, num_tokens: int | None = None) -> Kept:
        """Once it has all tokens that an id tells, or so many."""
        journal, (_, digest, told) = two.journals[1], event_id.split(".")
        name = journal.seal.name("told", bytes.fromhex(digest))
        counts = [int(count.rstrip("cu")) for count in told.split("-")] if num_tokens is None else [num_tokens]
        async with asyncio.timeout(5):
            while True:
                found = inference_pb2.GenerateResponse.FromString(await journal.read(name) or b"")
                if [len(choice.token_ids) for choice in found.choices] == counts:
                    return cls(two.journals[0], name, found)
                await asyncio.sleep(0.01)

    async def write(self) -> None:
        entry = self.message.SerializeToString()
        self.journal.keep(self.name, entry)
        async with asyncio.timeout(5):
            while await self.journal.read(self.name) != entry:
                await asyncio.sleep(0.01)


async def test_what_cannot_be_resumed(two: Two) -> None:
    (first, _), *_ = [event for event in await two.ask(0, CHATS, CHAT) if event[0]]
    app = two.apps[1]
    for wrong in ("x", first + "-1", first.replace(".", "-"), f"9{first}", "1.2.3", "1." * 5000):
        app.headers[RESUME] = wrong
        status = 409 if wrong == f"9{first}" else 400
        assert await refused(app, CHATS, CHAT, status) == RESUME
    app.headers[RESUME] = first
    assert await refused(app, CHATS, CHAT | {"temperature": 0.5}, 409) == RESUME
    for other in ({"stream": False}, {"seed": 1}, {"n": 2}, {"n": 17}):
        assert await refused(app, CHATS, CHAT | other) == RESUME
    assert await refused(app, COMPLETIONS, COMPLETION | {"echo": True}) == RESUME
    seed, digest, _ = first.split(".")
    app.headers[RESUME] = f"{seed}.{digest}.25"
    assert await refused(app, CHATS, CHAT) == f"{RESUME}.choices"


async def test_streams_that_have_no_ids(two: Two) -> None:
    for more in ({"n": 17}, {"echo": True}, {"prompt": ["a", "b"]}):
        assert not any(event_id for event_id, _ in await two.ask(0, COMPLETIONS, COMPLETION | more))


MESSAGES, MESSAGE = "/v1/messages", {"messages": CHAT["messages"], "model": "tiny", "max_tokens": 24, "stream": True}


def of_message(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Id and data of each event."""
    fields = [dict(line.split(": ", 1) for line in event.split("\n")) for event in text.strip().split("\n\n")]
    return [(event.get("id", ""), json.loads(event["data"])) for event in fields]


def put_together(events: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    """What a client makes of events: deltas that follow each other are one."""
    made: list[Any] = []
    for _, event in events:
        kind, piece = event["type"], event.get("delta", {}).get("text")
        if piece is not None and made and made[-1][0] == kind:
            made[-1] = (kind, made[-1][1] + piece)
        else:
            made.append((kind, piece or event.get("delta")))
    return made


async def test_messages_go_on_from_every_event(two_with_journals: Two) -> None:
    """Mutants: what the client has is told again; text that comes with the end has no id, or that of a choice which is
    not complete; tokens are not kept."""
    two = two_with_journals
    said = (await two.apps[0].post(MESSAGES, json=MESSAGE | {"seed": 3, "stream": False})).json()["content"][0]["text"]
    held_back = {"seed": 3, "stop_sequences": [said[-1] + "!"]}  # its last letter, until the end
    for asked in (MESSAGE, MESSAGE | held_back):
        first = await two.apps[0].post(MESSAGES, json=asked)
        whole = of_message(first.text)
        assert [event["type"] for _, event in whole][-2:] == ["message_delta", "message_stop"], first.text
        named = [i for i, (event_id, _) in enumerate(whole) if event_id]
        assert len(named) > 3
        assert all(event_id for event_id, event in whole if "text" in event.get("delta", {}))
        await Kept.when(two, whole[named[0]][0], 24)
        for i in named:
            two.nodes.nodes["decode-0"].sequences.clear()
            rest = await two.apps[1].post(MESSAGES, json=asked, headers={RESUME: whole[i][0]})
            assert put_together([*whole[: i + 1], *of_message(rest.text)]) == put_together(whole)
            asked_of_nodes, told = two.nodes.nodes["decode-0"].sequences, int(whole[i][0].split(".")[2].rstrip("c"))
            assert all(0 < len(sequence.output_token_ids) <= told for sequence in asked_of_nodes)
    wrong = await two.apps[1].post(MESSAGES, json=MESSAGE | {"temperature": 0.5}, headers={RESUME: whole[named[0]][0]})
    assert (wrong.status_code, wrong.json()["type"]) == (409, "error")


RESPONSES, RESPONSE = "/v1/responses", {"input": "hi", "stream": True, "max_output_tokens": 24, "cache_salt": "t"}


def of_response(events: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """What the official client makes of events: the answer, put together from its parts, which the end tells again."""
    events, made = copy.deepcopy(events), dict[str, Any]()
    for _, event in events:
        if event["type"] == "response.created":
            made = event["response"]
        elif event["type"] == "response.output_item.added":
            made["output"].append(event["item"])
        elif event["type"] == "response.content_part.added":
            made["output"][event["output_index"]]["content"].append(event["part"])
        elif event["type"] == "response.output_text.delta":
            made["output"][event["output_index"]]["content"][event["content_index"]]["text"] += event["delta"]
            assert made["output"][event["output_index"]]["id"] == event["item_id"]
    end = events[-1][1]["response"]
    for item, told in zip(made["output"], end["output"], strict=True):
        assert item | {"status": told["status"]} == told
    assert (made["id"], made["created_at"]) == (end["id"], end["created_at"])
    return {**end, "completed_at": None, "paceline": end["paceline"]["seed"]}


async def test_responses_go_on_from_every_event(two_with_journals: Two) -> None:
    """Mutants: an id that is drawn anew, of the answer or of an item; a time that is the second router's; numbers that
    begin again, or count what is told again; the first event twice; an id made up names the answer."""
    two = two_with_journals
    two.nodes.nodes["decode-0"].script.round_size = 3
    whole = of_message((await two.apps[0].post(RESPONSES, json=RESPONSE)).text)
    assert whole[-1][1]["type"] == "response.incomplete"
    named = [i for i, (event_id, _) in enumerate(whole) if event_id]
    assert len(named) >= 8
    kept = of_response(whole)
    await Kept.when(two, whole[named[0]][0].rsplit(".", 3)[0], 24)
    two.nodes.nodes["decode-0"].script.round_size = 2
    for i in named:
        rest = of_message((await two.apps[1].post(RESPONSES, json=RESPONSE, headers={RESUME: whole[i][0]})).text)
        assert of_response(whole[: i + 1] + rest) == kept
        numbers = [event["sequence_number"] for _, event in whole[: i + 1] + rest]
        assert numbers == list(range(len(numbers)))
        if rest[0][0]:  # and on from there
            again = await two.apps[0].post(RESPONSES, json=RESPONSE, headers={RESUME: rest[0][0]})
            assert of_response([*whole[: i + 1], rest[0], *of_message(again.text)]) == kept
    found = await two.apps[1].get(f"{RESPONSES}/{kept['id']}", params={"cache_salt": "t"})
    assert found.json()["output"] == kept["output"]
    position, nonce, created, number = whole[named[2]][0].rsplit(".", 3)
    for made_up in (f"{'0' * 32}.{created}.{number}", f"{nonce}.{int(created) - 9}.{number}"):
        told = await two.apps[1].post(RESPONSES, json=RESPONSE, headers={RESUME: f"{position}.{made_up}"})
        made = of_message(told.text)[-1][1]["response"]
        assert (made["id"] == kept["id"], made["created_at"]) == (False, int(made_up.split(".")[1]))
    for body, since, status in (
        (RESPONSE | {"temperature": 0.5}, whole[named[0]][0], 409),
        (RESPONSE | {"stream": False}, whole[named[0]][0], 400),
        (RESPONSE, f"{position}.{nonce}.{created}.{'9' * 10}", 400),
        (RESPONSE, position, 400),
    ):
        two.apps[1].headers[RESUME] = since
        assert await refused(two.apps[1], RESPONSES, body, status) == RESUME
