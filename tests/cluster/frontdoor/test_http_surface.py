"""What holds for every path: request ids, slashes, HEAD, other origins; and the small endpoints."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx
import pytest

from cluster.frontdoor.http import HttpOptions, create_app
from cluster.frontdoor.http_server import serve_http
from cluster.routing.metrics import Metrics
from tests.support.fake_router import MODEL, FakeRouter
from tests.support.http_app import CHATS, COMPLETION, COMPLETIONS, refused

PAGE = "https://chat.example.org"
PREFLIGHT = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-os",
}


# -- request ids -------------------------------------------------------------------------------------------------

ANSWERS = [
    ("GET", "/health", 200),
    ("GET", "/nowhere", 404),
    ("GET", COMPLETIONS, 405),
    ("GET", "/v1/models/none", 404),
    ("POST", CHATS, 400),
    ("GET", "/metrics", 200),
]


@pytest.mark.parametrize(("method", "path", "status"), ANSWERS)
async def test_every_answer_has_the_clients_id(client: httpx.AsyncClient, method: str, path: str, status: int) -> None:
    response = await client.request(method, path, headers={"x-request-id": "Root=1-6789-abc"})
    assert (response.status_code, response.headers["x-request-id"]) == (status, "Root=1-6789-abc")
    made = [(await client.request(method, path)).headers["x-request-id"] for _ in range(2)]
    assert len(set(made)) == 2
    assert all(made)


async def test_the_clients_id_is_that_of_the_request(client: httpx.AsyncClient, router: FakeRouter) -> None:
    for stream in (False, True):
        body = {**COMPLETION, "stream": stream}
        response = await client.post(COMPLETIONS, json=body, headers={"x-request-id": "my-1"})
        assert response.headers.get_list("x-request-id") == ["my-1"]
        assert '"id":"my-1"' in response.text
    assert [asked.request_id for asked in router.asked] == ["my-1", "my-1"]


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "a#1", "é", "a\tb", "<script>"])
async def test_an_id_that_is_none(client: httpx.AsyncClient, given: str) -> None:
    response = await client.post(COMPLETIONS, json=COMPLETION, headers={b"x-request-id": given.encode()})
    assert response.headers["x-request-id"] == response.json()["id"]
    assert response.json()["id"].startswith("cmpl-")


async def test_an_unforeseen_failure_has_an_id_too(router: FakeRouter) -> None:
    router.ready = lambda: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    transport = httpx.ASGITransport(create_app(router, Metrics()), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://paceline") as client:
        response = await client.get("/ping", headers={"x-request-id": "mine"})
    assert (response.status_code, response.headers["x-request-id"]) == (500, "mine")
    assert response.json()["error"]["code"] == "internal_error"


# -- paths and methods -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/health", "/v1/models", f"/v1/models/{MODEL}", "/ping", "/version", "/openapi.json"])
async def test_a_slash_at_the_end(client: httpx.AsyncClient, path: str) -> None:
    plain, slashed = await client.get(path), await client.get(f"{path}/")
    assert (slashed.status_code, slashed.content) == (200, plain.content)


async def test_a_slash_at_the_end_of_what_is_posted_to(client: httpx.AsyncClient) -> None:
    assert (await client.post(f"{COMPLETIONS}/", json=COMPLETION)).json()["choices"][0]["text"] == "Hello you"


@pytest.fixture
async def address(router: FakeRouter) -> AsyncIterator[str]:
    server = await serve_http(create_app(router, Metrics()), "127.0.0.1", 0)
    yield f"http://127.0.0.1:{server.port}"
    await server.stop()


async def test_head_is_get_without_a_body(address: str, router: FakeRouter) -> None:
    """On a socket, where a body too many would be the beginning of the next answer."""
    async with httpx.AsyncClient(base_url=address) as client:
        for path in ("/health", "/v1/models", "/v1/models/", "/ping"):
            head, get = await client.head(path), await client.get(path)
            assert (head.status_code, head.content) == (200, b"")
            assert head.headers.get("content-length") == get.headers.get("content-length")
        router.alive = False
        assert (await client.head("/health")).status_code == 503
        assert (await client.head("/nowhere")).status_code == 404
        assert (await client.head(COMPLETIONS)).status_code == 405


async def test_a_refused_method_is_told_all_that_the_path_takes(address: str) -> None:
    """Mutant: those of the path's first route alone."""
    async with httpx.AsyncClient(base_url=address) as client:
        told = [(await client.put(path)).headers["allow"] for path in ("/ping", COMPLETIONS, "/v1/responses/x")]
    assert told == ["GET, POST", "POST", "DELETE, GET"]


# -- other origins -----------------------------------------------------------------------------------------------


async def ask_as_page(router: FakeRouter, origins: tuple[str, ...], method: str, **more: Any) -> httpx.Response:
    """A request as a browser sends it for a page of PAGE."""
    app = create_app(router, Metrics(), HttpOptions(origins))
    headers: Mapping[str, str] = {"origin": PAGE, **more.pop("headers", {})}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://paceline") as client:
        return await client.request(method, CHATS if method == "OPTIONS" else COMPLETIONS, headers=headers, **more)


@pytest.mark.parametrize("origins", [(PAGE,), ("https://other.example.org", PAGE), ("*",)])
async def test_a_page_that_is_let_in(router: FakeRouter, origins: tuple[str, ...]) -> None:
    allowed = "*" if origins == ("*",) else PAGE
    preflight = await ask_as_page(router, origins, "OPTIONS", headers=PREFLIGHT)
    assert (preflight.status_code, preflight.headers["access-control-allow-origin"]) == (200, allowed)
    assert "POST" in preflight.headers["access-control-allow-methods"]
    assert "x-stainless-os" in preflight.headers["access-control-allow-headers"]
    assert preflight.headers["x-request-id"]
    answer = await ask_as_page(router, origins, "POST", json={**COMPLETION, "user": "u"})
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, allowed)
    exposed = answer.headers["access-control-expose-headers"]
    assert all(name in exposed for name in ("x-request-id", "x-paceline-ignored", "retry-after"))
    error = await ask_as_page(router, origins, "POST", json={})
    assert (error.status_code, error.headers["access-control-allow-origin"]) == (400, allowed)
    assert "access-control-allow-credentials" not in answer.headers


async def test_a_page_that_is_not_let_in(router: FakeRouter) -> None:
    preflight = await ask_as_page(router, ("https://other.example.org",), "OPTIONS", headers=PREFLIGHT)
    assert preflight.status_code == 400
    assert "access-control-allow-origin" not in preflight.headers
    assert preflight.json()["error"]["code"] == "cors"
    answer = await ask_as_page(router, ("https://other.example.org",), "POST", json=COMPLETION)
    assert "access-control-allow-origin" not in answer.headers


async def test_no_page_is_let_in_unless_it_is_said(router: FakeRouter) -> None:
    preflight = await ask_as_page(router, (), "OPTIONS", headers=PREFLIGHT)
    assert preflight.status_code == 405
    assert preflight.json()["error"]["type"] == "invalid_request_error"
    assert not [name for name in preflight.headers if name.startswith("access-control")]


# -- small endpoints ---------------------------------------------------------------------------------------------


async def test_ping_and_version(client: httpx.AsyncClient, router: FakeRouter) -> None:
    for method in ("GET", "POST"):
        assert (await client.request(method, "/ping")).status_code == 200
    assert (await client.get("/version")).json().keys() == {"version"}
    router.alive = False
    router.ready = lambda: False  # type: ignore[method-assign]
    for method in ("GET", "POST"):
        assert (await client.request(method, "/ping")).status_code == 503


async def test_tokenize_a_text_and_back(client: httpx.AsyncClient) -> None:
    made = (await client.post("/tokenize", json={"model": MODEL, "prompt": "hé", "return_token_strs": True})).json()
    assert made == {
        "count": 4,
        "max_model_len": 512,
        "tokens": [0, *"hé".encode()],
        "token_strs": ["<s>", "h", "\ufffd", "\ufffd"],
    }
    plain = (await client.post("/tokenize", json={"prompt": "hé", "add_special_tokens": False})).json()
    assert (plain["tokens"], plain["token_strs"]) == (list("hé".encode()), None)
    back = await client.post("/detokenize", json={"tokens": made["tokens"]})
    assert back.json() == {"prompt": "<s>hé"}
    assert (await client.post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}


async def test_tokenize_a_chat(client: httpx.AsyncClient) -> None:
    messages = [{"role": "user", "content": "hi"}]
    for more, text in (({}, "user: hi\nassistant: "), ({"add_generation_prompt": False}, "user: hi\n")):
        made = (await client.post("/tokenize", json={"messages": messages, **more})).json()
        assert bytes(made["tokens"][1:]).decode() == text


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "messages"),
    ("/tokenize", {"prompt": ["a"]}, "prompt"),
    ("/tokenize", {"prompt": ""}, "prompt"),
    ("/tokenize", {"messages": []}, "messages"),
    ("/tokenize", {"messages": [{"role": "user", "content": "a"}], "add_special_tokens": True}, "add_special_tokens"),
    ("/tokenize", {"prompt": "a", "chat_template": "x"}, "chat_template"),
    ("/tokenize", {"prompt": "a", "nonsense": 1}, "nonsense"),
    ("/detokenize", {}, "tokens"),
    ("/detokenize", {"tokens": "a"}, "tokens"),
    ("/detokenize", {"tokens": [1, -1]}, "tokens[1]"),
    ("/detokenize", {"tokens": [1, 256]}, "tokens[1]"),
]


@pytest.mark.parametrize(("path", "body", "param"), WRONG)
async def test_wrong_bodies_of_the_small_endpoints(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], param: str
) -> None:
    assert await refused(client, path, body) == param


async def test_another_model_of_the_small_endpoints(client: httpx.AsyncClient) -> None:
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
        assert (await client.post(path, json={**body, "model": "gpt"})).status_code == 404
