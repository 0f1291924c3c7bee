"""What a request says its answer will be: over HTTP and by the SDK it reaches the nodes as the same tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from paceline.client import AsyncClient
from paceline.errors import InvalidRequest
from tests.support.http_app import CHAT, CHATS, COMPLETION, COMPLETIONS, events, refused, surfaces
from tests.support.scripted_nodes import MAX_MODEL_LEN, Fleet, fleet

PREDICTED = "def one(): é"
PARTS = [{"type": "text", "text": PREDICTED[:5]}, {"type": "text", "text": PREDICTED[5:]}]


@asynccontextmanager
async def served() -> AsyncIterator[tuple[Fleet, httpx.AsyncClient, AsyncClient]]:
    async with fleet() as made, surfaces(made) as (client, sdk):
        yield made, client, sdk


def asked_of(made: Fleet) -> set[tuple[int, ...]]:
    """The predictions that decode nodes were told."""
    return {s.speculation.prediction_token_ids for node in made.nodes.values() for s in node.sequences}


async def test_nodes_get_its_tokens_and_the_usage_counts_them() -> None:
    """Mutants: a part is left out; drafts of the deployment's drafter are counted too; a stream counts none."""
    async with served() as (made, client, sdk):
        for path, body in ((CHATS, CHAT), (COMPLETIONS, COMPLETION)):
            for content in (PREDICTED, PARTS):
                asked = {**body, "seed": 3, "max_tokens": 8, "prediction": {"type": "content", "content": content}}
                usage = (await client.post(path, json=asked)).json()["usage"]
                # The scripted nodes draft four and accept two in each of their rounds of three, and none of the last.
                told = usage["completion_tokens_details"]
                assert (told["accepted_prediction_tokens"], told["rejected_prediction_tokens"]) == (4, 8)
                more = {"stream": True, "stream_options": {"include_usage": True}}
                streamed = events(await client.post(path, json=asked | more))
                assert streamed[-1]["usage"]["completion_tokens_details"] == told
        done = await sdk.generate("hi", seed=3, max_tokens=8, prediction=PREDICTED)
        counts = done.completion.speculation
        assert (counts.predicted_tokens, counts.accepted_predicted_tokens) == (12, 4)
        assert asked_of(made) == {tuple(PREDICTED.encode())}
        without = await sdk.generate("hi", seed=3, max_tokens=8)
        assert (without.text, without.completion.speculation.predicted_tokens) == (done.text, 0)


async def test_what_is_refused() -> None:
    too_long = "x" * (MAX_MODEL_LEN + 1)
    async with served() as (_, client, sdk):
        wrong: list[tuple[Any, str]] = [
            ("text", "prediction"),
            ({"type": "content"}, "prediction.content"),
            ({"type": "text", "content": "x"}, "prediction.type"),
            ({"type": "content", "content": [{"type": "image_url"}]}, "prediction.content[0].type"),
            ({"type": "content", "content": too_long}, "prediction"),
        ]
        for value, field in wrong:
            assert await refused(client, CHATS, {**CHAT, "prediction": value}) == field
        with pytest.raises(InvalidRequest, match="prediction: has 129 tokens, at most 128 fit"):
            await sdk.generate("hi", prediction=too_long)
        assert (await client.post(CHATS, json={**CHAT, "max_tokens": 1, "prediction": None})).status_code == 200
