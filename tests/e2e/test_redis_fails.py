"""A whole deployment on a Redis of the operator's: who else may use it, and what its failures cost."""

from __future__ import annotations

import os
import re
import signal
import time
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import redis

from cluster.state.node_lease import LeaseKeeper
from cluster.state.registry_types import NodeRecord, namespace_of
from tests.fakes.redis_servers import Embedded
from tests.multihost.small_model import write_model
from tests.support.server import Server, serve
from tests.support.tiny_chat import CHAT_VOCAB
from tests.support.tiny_model import tiny_spec

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

NAME = "blue"
NO_ROOM_S = 7.0  # above lease, doubt and grace together, in which all nodes used to be killed
BACK_S = 15.0
BODY = {"prompt": "In a paceline the front rider", "seed": 20, "max_tokens": 24, "ignore_eos": True}


def tokens(server: Server) -> list[int]:
    reply = httpx.post(f"http://{server.http}/v1/completions", json=BODY, timeout=BACK_S)
    assert reply.status_code == 200, reply.text
    found: list[int] = reply.json()["paceline"]["token_ids"][0]
    return found


def test_another_deployment_and_a_redis_without_room_and_without_life(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    write_model(folder, replace(tiny_spec(CHAT_VOCAB), max_position_embeddings=512))
    registry = Embedded()
    options = ["--model", str(folder), "--redis", registry.url, "--deployment", NAME, "--drafter", "ngram"]
    foreign = NodeRecord("decode-0", "decode", 2**40, "127.0.0.1:1", model="other", fingerprint_digest="other")
    green = LeaseKeeper(registry.url, foreign, 2.0, lambda: True, dict, namespace_of("green"))
    odd = LeaseKeeper(registry.url, replace(foreign, id="decode-7"), 2.0, lambda: True, dict, namespace_of(NAME))
    try:
        with serve(*options, "--prefill-nodes", "0", "--no-standby", "--kv-cache-tokens", "1024") as server:
            before = tokens(server)
            green.start()
            odd.start()
            with redis.Redis.from_url(registry.url) as client:
                client.config_set("maxmemory", "1")
                end = time.monotonic() + NO_ROOM_S
                while time.monotonic() < end:
                    assert tokens(server) == before
                    time.sleep(0.2)
                client.config_set("maxmemory", "64mb")
            log = server.log.read_text()
            assert log.count("kept: it has no lease in Redis, but answers") == 1
            assert "lease_lost" not in log
            assert log.count("decode-7 generation 1099511627776 at 127.0.0.1:1 serves 'other'") == 1
            registry.kill()
            registry.start_again()
            decode = re.search(r"decode-0 is process (\d+)", log)
            assert decode is not None
            os.kill(int(decode[1]), signal.SIGKILL)
            end = time.monotonic() + BACK_S
            assert tokens(server) == before
            assert time.monotonic() < end
            assert "decode-0 generation 2 started" in server.log.read_text()
    finally:
        green.close()
        odd.close()
        registry.close()
