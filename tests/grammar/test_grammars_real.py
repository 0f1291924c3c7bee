"""Grammars with the real model and its vocabulary of 49,152: in one process, and served through the death of a node."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from pathlib import Path

import grpc.aio
import psutil
import pytest

from paceline.assembly.build import build_runner
from paceline.client import AsyncClient
from paceline.config import NodeConfig
from paceline.engine.model_runner import ModelRunner
from paceline.grammar.compile import GrammarCompiler
from paceline.request import FinishReason, Grammar, GrammarKind, SamplingParams, SequenceRequest, SpeculationParams
from paceline.text.tokenizer import Tokenizer
from paceline.v1 import inference_pb2, inference_pb2_grpc
from paceline.wire import sampling_to_proto
from tests.support.grammar_engines import answers
from tests.support.needs import needs_kernels
from tests.support.real_engines import Engines
from tests.support.server import Server, serve

jsonschema = pytest.importorskip("jsonschema")
pytestmark = [needs_kernels, pytest.mark.real_model, pytest.mark.timeout(400)]

PERSON = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 12},
        "favourite_colour": {"enum": ["red", "reddish", "green", "blue"]},
        "age_in_years": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 3},
    },
    "required": ["first_name", "favourite_colour", "age_in_years", "tags"],
    "additionalProperties": False,
}
GRAMMARS = (
    Grammar(GrammarKind.JSON_SCHEMA, json.dumps(PERSON)),
    Grammar(GrammarKind.REGEX, r"(Mon|Tues|Wednes|Thurs|Fri)day, \d{1,2} (January|June|July) \d{4}"),
    Grammar(GrammarKind.CHOICE, json.dumps(["positive", "negative", "neither positive nor negative"])),
    Grammar(
        GrammarKind.EBNF,
        'start: %json {"type": "integer", "minimum": 0, "maximum": 99} " apples and " %json {"type": "boolean"}',
    ),
)
TRIES = 10
TELLS_S = 1.0  # above the time between two words of a node
QUESTION = "Describe Ada Lovelace as JSON, or name a day."
DRAFTERS: tuple[dict[str, object], ...] = (
    {"drafter": "none"},
    {"drafter": "ngram", "num_draft_tokens": 6, "tree": "static", "tree_width": 2},
    {"drafter": "mtp", "num_draft_tokens": 4},
    {"drafter": "lookahead", "num_draft_tokens": 8, "tree": "static", "tree_width": 2},
)


def requests(folder: Path, temperature: float) -> list[SequenceRequest]:
    tokenizer = Tokenizer.from_folder(folder)
    prompt = tuple(tokenizer.apply_chat_template([{"role": "user", "content": QUESTION}]))
    stops = tuple(tokenizer.eos_token_ids)
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=90, stop_token_ids=stops)
    return [SequenceRequest(f"g{i}", prompt, replace(params, grammar=g)) for i, g in enumerate(GRAMMARS)]


def follows_grammars(runner: ModelRunner, folder: Path) -> ModelRunner:
    runner.grammars = GrammarCompiler(folder, runner.vocab_size)
    return runner


@pytest.fixture(scope="module")
def engines(smollm2_folder: Path) -> Engines:
    return Engines(smollm2_folder, "bf16", batch=8)


def test_text_is_that_of_plain_decoding(smollm2_folder: Path, engines: Engines) -> None:
    """Sampled; tiny models do the same greedily (test_grammar_in_engine.py)."""
    asked = requests(smollm2_folder, 1.0)
    off = SpeculationParams(num_draft_tokens=0)
    alone = follows_grammars(engines.variant(drafter="none"), smollm2_folder)
    plain = [answers(alone, [replace(one, speculation=off)])[0] for one in asked]
    assert [one.finish_reason for one in plain] == [FinishReason.STOP] * len(asked)
    text = Tokenizer.from_folder(smollm2_folder).decode(plain[0].token_ids)
    jsonschema.validate(json.loads(text), PERSON)
    for options in DRAFTERS:
        done = answers(follows_grammars(engines.variant(**options), smollm2_folder), asked)
        assert [one.token_ids for one in done] == [one.token_ids for one in plain], options
        assert sum(one.stats.rounds_by_drafter.get("grammar", 0) for one in done) > 0


@pytest.mark.e2e
async def test_a_killed_decode_node_changes_no_character(smollm2_folder: Path) -> None:
    runner = build_runner(NodeConfig(model=str(smollm2_folder), drafter="none", threads=1, kv_cache_tokens=2048))
    asked = requests(smollm2_folder, 1.0)[:1]
    expected = answers(runner, asked)[0]
    with serve("--prefill-nodes", "1", "--decode-nodes", "2", "--drafter", "ngram", "--kv-cache-tokens", "2048") as one:
        for _ in range(TRIES):
            tokens, text, killed = await _streamed_through_a_death(one, asked[0])
            assert tokens == expected.token_ids
            jsonschema.validate(json.loads(text), PERSON)
            if killed:
                break
    assert killed


async def _streamed_through_a_death(server: Server, request: SequenceRequest) -> tuple[list[int], str, bool]:
    """Tokens and text of a stream whose decode node is killed once it has brought some, and whether it was: the node
    may be done before it tells that it is busy."""
    params = replace(request.params, stop_token_ids=())
    message = inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=request.prompt_token_ids), sampling=sampling_to_proto(params)
    )
    tokens: list[int] = []
    text, killed, asked_for = "", False, False
    async with grpc.aio.insecure_channel(server.grpc) as channel:
        async for chunk in inference_pb2_grpc.InferenceStub(channel).GenerateStream(message, timeout=120):
            tokens += chunk.token_ids
            text += chunk.text
            if len(tokens) > 4 and not asked_for:
                asked_for = True
                killed = await _kill_the_busy_node(server)
    return tokens, text, killed


async def _kill_the_busy_node(server: Server) -> bool:
    async with AsyncClient(server.grpc) as client:
        end = time.monotonic() + TELLS_S
        while not (busy := [n for n in (await client.model_info()).nodes if n.role == "decode" and n.running]):
            if time.monotonic() > end:
                return False
            await asyncio.sleep(0.02)
    port = int(busy[0].address.rpartition(":")[2])
    for process in server.processes():
        if any(c.laddr and c.laddr.port == port and c.status == psutil.CONN_LISTEN for c in process.net_connections()):
            process.kill()
            return True
    return False
