"""Grammars on real nodes: a prefill and a decode node, apart, with the hand-off between them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import grpc.aio
import pytest

from paceline.config import NodeConfig
from paceline.request import Grammar, GrammarKind
from paceline.v1 import node_pb2
from paceline.wire import sequence_to_proto
from tests.grammar.test_grammar_in_engine import JSON, plain, requests
from tests.support.grammar_engines import grammar_prefill_runner, grammar_request, grammar_runner
from tests.support.node_pair import Pair, pair

MODES: dict[str, dict[str, object]] = {
    "plain": {"drafter": "none"},
    "copying": {"drafter": "ngram", "tree": "static", "tree_width": 2},
    "heads": {"drafter": "mtp", "num_draft_tokens": 3, "tree": "static", "tree_width": 2},
    "hidden rows": {"drafter": "mtp", "num_draft_tokens": 3, "handoff": "hidden_states"},
    "no draft state": {"drafter": "mtp", "num_draft_tokens": 3, "handoff": "none"},
}


def nodes(folder: Path, **options: object) -> tuple[NodeConfig, Path]:
    config = {"model": "tiny", "prefill_chunk_tokens": 16, "max_running": 8}
    return NodeConfig.model_validate(config | options), folder


async def refusal(nodes: Pair, grammar: Grammar, **changes: object) -> str:
    """What the decode node says of a request that it refuses."""
    request = replace(grammar_request(grammar), **changes)  # type: ignore[arg-type]
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        async for _ in nodes.decode_stub.Decode(node_pb2.DecodeRequest(sequence=sequence_to_proto(request))):
            pass
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    return str(refused.value.details())


@pytest.mark.parametrize("mode", MODES)
async def test_apart_equals_plain_decoding(tmp_path: Path, mode: str) -> None:
    """sglang #29110, sglang #25388: the prefill node samples the first token, and decode goes on after it."""
    config, folder = nodes(tmp_path, **MODES[mode])
    expected = plain(folder, 1.0)
    prefill = grammar_prefill_runner(folder, **MODES[mode])
    decode = grammar_runner(folder, page_size=8, **MODES[mode])
    async with pair(config, prefill, decode) as apart:
        answers = await asyncio.gather(*(apart.generate(request) for request in requests(1.0)))
        assert [answer.token_ids for answer in answers] == expected
        alone = [await apart.generate(request, local_prefill=True) for request in requests(1.0)]
        assert [answer.token_ids for answer in alone] == expected
        await apart.all_released()


async def test_a_node_names_what_it_refuses_and_serves_on(tmp_path: Path) -> None:
    config, folder = nodes(tmp_path, drafter="ngram")
    async with pair(config, grammar_runner(folder), grammar_runner(folder)) as apart:
        assert "grammar" in await refusal(apart, Grammar(GrammarKind.REGEX, "(a"))
        strange = await refusal(apart, JSON, output_token_ids=(5, 6))
        assert strange.startswith("output_token_ids: do not follow the grammar")
        request = requests(0.0)[0]
        assert (await apart.generate(request)).token_ids == plain(folder, 0.0)[0]
        await apart.all_released()


async def test_a_grammar_that_becomes_too_complex_ends_its_own_stream_alone(tmp_path: Path) -> None:
    """After three letters, thousands of optional parts may come next: more than a row of the parser may hold."""
    config, folder = nodes(tmp_path, drafter="none")
    parts = " ".join(f"p{i}?" for i in range(1500))
    rules = "\n".join(f'p{i}: "x{i}"' for i in range(1500))
    large = Grammar(GrammarKind.EBNF, f"start: /[a-z]{{3}}/ many\nmany: {parts}\n{rules}\n")
    async with pair(config, grammar_runner(folder), grammar_runner(folder)) as apart:
        other = asyncio.create_task(apart.generate(requests(0.0)[0]))
        doomed = grammar_request(large, index=3, temperature=1.0)
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await apart.generate(doomed, local_prefill=True)
        assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "too complex" in str(failed.value.details())
        assert (await other).token_ids == plain(folder, 0.0)[0]
        await apart.all_released()
