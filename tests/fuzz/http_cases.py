"""Requests of the HTTP surface that are wrong in every way, made from its OpenAPI document and from nothing at all."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.request import MAX_N
from tests.fuzz.proto_mutations import BAD_UTF8, delete, flip, insert, noise, truncate
from tests.fuzz.schema_values import allowed, inlined, wrong

GENERATIONS = {"/v1/completions": "CompletionRequest", "/v1/chat/completions": "ChatRequest"}
OTHERS = ("/v1/models", "/v1/models/tiny", "/health", "/ping", "/version", "/tokenize", "/detokenize", "/metrics")
PATHS = (*GENERATIONS, *OTHERS, "/openapi.json")
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD", "TRACE", "CONNECT", "FOO", "get")
MOST_TOKENS = 6


@dataclass(frozen=True)
class HttpCase:
    """Bytes for one connection."""

    how: str
    parts: tuple[bytes, ...]  # written one after another
    requests: int = 1  # whole ones among them, each of which is answered; 0: perhaps there are some
    hang_up: bool = False
    path: str = ""  # of a single request with a JSON body
    body: bytes | None = None  # that body: the schema says what its answer may be

    def __str__(self) -> str:
        return f"({self.how}) {b''.join(self.parts)[:3000]!r}"


def request(method: str, path: str, body: bytes = b"", *headers: tuple[str, str], close: bool = True) -> bytes:
    """A request as bytes."""
    lines = [f"{method} {path} HTTP/1.1", "host: fuzz"]
    if body or method == "POST":
        lines.append(f"content-length: {len(body)}")
    lines += [f"{name}: {value}" for name, value in headers]
    lines += ["connection: close"] if close else []
    return "\r\n".join([*lines, "", ""]).encode("utf-8", "surrogateescape") + body


def bounded(body: Any) -> Any:
    """The same, but that a valid one asks for few tokens."""
    if isinstance(body, dict):
        for name in ("max_tokens", "max_completion_tokens"):
            if type(body.get(name)) is int and body[name] > MOST_TOKENS:
                body[name] = 1 + body[name] % MOST_TOKENS
        if body.get("max_tokens") is None and body.get("max_completion_tokens") is None:
            body["max_tokens"] = MOST_TOKENS
        if type(body.get("n")) is int and body["n"] > 3 and body["n"] <= MAX_N:
            body["n"] = 1 + body["n"] % 3
    return body


class Cases:
    """Makes cases from the document of a running deployment."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        components = document["components"]
        self.schemas = {name: inlined(components["schemas"][name], components) for name in GENERATIONS.values()}
        self._makers: list[tuple[int, Callable[[random.Random], HttpCase]]] = [
            (20, self.allowed_body),
            (30, self.wrong_body),
            (20, self.mutated_text),
            (4, self.odd_json),
            (8, self.odd_headers),
            (6, self.other_requests),
            (5, self.cut_short),
            (7, self.garbage),
        ]

    def __call__(self, rng: random.Random) -> HttpCase:
        """One case."""
        make = rng.choices([maker for _, maker in self._makers], [weight for weight, _ in self._makers])[0]
        return make(rng)

    def _post(self, how: str, path: str, body: bytes, *headers: tuple[str, str]) -> HttpCase:
        headers = headers or (("content-type", "application/json"),)
        return HttpCase(how, (request("POST", path, body, *headers),), path=path, body=body)

    def _draw(self, rng: random.Random, make: Callable[[random.Random, Any], Any]) -> tuple[str, Any]:
        path = rng.choice(list(GENERATIONS))
        return path, bounded(make(rng, self.schemas[GENERATIONS[path]]))

    def allowed_body(self, rng: random.Random) -> HttpCase:
        path, body = self._draw(rng, allowed)
        return self._post("allowed by the schema", path, _dumps(rng, body))

    def wrong_body(self, rng: random.Random) -> HttpCase:
        path, body = self._draw(rng, wrong)
        return self._post("wrong by the schema", path, _dumps(rng, body))

    def mutated_text(self, rng: random.Random) -> HttpCase:
        """JSON whose bytes were changed."""
        path, body = self._draw(rng, allowed)
        name, change = rng.choice(list(_TEXTS.items()))
        return self._post(name, path, change(rng, _dumps(rng, body)))

    def odd_json(self, rng: random.Random) -> HttpCase:
        """JSON that is deep, long or repeated."""
        path, body = self._draw(rng, allowed)
        text = _dumps(rng, body)
        name, make = rng.choice(list(_ODD.items()))
        return self._post(name, path, make(rng, text))

    def odd_headers(self, rng: random.Random) -> HttpCase:
        path, body = self._draw(rng, allowed)
        data = _dumps(rng, body)
        name, value = rng.choice(_HEADERS)
        if name == "content-type":
            return HttpCase(f"{name}: {value}", (request("POST", path, data, (name, value)),))
        # Some of these make the request another one, or none: nothing is expected but a proper answer, or the end.
        whole = request("POST", path, data, ("content-type", "application/json"), (name, value))
        return HttpCase(f"{name}: {value[:40]}", (whole,), requests=0, hang_up=True)

    def other_requests(self, rng: random.Random) -> HttpCase:
        """Methods, paths and queries."""
        method, path = rng.choice(METHODS), rng.choice(PATHS)
        match rng.randrange(4):
            case 0:
                path = "/" + "".join(rng.choice("ab/.%~?&=#;:@\\é") for _ in range(rng.randint(0, 40)))
            case 1:
                path += rng.choice(("/", "//", "/..", "%00", "%ff%fe", "%2e%2e/%2e%2e", "?a=%ff&a=b", "?" + "q" * 9000))
            case 2:
                path = rng.choice(
                    ("*", "http://other/health", "health", "/v1/models/" + "m%2f" * 500, "/" + "x" * 70_000)
                )
        body = b"{}" if rng.random() < 0.3 else b""
        return HttpCase(f"{method} {path[:40]}", (request(method, path, body),), requests=0, hang_up=True)

    def cut_short(self, rng: random.Random) -> HttpCase:
        """A request whose end never comes."""
        path, body = self._draw(rng, allowed)
        whole = request("POST", path, _dumps(rng, body), ("content-type", "application/json"))
        at = rng.randrange(len(whole))
        return HttpCase("cut short", (whole[:at],), requests=0, hang_up=True)

    def garbage(self, rng: random.Random) -> HttpCase:
        """Bytes that are no request, alone or after one."""
        path, body = self._draw(rng, allowed)
        good = request("POST", path, _dumps(rng, body), ("content-type", "application/json"), close=False)
        bad = rng.choice((noise(rng, b""), flip(rng, good[:60]), *_FRAMES))
        match rng.randrange(4):
            case 0:
                return HttpCase("garbage", (bad,), requests=0, hang_up=True)
            case 1:
                return HttpCase("garbage after a request", (good + bad,), requests=0, hang_up=True)
            case 2:
                return HttpCase("garbage while it is answered", (good, bad), requests=0, hang_up=True)
        three = good + request("GET", "/health", close=False) + request("GET", "/v1/models")
        return HttpCase("three at once", (three,), requests=3)


def _dumps(rng: random.Random, body: Any) -> bytes:
    """As clients write it: in ASCII or not; a lone surrogate only the former way."""
    if rng.random() < 0.5:
        try:
            return json.dumps(body, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            pass
    return json.dumps(body).encode()


def _replace(rng: random.Random, data: bytes) -> bytes:
    """A value replaced by one that is almost JSON."""
    at = data.rfind(b":") + 1
    return data[:at] + rng.choice(_ALMOST) + b"}"


_ALMOST = (
    *(
        b"NaN",
        b"Infinity",
        b"-Infinity",
        b"1e999",
        b"-1e999",
        b"0x10",
        b"01",
        b"1.",
        b".5",
        b"+1",
        b"--1",
        b"1e",
        b"9" * 5000,
    ),
    *(
        b"True",
        b"None",
        b"undefined",
        b"'a'",
        b'"\\x"',
        b'"\\u12"',
        b'"\t"',
        b'"',
        b"[1,]",
        b"{,}",
        b"[",
        b"}",
        b"",
        b"\0",
    ),
)
_TEXTS: dict[str, Callable[[random.Random, bytes], bytes]] = {
    "flip": flip,
    "insert": insert,
    "delete": delete,
    "truncate": truncate,
    "almost JSON": _replace,
    "bad UTF-8": lambda rng, data: data.replace(b'"', b'"' + rng.choice(BAD_UTF8), 1 + rng.randrange(3)),
    "repeated": lambda rng, data: data + rng.choice((data, b"{}", b" x", b"\0")),
    "other encoding": lambda rng, data: data.decode("utf-8", "replace").encode(
        rng.choice(("utf-16", "utf-32", "utf-8-sig", "cp037")), "replace"
    ),
    "repeated key": lambda rng, data: data[:-1] + b"," + data[1:],
}


def _deep(rng: random.Random, opening: bytes, closing: bytes) -> bytes:
    depth = rng.choice((50, 990, 100_000))
    return opening * depth + b"1" + closing * depth


_ODD: dict[str, Callable[[random.Random, bytes], bytes]] = {
    "deep lists": lambda rng, data: (
        b'{"prompt":' + b"[" * (depth := rng.choice((50, 990, 100_000))) + b"]" * depth + b"}"
    ),
    "deep objects": lambda rng, data: b'{"user":' * (depth := rng.choice((90, 990, 50_000))) + b"1" + b"}" * depth,
    "many lists": lambda rng, data: b'{"metadata":[' + b"[]," * rng.choice((1000, 200_000)) + b"[]]}",
    "many keys": lambda rng, data: json.dumps({f"k{i}": i for i in range(rng.choice((100, 20_000)))}).encode(),
    "one key, many times": lambda rng, data: b"{" + b'"prompt":"a",' * 5000 + b'"max_tokens":2}',
    "long text": lambda rng, data: json.dumps({"prompt": rng.choice(("a", "a b", "é")) * 60_000}).encode(),
    "many ids": lambda rng, data: json.dumps({"prompt": [rng.choice((1, -1, 2**31))] * 50_000}).encode(),
    "many messages": lambda rng, data: json.dumps({"messages": [{"role": "user", "content": ""}] * 9000}).encode(),
    "too large": lambda rng, data: b" " * (9 << 20),
    "spaces": lambda rng, data: b" \n\t" * 1000 + data + b"\r\n" * 1000,
    "nothing": lambda rng, data: b"",
    "no object": lambda rng, data: rng.choice((b"[]", b"1", b'"x"', b"null", b"true", b"[" + data + b"]")),
}
_HEADERS = (
    *(
        ("content-type", kind)
        for kind in ("text/plain", "application/xml", "", "x" * 3000, "application/json; charset=utf-16")
    ),
    *(("content-type", kind) for kind in ("multipart/form-data; boundary=x", "APPLICATION/JSON", "\udcff\udcfe")),
    *(("content-length", length) for length in ("5", "-1", "99999999999999999999999", "1_0", "\udcb2", "0x10", "")),
    *(("transfer-encoding", coding) for coding in ("chunked", "gzip", "chunked, chunked", "identity", "")),
    *(("expect", what) for what in ("100-continue", "nonsense")),
    *(("connection", what) for what in ("upgrade", "keep-alive, close", "\udcff")),
    *(("upgrade", what) for what in ("websocket", "h2c", "x")),
    ("x-long", "x" * 15_000),
    ("x-longer", "x" * 200_000),
    ("accept", "nothing/at-all"),
    ("accept-encoding", "gzip;q=nan"),
    ("content-encoding", "gzip"),
    ("authorization", "Bearer \udcff" + "x" * 500),
    ("host", "other"),
    ("x-forwarded-for", "' OR 1=1 --"),
    ("x-nul", "a\0b"),
    ("x-fold", "a\r\n b"),
    ("x-split", "a\r\nx-injected: b"),
    ("bad name", "x"),
    ("", "x"),
    ("x-request-id", "\r"),
    ("cookie", "a=b; " * 500),
)
_FRAMES = (
    b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03",  # TLS
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0",
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nffffffffffffffff\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\ncontent-length: 3\r\n\r\n0\r\n\r\n",
    b"GET /health HTTP/9.9\r\nhost: x\r\n\r\n",
    b"GET /health HTTP/1.0\r\n\r\n",
    b"GET /health\r\n\r\n",
    b"\r\n\r\n\r\nGET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
    b"GET /health HTTP/1.1\r\n\r\n",
    b"GET /health HTTP/1.1\nhost: x\nconnection: close\n\n",
)
