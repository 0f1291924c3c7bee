"""A model that has several names: each of them may be asked for, and answers have the first."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from cluster.frontdoor.service import serve_grpc
from paceline.client import AsyncClient
from paceline.errors import InvalidRequest, PermissionDenied
from tests.support.api_keys import caller
from tests.support.tiny_http import CONTEXT, MODEL, served

NAMES = ("first", "owner/second")


async def test_names_over_http(tmp_path: Path) -> None:
    """Mutants: the first name alone is known, the model's own name too, or answers have the name that was asked for."""
    asked = {"prompt": "hi", "max_tokens": 1}
    async with (
        served(tmp_path, "none", names=", ".join(NAMES)) as made,
        httpx.AsyncClient(base_url=f"{made.url}/v1") as client,
    ):
        listed = (await client.get("/models")).json()["data"]
        assert [(one["id"], one["root"], one["max_model_len"]) for one in listed] == [
            (name, NAMES[0], CONTEXT) for name in NAMES
        ]
        for name, status in ((NAMES[0], 200), (NAMES[1], 200), (MODEL, 404)):
            assert (await client.get(f"/models/{name}")).status_code == status
            chat = {"model": name, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
            for path, body in (
                ("/completions", {"model": name, **asked}),
                ("/chat/completions", chat),
                ("/messages", chat),
                ("/responses", {"model": name, "input": "hi", "max_output_tokens": 1}),
            ):
                answer = await client.post(path, json=body)
                assert (answer.status_code, answer.json().get("model")) == (status, NAMES[0] if status == 200 else None)


async def test_names_over_grpc(tmp_path: Path) -> None:
    async with served(tmp_path, "none", names=",".join(NAMES)) as made:
        server = await serve_grpc(made.router, "127.0.0.1:0")
        async with AsyncClient(f"127.0.0.1:{server.port}") as client:
            info = await client.model_info()
            assert (info.model, info.aliases, info.names) == (NAMES[0], NAMES[1:], NAMES)
            for name in NAMES:
                assert (await client.generate("hi", model=name, max_tokens=1)).model == NAMES[0]
            with pytest.raises(InvalidRequest, match="'tiny' is not served here, 'first' is"):
                await client.generate("hi", model=MODEL, max_tokens=1)
        await server.stop(1.0)


def test_a_key_is_for_the_model_by_any_of_its_names() -> None:
    """Mutant: only the first name counts."""
    caller("acme", models=["owner/second"]).check_model(NAMES)
    with pytest.raises(PermissionDenied, match="'first'"):
        caller("acme", models=[MODEL]).check_model(NAMES)
